"""Rows of any other form, by a mapping from our fields to their columns.

    mapping: {messages: log.turns, message.role: who, message.content: said, role.assistant: agent}

Columns may be dotted paths into nested objects. Our fields are `messages`, or `prompt` and `response`, or
`chosen` and `rejected` with or without `prompt`; beside them `system`, `tools`, `reasoning`, `id`,
`category`. `message.FIELD` names the key inside a message, `role.OURS` the word for one of our roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.record import RecordDropped
from trivet.types.messages import ROLES

CONVERSATION = ("messages", "prompt", "response", "chosen", "rejected")
FIELDS = (*CONVERSATION, "system", "tools", "reasoning", "id", "category")
MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name", "train")


class MappingError(ValueError):
    """A mapping names fields that are not ours; the message says which are."""


def check_mapping(mapping: Mapping[str, str]) -> None:
    """Raises MappingError."""
    import difflib

    known = [*FIELDS, *(f"message.{f}" for f in MESSAGE_FIELDS), *(f"role.{role}" for role in ROLES)]
    for ours, column in mapping.items():
        if ours not in known:
            near = difflib.get_close_matches(str(ours), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MappingError(f"mapping: {ours!r} is not a field of ours{hint} (known: {', '.join(known)})")
        if not isinstance(column, str) or not column:
            raise MappingError(f"mapping: {ours}: the column must be named by text, not {column!r}")


def mapped(row: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """The row in our columns. A mapping that names where the conversation stands hides all other columns.
    Raises RecordDropped (missing_column)."""
    fields = {ours: column for ours, column in mapping.items() if ours in FIELDS}
    out = {} if any(ours in fields for ours in CONVERSATION) else dict(row)
    for ours, column in fields.items():
        out[ours] = _read(row, column, needed=ours in CONVERSATION)
    keys = {c: o.removeprefix("message.") for o, c in mapping.items() if o.startswith("message.")}
    words = {c: o.removeprefix("role.") for o, c in mapping.items() if o.startswith("role.")}
    if keys or words:
        for ours in CONVERSATION:
            if isinstance(out.get(ours), list):
                out[ours] = [_message(message, keys, words) for message in out[ours]]
    return out


def _read(row: Any, path: str, needed: bool) -> Any:
    """The column of that name, else the path through nested objects."""
    value = row
    if path in row:
        return row[path]
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            if needed:
                raise RecordDropped(
                    "missing_column", f"no column {path!r}; there are {sorted(map(str, row))[:20]}"
                )
            return None
        value = value[name]
    return value


def _message(message: Any, keys: Mapping[str, str], words: Mapping[str, str]) -> Any:
    if not isinstance(message, dict):
        return message
    out = {k: v for k, v in message.items() if k not in keys and k not in keys.values()}
    out |= {ours: message[theirs] for theirs, ours in keys.items() if theirs in message}
    role = out.get("role")
    if isinstance(role, str) and role in words:
        out["role"] = words[role]
    return out
