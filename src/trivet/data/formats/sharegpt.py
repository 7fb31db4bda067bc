"""ShareGPT: `conversations` of `{"from": human | gpt | function_call | observation, "value": TEXT}`, with the
tools as JSON text beside them. The messages are read by the same function as OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.openai import column_of, read_chat

__all__ = ["is_sharegpt", "read_chat"]


def is_sharegpt(row: Mapping[str, Any]) -> bool:
    key = column_of(row)
    value = row.get(key) if key else None
    return isinstance(value, list) and bool(value) and "from" in value[0]
