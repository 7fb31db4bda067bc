"""Passes by name, as a recipe lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from trivet.data.screen.dense import DenseOptions, DensePass
from trivet.data.screen.exact import CharacterOptions, CharacterPass, PrefixOptions, PrefixPass
from trivet.data.screen.items import PreparedItems
from trivet.data.screen.ngrams import NgramOptions, exhaustive_8gram, sampled_8gram
from trivet.data.screen.verdicts import Pass

_KINDS: dict[str, tuple[Any, Callable[[PreparedItems, Any], Pass], dict[str, Any]]] = {
    "sampled_8gram": (NgramOptions, sampled_8gram, {}),
    "exhaustive_8gram": (NgramOptions, exhaustive_8gram, {"samples": None}),
    "prefix_hash": (PrefixOptions, PrefixPass, {}),
    "char_60gram": (CharacterOptions, CharacterPass, {}),
    "dense": (DenseOptions, DensePass, {}),
}
PASSES = tuple(_KINDS)
"""Names of the passes, in the usual order."""


def make_pass(name: str, items: PreparedItems, options: Mapping[str, Any] | None = None) -> Pass:
    """A pass by its name; `options` are the fields of its options class. Raises ValueError for others."""
    if name not in _KINDS:
        raise ValueError(f"no pass is called {name!r}{_near(name, PASSES)}; there are {', '.join(PASSES)}")
    kind, build, preset = _KINDS[name]
    known = [field.name for field in fields(kind)]
    for key in options or {}:
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}{_near(key, known)}; it has {', '.join(known)}")
    return build(items, kind(**{**preset, **(options or {})}))


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
