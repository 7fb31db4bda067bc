"""Content that is a list of parts or blocks: OpenAI's, Anthropic's and LLaMA-Factory's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trivet.data.formats.chat import Call
from trivet.data.record import RecordDropped
from trivet.types import Part

_TEXT = {"text", "input_text", "output_text", "refusal"}
_THOUGHT = {"thinking", "reasoning", "think", "reasoning_content"}
_USE = {"tool_use", "function_call"}
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
_VALUES = ("text", "value", "thinking", "reasoning", "content", "refusal")
_PLACES = (
    "attachment",
    "value",
    "url",
    "path",
    "image_url",
    "image",
    "audio",
    "video",
    "data",
    "input_audio",
)


@dataclass(slots=True)
class Result:
    """The answer to a call, as a block of a user's message."""

    content: str | tuple[Part, ...]
    call_id: str | None


@dataclass(slots=True)
class Parts:
    """What a list of parts says."""

    pieces: list[Part] = field(default_factory=list)
    reasoning: list[str] | None = None
    calls: list[Call] = field(default_factory=list)
    call_text: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def text(self) -> str:
        """The texts, joined by newlines."""
        return "\n".join(piece.text for piece in self.pieces)

    def content(self) -> str | tuple[Part, ...]:
        """Text where there is nothing but text."""
        if all(piece.type == "text" for piece in self.pieces):
            return self.text()
        return tuple(self.pieces)

    def thought(self) -> str | None:
        return None if self.reasoning is None else "\n".join(self.reasoning).strip()


def read_parts(parts: Sequence[Any], text_only: bool) -> Parts:
    """Reads the parts in order. Raises RecordDropped: media in a text run, parts of an unknown kind."""
    out = Parts()
    for part in parts:
        if isinstance(part, str):
            out.pieces.append(Part("text", part))
        elif isinstance(part, dict):
            _read_part(part, out, text_only)
        else:
            raise RecordDropped("bad_content", f"a content part is a {type(part).__name__}, not an object")
    return out


def _read_part(part: Mapping[str, Any], out: Parts, text_only: bool) -> None:
    kind = part.get("type")
    if not isinstance(kind, str):
        kind = "text" if isinstance(part.get("text"), str) else str(kind)
    if kind in _TEXT:
        out.pieces.append(Part("text", _text(part, kind)))
    elif kind in _THOUGHT:
        out.reasoning = [*(out.reasoning or []), _text(part, kind)]
    elif kind == "redacted_thinking":  # nothing in it can be read
        out.reasoning = out.reasoning or []
    elif kind in _USE:
        name = part.get("name")
        if not isinstance(name, str) or not name:
            raise RecordDropped("bad_tool_call", f"a {kind} block has no name")
        given = part.get("id") or part.get("call_id")
        arguments = part.get("input", part.get("arguments"))
        out.calls.append(Call(name, arguments, given if isinstance(given, str) else None))
    elif kind == "tool_call":
        out.call_text.append(_text(part, kind))
    elif kind == "tool_result":
        out.results.append(_result(part, text_only))
    elif kind in _MEDIA:
        out.pieces.append(_medium(part, kind, text_only))
    else:
        raise RecordDropped("unknown_part", f"content part of the unknown type {kind[:40]!r}")


def _text(part: Mapping[str, Any], kind: str) -> str:
    for key in _VALUES:
        value = part.get(key)
        if isinstance(value, str):
            return value
    if any(key in part for key in _VALUES) and all(part.get(key) is None for key in _VALUES):
        return ""  # columnar files fill with null
    raise RecordDropped("bad_content", f"a {kind} part holds no text; it has {sorted(map(str, part))[:10]}")


def _result(part: Mapping[str, Any], text_only: bool) -> Result:
    content = part.get("content")
    if isinstance(content, list):
        inner = read_parts(content, text_only)
        if inner.results or inner.calls or inner.call_text:
            raise RecordDropped("bad_content", "a tool result holds calls or results")
        content = inner.content()
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise RecordDropped("bad_content", f"a tool result is a {type(content).__name__}, not text")
    call_id = part.get("tool_use_id")
    return Result(content, call_id if isinstance(call_id, str) and call_id else None)


def _medium(part: Mapping[str, Any], kind: str, text_only: bool) -> Part:
    if text_only:
        raise RecordDropped("non_text_content", f"a part of type {kind!r} in a text-only run")
    place: Any = part.get("source", part)
    for _ in range(2):
        if isinstance(place, dict):
            place = next((place[key] for key in _PLACES if place.get(key)), None)
    if not isinstance(place, str):
        raise RecordDropped("bad_media", f"a {kind} part names no file, address or data")
    return Part(_MEDIA[kind], attachment=place)  # type: ignore[arg-type]
