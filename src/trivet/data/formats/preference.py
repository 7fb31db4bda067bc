"""Preference pairs: `chosen` and `rejected` (texts, messages, or HH-RLHF's transcripts), and single answers
with a label of true or false (KTO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trivet.data.formats.chat import Chat, Draft, system_of
from trivet.data.formats.openai import column_of, read_chat
from trivet.data.formats.pairs import PROMPTS, add_turns
from trivet.data.formats.tools import tools_of
from trivet.data.record import RecordDropped
from trivet.data.shapes import transcript

_SIDES = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))


def is_preference(row: Mapping[str, Any]) -> bool:
    return _sides(row) is not None or (isinstance(row.get("label"), bool) and column_of(row) is not None)


def _sides(row: Mapping[str, Any]) -> tuple[str, str] | None:
    for sides in _SIDES:
        if all(isinstance(row.get(side), str | list | dict) for side in sides):
            return sides
    return None


def read_preference(row: Mapping[str, Any], text_only: bool) -> Chat:
    """The chosen conversation, with the rejected one as `Chat.rejected`. Raises RecordDropped."""
    sides = _sides(row)
    if sides is None:
        if row.get("label") is False:
            raise RecordDropped("labelled_bad", "its label is false: the answer is not one to imitate")
        return read_chat(row, text_only)
    opening = system_of(row)
    key = column_of(row)
    if key:
        opening += read_chat({key: row[key]}, text_only).drafts
    else:
        prompt = next((row[key] for key in PROMPTS if isinstance(row.get(key), str | list)), None)
        if prompt is not None:
            add_turns(prompt, "user", opening, text_only)
    chosen, rejected = (_side(row[side], opening, text_only) for side in sides)
    if chosen == rejected:
        raise RecordDropped("same_answers", "chosen and rejected are the same")
    return Chat(chosen, tools_of(row), rejected=rejected)


def _side(value: Any, opening: list[Draft], text_only: bool) -> list[Draft]:
    """The opening and what follows. A side that repeats the opening is the whole conversation."""
    turns = transcript(value)
    drafts: list[Draft] = []
    add_turns(value if turns is None else turns, "assistant", drafts, text_only)
    if drafts and drafts[0].role != "assistant":
        opening = [] if drafts[0].role == "system" else [d for d in opening if d.role == "system"]
    return [*map(_copy, opening), *drafts]


def _copy(draft: Draft) -> Draft:
    calls = None if draft.calls is None else [replace(call) for call in draft.calls]
    return replace(draft, calls=calls)
