"""Anthropic's messages: content as blocks (text, thinking, tool_use, tool_result), `system` beside them.

A user's message that holds results becomes tool messages, then the user's own text. The blocks themselves are
read in `parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.openai import column_of, read_chat

__all__ = ["is_anthropic", "read_chat"]

_BLOCKS = {"tool_use", "tool_result", "thinking", "redacted_thinking"}


def is_anthropic(row: Mapping[str, Any]) -> bool:
    """Blocks only Anthropic has, or a system prompt made of blocks."""
    key = column_of(row)
    messages = row.get(key) if key else None
    if not isinstance(messages, list):
        return False
    return isinstance(row.get("system"), list) or has_parts(messages, lambda p: p.get("type") in _BLOCKS)


def has_parts(messages: list[Any], test: Any) -> bool:
    """One of the parts of a message's content passes the test."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(isinstance(p, dict) and _safe(test, p) for p in content):
            return True
    return False


def _safe(test: Any, part: Mapping[str, Any]) -> bool:
    try:
        return bool(test(part))
    except TypeError:  # a type that is no word
        return False
