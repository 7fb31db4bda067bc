"""A prompt and its answer in two columns, each text or messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.chat import Chat, Draft, plain_text, system_of
from trivet.data.formats.openai import end_of_row, read_message
from trivet.data.formats.tools import tools_of
from trivet.data.record import RecordDropped

PROMPTS = ("prompt", "question", "problem", "instruction", "query")
ANSWERS = (
    "response",
    "completion",
    "output",
    "generation",
    "generated_solution",
    "solution",
    "canonical_solution",
    "answer",
)
_REASONING = ("reasoning", "reasoning_content", "thinking")


def columns_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """(column of the prompt, column of the answer): the first known name of each that holds something."""
    prompt = next((key for key in PROMPTS if _holds(row.get(key))), None)
    answer = next((key for key in ANSWERS if _holds(row.get(key))), None)
    return (prompt, answer) if prompt and answer else None


def _holds(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict) and ("role" in value[0] or "from" in value[0])
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def is_pair(row: Mapping[str, Any]) -> bool:
    return columns_of(row) is not None


def read_pair(row: Mapping[str, Any], text_only: bool) -> Chat:
    """Raises RecordDropped."""
    columns = columns_of(row)
    if columns is None:
        raise RecordDropped(
            "unknown_format", f"no prompt and answer among the columns {sorted(map(str, row))[:20]}"
        )
    drafts = system_of(row)
    add_turns(row[columns[0]], "user", drafts, text_only)
    first = len(drafts)
    add_turns(row[columns[1]], "assistant", drafts, text_only)
    if len(drafts) == first + 1 and drafts[first].reasoning is None:
        thought = next((row[key] for key in _REASONING if isinstance(row.get(key), str)), None)
        drafts[first].reasoning = None if thought is None else thought.strip()
    end_of_row(row, drafts)
    return Chat(drafts, tools_of(row))


def add_turns(value: Any, role: str, drafts: list[Draft], text_only: bool) -> None:
    """Appends a column's messages: text is one message of that role. Raises RecordDropped."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        for message in value:
            read_message(message, drafts, text_only)
    else:
        drafts.append(Draft(role, plain_text(value, f"the {role}'s text")))
