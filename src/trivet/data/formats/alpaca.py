"""Alpaca: `instruction`, `input`, `output`, with `system` and `history` (pairs of question and answer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.chat import Chat, Draft, loss_weight, plain_text, system_of
from trivet.data.formats.openai import end_of_row
from trivet.data.formats.tools import tools_of
from trivet.data.record import RecordDropped

_INPUTS = ("input", "context")
_OUTPUTS = ("output", "response")


def is_alpaca(row: Mapping[str, Any]) -> bool:
    return "instruction" in row and any(isinstance(row.get(key), str) for key in _OUTPUTS)


def read_alpaca(row: Mapping[str, Any], text_only: bool) -> Chat:
    """The history first, then instruction and input with a blank line between. Raises RecordDropped."""
    drafts = system_of(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RecordDropped(
            "bad_message", f"history is a {type(history).__name__}; it must be a list of pairs"
        )
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RecordDropped("bad_message", "history must be a list of pairs of question and answer")
        drafts.append(Draft("user", plain_text(pair[0], "history")))
        drafts.append(Draft("assistant", plain_text(pair[1], "history")))
    pieces = [row.get("instruction"), *(row.get(key) for key in _INPUTS)]
    asked = [plain_text(piece, "instruction or input") for piece in pieces if piece is not None]
    drafts.append(Draft("user", "\n\n".join(piece for piece in asked if piece.strip())))
    answer = next((row[key] for key in _OUTPUTS if isinstance(row.get(key), str)), None)
    drafts.append(Draft("assistant", plain_text(answer, "output"), train=loss_weight(row)))
    end_of_row(row, drafts)
    return Chat(drafts, tools_of(row))
