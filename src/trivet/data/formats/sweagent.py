"""SWE-agent's trajectories: `{"role": system | user | ai, "text": ..., "system_prompt": ..., "mask": BOOL}`,
where a mask of true marks the messages with loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.chat import CALL, Chat, Draft, plain_text, role_of
from trivet.data.formats.openai import end_of_row
from trivet.data.formats.tools import tools_of
from trivet.data.record import RecordDropped


def is_sweagent(row: Mapping[str, Any]) -> bool:
    steps = row.get("trajectory")
    return isinstance(steps, list) and bool(steps) and isinstance(steps[0], dict) and "text" in steps[0]


def read_sweagent(row: Mapping[str, Any], text_only: bool) -> Chat:
    """Raises RecordDropped."""
    drafts: list[Draft] = []
    for step in row["trajectory"]:
        if not isinstance(step, dict):
            raise RecordDropped("bad_message", f"a step is a {type(step).__name__}, not an object")
        role = role_of(step.get("role"))
        if role == CALL:
            raise RecordDropped("unknown_role", "a trajectory's steps are words; a call alone is none")
        text = step.get("text")
        if role == "system" and text is None:
            text = step.get("system_prompt")
        draft = Draft(role, "" if text is None else plain_text(text, "text"))
        if role == "assistant" and step.get("mask") is False:
            draft.train = 0.0
        drafts.append(draft)
    end_of_row(row, drafts)
    return Chat(drafts, tools_of(row))
