"""Text on its way to a person. Model output is hostile: `printable` for terminals, `esc` for the report."""

from __future__ import annotations

import html
from typing import Any

# Control characters but newline and tab, surrogates, and the signs that turn the direction of text.
_HIDDEN = {
    *range(0x09),
    *range(0x0B, 0x20),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *(0x200E, 0x200F, 0xFEFF, 0xFFFE, 0xFFFF),
}
_VISIBLE = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def printable(text: str) -> str:
    """Text without control characters: what a model wrote must not drive the terminal."""
    return text.translate(_VISIBLE).encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates


def esc(value: Any) -> str:
    """`value` as text that is safe in element content and in quoted attributes."""
    return html.escape(printable(str(value)), quote=True)
