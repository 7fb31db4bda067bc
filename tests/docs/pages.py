"""Markdown pages and what is to be done with their blocks.

A mark is an HTML comment on the line before a block:

    <!-- runs -->            the Python block is executed, after the page's earlier ones, in one namespace
    <!-- file: NAME -->      the block is written to NAME in the page's own folder
    <!-- needs: NAME ... --> the recipe block is planned with those files of the page in place
    <!-- text -->            the block only looks like a language
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>\w+)(?:: (?P<argument>[^>]*?))? -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, its mark, and where it stands."""

    place: str
    language: str
    code: str
    mark: str
    argument: str


def pages() -> list[Path]:
    """All pages a reader may open, in order."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(found)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str = "") -> list[Block]:
    """The page's fenced blocks, of one language if named."""
    text = page.read_text(encoding="utf-8")
    out = []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "".join(line[indent:] or "\n" for line in match["code"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("language")) + 1
        place = f"{name_of(page)}:{line}"
        block = Block(place, match["language"], code, match["mark"] or "", (match["argument"] or "").strip())
        if language in ("", block.language):
            out.append(block)
    return out


def write_files(page: Path, folder: Path) -> list[Path]:
    """The page's `file:` blocks, written to `folder`."""
    out = []
    for block in blocks(page):
        if block.mark == "file":
            path = folder / block.argument
            path.write_text(block.code, encoding="utf-8")
            out.append(path)
    return out
