"""What a task is and how its conversation is written down.

Everything here is plain, immutable and JSON-able; `to_dict` and `from_dict` are exact inverses
and refuse keys they do not know, so that a misspelt field is an error and not a silent loss.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)
PartType = Literal["text", "image", "audio", "video"]
PART_TYPES: tuple[str, ...] = get_args(PartType)


class SchemaError(ValueError):
    """A record does not have the shape it must have; the message says where and what to do."""


def _check_record(what: str, data: Any, allowed: Sequence[str], required: Sequence[str] = ()) -> None:
    """Raises SchemaError unless `data` is an object with the `required` keys and none but the `allowed`."""
    if not isinstance(data, Mapping):
        raise SchemaError(f"{what} must be an object, not a {type(data).__name__}")
    unknown = sorted(set(map(str, data)) - set(allowed))
    if unknown:
        raise SchemaError(f"{what}: unknown key(s) {unknown}; known keys are {sorted(allowed)}")
    for key in required:
        if key not in data:
            raise SchemaError(f"{what}: {key!r} is missing; it has {sorted(data)}")


def _check_text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise SchemaError(f"{what} must be text, not {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call an assistant message makes. `arguments` is an object, never a string."""

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def __post_init__(self) -> None:
        _check_text("tool call: name", self.name)
        _check_text(f"tool call {self.name!r}: id", self.id)
        if not isinstance(self.arguments, dict):
            raise SchemaError(
                f"tool call {self.name!r}: arguments must be an object, got "
                f"{type(self.arguments).__name__}; parse the JSON string before building the call"
            )

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "arguments": self.arguments}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ToolCall:
        _check_record("tool call", data, ("id", "name", "arguments"), ("name", "arguments"))
        return cls(name=data["name"], arguments=data["arguments"], id=data.get("id") or "")


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a message's content: text, or a medium kept as an attachment named by hash."""

    type: PartType
    text: str = ""
    attachment: str = ""

    def __post_init__(self) -> None:
        if self.type not in PART_TYPES:
            raise SchemaError(f"content part type {self.type!r} is not one of {list(PART_TYPES)}")
        unused = "attachment" if self.type == "text" else "text"
        for key in ("text", "attachment"):
            _check_text(f"{self.type} part: {key}", getattr(self, key))
        if getattr(self, unused):
            raise SchemaError(f"a {self.type} part holds no {unused}: {getattr(self, unused)[:60]!r}")

    def to_dict(self) -> dict[str, Any]:
        key = "text" if self.type == "text" else "attachment"
        return {"type": self.type, key: getattr(self, key)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Part:
        """Keys that are null count as absent: columnar files fill in what a part lacks."""
        _check_record("content part", data, ("type", "text", "attachment"), ("type",))
        text, attachment = (data.get(key) for key in ("text", "attachment"))
        return cls(data["type"], "" if text is None else text, "" if attachment is None else attachment)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `content` is text or a tuple of parts. `reasoning` is None when there was no reasoning block
    and "" when there was an empty one. `train` is the message's loss weight for supervised rows:
    None leaves the decision to the role (assistant 1, others 0).
    """

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    train: float | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise SchemaError(f"message role {self.role!r} is not one of {list(ROLES)}")
        if not isinstance(self.content, str | tuple):
            raise SchemaError(
                f"{self.role} message: content must be text or a tuple of parts, got "
                f'{type(self.content).__name__}; write "" for empty content'
            )
        for key, value in (
            ("reasoning", self.reasoning),
            ("tool_call_id", self.tool_call_id),
            ("name", self.name),
        ):
            if value is not None and not isinstance(value, str):
                _check_text(f"{self.role} message: {key}", value)
        if self.train is not None and not (
            isinstance(self.train, int | float) and 0 <= self.train < math.inf
        ):
            raise SchemaError(
                f"{self.role} message: train is {self.train!r}: a loss weight is a finite number, 0 or more"
            )
        if self.train and self.role != "assistant":
            raise SchemaError(f"a {self.role} message cannot be trained (train={self.train})")

    @property
    def text(self) -> str:
        """The content as text; parts are joined by newlines. Raises SchemaError on media."""
        if isinstance(self.content, str):
            return self.content
        media = [part.type for part in self.content if part.type != "text"]
        if media:
            raise SchemaError(f"{self.role} message holds media {media}; this path reads text only")
        return "\n".join(part.text for part in self.content)

    def to_dict(self) -> dict[str, Any]:
        content = self.content
        out: dict[str, Any] = {
            "role": self.role,
            "content": content if isinstance(content, str) else [p.to_dict() for p in content],
        }
        if self.tool_calls:
            out["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.reasoning is not None:
            out["reasoning"] = self.reasoning
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        if self.train is not None:
            out["train"] = self.train
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        known = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name", "train")
        _check_record("message", data, known)
        if "role" not in data:
            raise SchemaError("message without a role")
        content = data.get("content", "")
        if isinstance(content, list | tuple):
            content = tuple(Part.from_dict(part) for part in content)
        return cls(
            role=data["role"],
            content="" if content is None else content,
            reasoning=data.get("reasoning"),
            tool_calls=tuple(ToolCall.from_dict(c) for c in data.get("tool_calls") or ()),
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
            train=data.get("train"),
        )


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values give equal text. Refuses NaN and Infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the canonical JSON of `value`.

    Half a surrogate pair, which JSON escapes can bring in and UTF-8 cannot hold, counts as what it is.
    """
    return hashlib.sha256(canonical_json(value).encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be played and judged.

    `id` is stable across runs: the source's own, or the hash of environment, messages and payload.
    `payload` holds what the verifier needs (JSON-able). `profile` maps a policy and configuration
    hash to measured pass rates.
    """

    env: str
    messages: tuple[Message, ...]
    payload: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    tags: tuple[str, ...] = ()
    source: str = ""
    licence: str = ""
    profile: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.messages:
            raise SchemaError(f"task {self.id or '(no id)'}: it has no opening message")
        if not self.id:
            content = [self.env, [m.to_dict() for m in self.messages], self.payload]
            object.__setattr__(self, "id", content_hash(content))

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "id": self.id,
            "env": self.env,
            "messages": [m.to_dict() for m in self.messages],
            "payload": self.payload,
        }
        if self.tags:
            out["tags"] = list(self.tags)
        for key in ("source", "licence", "profile"):
            if getattr(self, key):
                out[key] = getattr(self, key)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Task:
        known = ("id", "env", "messages", "payload", "tags", "source", "licence", "profile")
        _check_record("task", data, known, ("env", "messages"))
        return cls(
            env=data["env"],
            messages=tuple(Message.from_dict(m) for m in data["messages"]),
            payload=dict(data.get("payload", {})),
            id=data.get("id", ""),
            tags=tuple(data.get("tags", ())),
            source=data.get("source", ""),
            licence=data.get("licence", ""),
            profile=dict(data.get("profile", {})),
        )
