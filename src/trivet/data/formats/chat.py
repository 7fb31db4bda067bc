"""What every format is read into: a conversation that may still need repair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trivet.data.record import RecordDropped
from trivet.types import Part

CALL = "call"  # a role of ShareGPT's: the message is nothing but the text of a call

ROLE_WORDS: dict[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "environment": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "tool_result": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}

_FLAGS = ("train", "loss", "weight", "loss_weight")
_IDS = ("id", "instance_id", "uuid", "uid", "traj_id", "prompt_id", "conversation_id")
_SYSTEM = ("system", "system_prompt", "system_message")


@dataclass(slots=True)
class Call:
    """A tool call. `arguments` is what the source has: an object, or its text. `id` is "" where the format
    has none and None where the format has one but this call lacks it."""

    name: str
    arguments: Any
    id: str | None = ""


@dataclass(slots=True)
class Draft:
    """A message on its way. `call_text` holds calls still written as text; `cut`: it breaks off."""

    role: str
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    calls: list[Call] | None = None
    call_text: list[str] | None = None
    call_id: str | None = None
    name: str | None = None
    train: float | None = None
    cut: bool = False


@dataclass(slots=True)
class Chat:
    """A conversation on its way; `rejected` is the whole other conversation of a preference pair."""

    drafts: list[Draft]
    tools: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[Draft] | None = None
    done: list[str] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """Notes a repair, once."""
        if name not in self.done:
            self.done.append(name)


def role_of(word: Any) -> str:
    """Our role (or CALL) for a source's word. Raises RecordDropped."""
    if isinstance(word, str):
        role = ROLE_WORDS.get(word) or ROLE_WORDS.get(word.strip().lower())
        if role is not None:
            return role
    raise RecordDropped(
        "unknown_role", f"role {str(word)[:60]!r} is not known (known: {', '.join(ROLE_WORDS)})"
    )


def loss_weight(message: Mapping[str, Any]) -> float | None:
    """The source's own flag as Message.train: None when it says nothing or 1, 0.0 when it says no.

    Read are OpenAI's `weight`, Axolotl's `train`, AgentTuning's `loss` and LLaMA-Factory's `loss_weight`;
    one that says no wins. Raises RecordDropped.
    """
    weight: float | None = None
    for key in _FLAGS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RecordDropped(
                "bad_loss_flag", f"{key} is {str(value)[:40]!r}; it must be true, false or a number from 0 on"
            )
        if not value:
            return 0.0
        if value != 1:
            weight = float(value)
    return weight


def row_id(row: Mapping[str, Any]) -> str:
    """The row's own id as text; "" when it has none."""
    for key in _IDS:
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    return ""


def system_of(row: Mapping[str, Any]) -> list[Draft]:
    """The system prompt that stands beside the messages, as no or one message. Raises RecordDropped."""
    for key in _SYSTEM:
        value = row.get(key)
        if isinstance(value, list):  # Anthropic's blocks
            from trivet.data.formats.parts import read_parts

            value = read_parts(value, text_only=True).text()
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        return [Draft("system", plain_text(value, key))]
    return []


def plain_text(value: Any, what: str) -> str:
    """Text, or a number as text. Raises RecordDropped for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise RecordDropped("bad_content", f"{what} is a {type(value).__name__}; it must be text")
