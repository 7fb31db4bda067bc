"""The program in an answer: its last fenced block of Python."""

from __future__ import annotations

import re
import textwrap

_OPEN = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+.-]*)[^`\n]*$")
_PYTHON = frozenset({"python", "python3", "py", "py3"})


def last_block(text: str) -> str | None:
    """The last closed block labelled as Python; without one the last that has no label. None without either.

    A block ends at a fence of its own kind, at least as long, alone on its line. Linear in the text's length.
    """
    labelled = bare = None
    fence, label, start = "", "", 0
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines):
        stripped = line.strip()
        if not fence:
            if stripped[:3] in ("```", "~~~") and (match := _OPEN.match(line)):
                fence, label, start = match.group(1), match.group(2).lower(), number + 1
        elif stripped[:3] == fence[:3] and not stripped.strip(fence[0]) and len(stripped) >= len(fence):
            found = (start, number)
            if label in _PYTHON:
                labelled = found
            elif not label:
                bare = found
            fence = ""
    place = labelled or bare
    return textwrap.dedent("\n".join(lines[place[0] : place[1]])) if place else None
