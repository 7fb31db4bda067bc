"""LLaMA-Factory's newer files: content is a list of `{"type": text | reasoning | tool_call, "value": TEXT}`,
each message with a `loss_weight`. The parts themselves are read in `parts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.anthropic import has_parts
from trivet.data.formats.openai import column_of, read_chat

__all__ = ["is_llamafactory", "read_chat"]


def is_llamafactory(row: Mapping[str, Any]) -> bool:
    key = column_of(row)
    messages = row.get(key) if key else None
    return isinstance(messages, list) and has_parts(messages, lambda part: "type" in part and "value" in part)
