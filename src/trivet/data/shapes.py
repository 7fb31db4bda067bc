"""Conversations in the forms public data sets write them in, brought to ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SPEAKERS = {"human": "user", "gpt": "assistant"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def plain_message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message with our keys; what is ours already stays, what is unknown is left for the reader to refuse.

    `{"from": "human" | "gpt" | ROLE, "value": TEXT}` is role and content; `loss_weight` is `train` (a weight
    of 0 says nothing new about a message that is not the assistant's); a text part's `value` is its `text`.
    """
    out = dict(given)
    if "from" in out and "role" not in out:
        speaker = out.pop("from")
        out["role"] = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        if "value" in out and "content" not in out:
            out["content"] = out.pop("value")
    if "loss_weight" in out and "train" not in out:
        weight = out.pop("loss_weight")
        if weight != 0 or out.get("role") == "assistant":
            out["train"] = weight
    if isinstance(out.get("content"), list):
        out["content"] = [_plain_part(part) for part in out["content"]]
    return out


def _plain_part(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "text" and "value" in part and "text" not in part:
        return {("text" if key == "value" else key): value for key, value in part.items()}
    return part


def transcript(text: Any) -> list[dict[str, Any]] | None:
    """The messages of a text whose paragraphs begin with "Human:" and "Assistant:" (HH-RLHF); None: it is no
    such text."""
    if not isinstance(text, str) or not text.lstrip().startswith("Human:"):
        return None
    pieces = _TURN.split(text.strip())[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[who], "content": said.strip()}
        for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
