"""Dotted paths into plain data: `stages.rl.trainer.lr`, list items by index or by their `name`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PathError(ValueError):
    """A dotted path leads nowhere; the message says at which part and what there is."""


def split_path(text: str) -> list[str]:
    """`a.b.0` as its parts. Raises PathError on an empty part."""
    parts = text.split(".")
    if not all(part.strip() for part in parts):
        raise PathError(f"{text!r} is not a dotted path such as trainer.lr")
    return [part.strip() for part in parts]


def item_index(items: Sequence[Any], part: str, where: str) -> int:
    """The position that `part` names in a list: an index, or the `name` of an item. Raises PathError."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    known = [str(name) for name in names if name is not None] or [str(i) for i in range(len(items))]
    raise PathError(f"{where} has no item {part!r}; it has {', '.join(known) or 'none'}")


def override(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets `value` at `path`; sections that are missing on the way are created. Raises PathError.

    An algorithm given by its name alone is opened, so that its parts can be set: grpo -> {kind: grpo}.
    """
    here: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        where = ".".join(path[:depth]) or "the recipe"
        if isinstance(here, list):
            index = item_index(here, part, where)
            if last:
                here[index] = value
                return
            here = here[index]
        elif isinstance(here, dict):
            if last:
                here[part] = value
                return
            if here.get(part) is None:
                here[part] = type(here)()
            elif part == "algorithm" and isinstance(here[part], str):
                here[part] = {"kind": here[part]}
            here = here[part]
        else:
            raise PathError(f"{where} is {here!r}, a single value: it has no key {part!r}")
