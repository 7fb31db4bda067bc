"""Whether an answer has the form that was asked for: parts of a score, 1 or 0, never a reward by default.

All are one pass over the text.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence

from trivet.rewards import answers

_TAG = re.compile(r"<(/?)([A-Za-z][\w-]{0,63})>")
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)
_DEEPEST_JSON = 200


class FormatError(ValueError):
    """A format part that nobody knows."""


def box(text: str) -> bool:
    """There is a complete \\boxed{...}."""
    return answers.last_boxed(text) is not None


def braces(text: str) -> bool:
    """Every { is closed again and every } was opened; escaped ones are text."""
    return answers.balanced(text)


def tags(text: str, names: Iterable[str] | None = None) -> bool:
    """Tags <name>...</name> are closed in the order in which they were opened. Of `names` (all, if None)."""
    wanted = None if names is None else frozenset(names)
    opened: list[str] = []
    for slash, name in _TAG.findall(text):
        if wanted is not None and name not in wanted:
            continue
        if not slash:
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    return not opened


def think(text: str) -> bool:
    """At most one block of thought: it begins the text, is closed once, and something follows it.

    A text without `<think>` may still hold one `</think>`: templates open the block in the prompt.
    """
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened > 1 or closed > 1 or opened > closed:
        return False
    if opened and not text.lstrip().startswith("<think>"):
        return False
    return not closed or bool(text.partition("</think>")[2].strip())


def fences(text: str) -> bool:
    """Every ``` or ~~~ block is closed by a fence of its kind, at least as long and with nothing after it."""
    open_fence = ""
    for fence, rest in _FENCE.findall(text):
        if not open_fence:
            open_fence = fence
        elif fence[0] == open_fence[0] and len(fence) >= len(open_fence) and not rest.strip():
            open_fence = ""
    return not open_fence


def unfenced(text: str) -> str:
    """The text without one pair of fences around all of it."""
    bare = text.strip()
    if not bare.startswith("```") or not bare.endswith("```") or len(bare) < 6:
        return bare
    first, newline, rest = bare[3:-3].partition("\n")
    return (rest if (newline and first.strip().isalnum()) or not first.strip() else bare[3:-3]).strip()


def is_json(text: str) -> bool:
    """All of the text is one JSON value (it may stand in a fenced block), nested at most 200 deep."""
    bare = unfenced(text)
    depth = deepest = 0
    for char in bare:
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    if deepest > _DEEPEST_JSON:  # brackets in strings count too: nobody writes 200 of them
        return False
    try:
        json.loads(bare)
    except ValueError:
        return False
    return True


FORMATS: dict[str, Callable[[str], bool]] = {
    "box": box,
    "braces": braces,
    "tags": tags,
    "think": think,
    "fences": fences,
    "json": is_json,
}


def validate(names: Sequence[str]) -> None:
    """Raises FormatError for a part that nobody knows."""
    for name in names:
        if name not in FORMATS:
            near = difflib.get_close_matches(name, FORMATS, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise FormatError(f"no format part {name!r}{hint} (known: {', '.join(FORMATS)})")


def parts(text: str, names: Sequence[str] = ("box", "tags")) -> dict[str, float]:
    """{"format/<name>": 1 or 0} for a score's parts. Raises FormatError."""
    validate(names)
    return {f"format/{name}": float(FORMATS[name](text)) for name in names}
