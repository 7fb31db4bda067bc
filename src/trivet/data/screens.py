"""From the recipe's decontamination section to a chain of passes over benchmark items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trivet.data.screen.allow import Allow, load_allow
from trivet.data.screen.benchmarks import Benchmark, load_benchmark
from trivet.data.screen.chain import Screen
from trivet.data.screen.dense import DenseOptions, DensePass
from trivet.data.screen.exact import CharacterOptions, CharacterPass, PrefixOptions, PrefixPass
from trivet.data.screen.items import Guards, PreparedItems, prepare_items
from trivet.data.screen.ngrams import NgramOptions, exhaustive_8gram, sampled_8gram
from trivet.data.screen.verdicts import load_decisions
from trivet.recipe.data import Decontaminate


class ScreenError(ValueError):
    """A pass or an option of one does not exist, or a benchmark gives nothing; says what there is."""


_PASSES: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "sampled_8gram": (sampled_8gram, NgramOptions, {}),
    "exhaustive_8gram": (exhaustive_8gram, NgramOptions, {"samples": None}),
    "prefix_hash": (PrefixPass, PrefixOptions, {}),
    "char_60gram": (CharacterPass, CharacterOptions, {}),
    "dense": (DensePass, DenseOptions, {}),
}
"""name -> (how it is made, its options, their defaults where the pass has its own)."""
PASSES = tuple(_PASSES)


def build_screen(config: Decontaminate) -> tuple[Screen, PreparedItems, list[Benchmark]]:
    """The chain, the items it looks for, and the benchmarks they are of.

    Raises ScreenError, BenchmarkError, SourceError.
    """
    allow = load_allow(Path(config.allow)) if config.allow else Allow()
    benchmarks = [
        load_benchmark(
            one.name,
            one.source,
            fields={"question": one.fields[0], **({"answer": one.fields[1]} if one.fields[1:] else {})}
            if one.fields
            else None,
            subset=one.subset,
            split=one.split,
        )
        for one in config.benchmarks
    ]
    for one in benchmarks:
        if not one.items:
            raise ScreenError(f"benchmark {one.name!r}: none of its {one.rows} rows holds a question")
    items = prepare_items((item for one in benchmarks for item in one.items), Guards(), allow)
    passes = [_pass(given, items, config) for given in config.passes]
    decisions = load_decisions(Path(config.decisions)) if config.decisions else None
    return Screen(passes, allow, decisions), items, benchmarks


def _pass(given: str | dict[str, Any], items: PreparedItems, config: Decontaminate) -> Any:
    options = {"kind": given} if isinstance(given, str) else dict(given)
    kind = str(options.pop("kind", ""))
    if kind not in _PASSES:
        near = get_close_matches(kind, PASSES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ScreenError(f"no decontamination pass {kind!r}{hint} (there are {', '.join(PASSES)})")
    make, of, defaults = _PASSES[kind]
    known = [f.name for f in fields(of)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ScreenError(f"pass {kind} has no option {name!r}{hint} (it has {', '.join(known)})")
    if "borderline" in known:
        options.setdefault("borderline", config.borderline)
    try:
        return make(items, of(**(defaults | options)))
    except (TypeError, ValueError) as error:
        raise ScreenError(f"pass {kind}: {error}") from error
