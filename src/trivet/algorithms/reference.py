"""The reference of algorithms and parts as Markdown, made from the registry and the docstrings.

python -m trivet.algorithms.reference docs/reference/algorithms.md writes it between the page's two marks.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from trivet.algorithms import registered, resolve
from trivet.algorithms.base import Algorithm
from trivet.algorithms.registry import REQUIRED, Option, lookup, options_of
from trivet.recipe.reference import replace_between

BEGIN, END = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
ROLES = {
    "algorithm": "Algorithms",
    "shaping": "Shaping of rewards",
    "credit": "Credit",
    "mask": "Masks",
    "aggregation": "Aggregation",
    "objective": "Objectives",
    "correction": "Corrections",
    "control": "Controls",
}
_WIDTH = 110
_WORDS: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def reference() -> str:
    """Every algorithm and every part: formula, source, options."""
    blocks = []
    for role, title in ROLES.items():
        blocks.append(f"## {title}")
        blocks += [_entry(role, name) for name in registered(role)]
    return "\n\n".join(blocks)


def _entry(role: str, name: str) -> str:
    target, traits = lookup(role, name)
    lines = [f"### {name}" if role == "algorithm" else f"### {role}: {name}", "", _prose(target)]
    if role == "algorithm":
        lines += ["", _composition(resolve(name))]
    own = options_of(target)
    if extended := traits.get("extends"):
        own = {key: option for key, option in own.items() if key not in options_of(extended)}
        lines += ["", f"Further options: those of [{extended.__name__}](#{extended.__name__})."]
    if own:
        lines += ["", "| option | type | default |", "|---|---|---|"]
        lines += [f"| `{key}` | {_type(option.hint)} | {_default(option)} |" for key, option in own.items()]
    needs = getattr(target, "needs", None) or traits.get("needs", ())
    needs = (
        [] if isinstance(needs, property) else sorted(needs)
    )  # what depends on options is said in the text
    if needs and role != "algorithm":
        lines += ["", f"Needs {', '.join(f'`{need}`' for need in needs)}."]
    return "\n".join(lines)


def _prose(target: Any) -> str:
    """The docstring as paragraphs; asterisks outside of code are no emphasis."""
    text = inspect.getdoc(target) or ""
    if inspect.isclass(target) and not target.__dict__.get("__doc__"):
        text = ""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(_escaped(p), _WIDTH, break_long_words=False) for p in paragraphs)


def _escaped(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*<])", r"\\\1", p) for p in parts)


def _composition(algorithm: Algorithm) -> str:
    """The parts it is made of unless a recipe changes them."""
    words = [f"shaping {p.name}" for p in algorithm.shaping]
    words += [f"credit `{algorithm.credit.name}`"] if algorithm.credit else []
    words += [f"mask `{p.name}`" for p in algorithm.masks]
    for stream in algorithm.streams:
        parts = [f"objective `{stream.objective.name}`", f"aggregation `{stream.aggregation.name}`"]
        parts += [f"correction `{p.name}`" for p in stream.corrections]
        parts += [f"control `{stream.control.name}`"] if stream.control else []
        words.append(f"stream `{stream.name}` ({', '.join(parts)})")
    trains = {"rollout": "rollouts", "sft": "worked examples", "preference": "preference pairs"}
    if not algorithm.compares:
        trains["preference"] = "preference pairs and single answers called good or bad"
    on = " and ".join(trains[kind] for kind in sorted(algorithm.consumes))
    text = f"Trains on {on}. Made of: {'; '.join(words)}."
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _type(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type(inner[0]) + "".join(_bounds(extra) for extra in inner[1:])
    if origin is typing.Literal:
        return ", ".join(f"`{word}`" for word in inner)
    if origin in (types.UnionType, typing.Union):
        known = [_type(part) for part in inner if part is not type(None)]
        text = " or ".join(dict.fromkeys(known))
        return "part" if text.startswith("text or section") else text
    if origin is tuple:
        return f"list of {len(inner)} numbers" if inner else "none"
    if origin in (list, dict):
        return "section" if origin is dict else "list of text" if inner == (str,) else "list of parts"
    return _WORDS.get(hint, "value")


def _bounds(extra: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [extra, *getattr(extra, "metadata", ())]
    return "".join(
        f", {sign} {getattr(one, name):g}"
        for one in found
        for name, sign in signs.items()
        if isinstance(getattr(one, name, None), int | float)
    )


def _default(option: Option) -> str:
    value = option.default
    if value is REQUIRED:
        return "**required**"
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def write(page: Path) -> bool:
    """Put the reference between the page's marks; whether it changed. Raises ValueError without marks."""
    return replace_between(page, BEGIN, END, reference())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
