"""How reasoning and tool calls are written into an answer's text, and read back out of it.

Reasoning stands before the answer in `<think>` tags, a call is a JSON object in `<tool_call>` tags (the
Hermes convention). A policy may write calls that are no calls: those become a `ToolCall` named `INVALID_CALL`
that carries the text and what is wrong with it, at its place among the others, so that the tool loop can
answer with the error instead of losing the rollout; written back, it gives the policy's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trivet.render.base import RenderError
from trivet.types import Message, ToolCall

INVALID_CALL = "<invalid>"
_OPEN, _CLOSE = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|(?=<tool_call>)|\Z)", re.DOTALL)


def call_error(call: ToolCall) -> str | None:
    """What is wrong with a call that could not be read, to be shown to the policy; None for a proper call."""
    return str(call.arguments.get("error", "invalid tool call")) if call.name == INVALID_CALL else None


def write_call(call: ToolCall) -> str:
    if call.name == INVALID_CALL:
        return f"<tool_call>{call.arguments['text']}</tool_call>"
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def write_answer(message: Message, content: str) -> str:
    """`content` with the message's reasoning before it and its calls behind it. Raises RenderError."""
    body = content
    if message.tool_calls:
        calls = "\n".join(write_call(call) for call in message.tool_calls)
        body = f"{content}\n{calls}" if content else calls
    if message.reasoning is None:
        return body
    if _CLOSE in message.reasoning:
        raise RenderError(f"reasoning holds {_CLOSE!r}, which would end it early: {message.reasoning[:80]!r}")
    return f"{_OPEN}\n{message.reasoning}\n{_CLOSE}\n\n{body}"


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning or None, the rest). The opening tag may be missing: generation prompts can hold it."""
    opened = re.match(r"\s*<think>\n?", text)
    start = opened.end() if opened else 0
    end = text.find(_CLOSE, start)
    if end < 0:  # cut off while thinking: all of it is reasoning
        return (text[start:], "") if opened else (None, text)
    rest = text[end + len(_CLOSE) :]
    return text[start:end].removesuffix("\n"), re.sub(r"\A\n{1,2}", "", rest)


def _read_call(text: str, closed: bool, number: int) -> ToolCall:
    def invalid(error: str) -> ToolCall:
        return ToolCall(INVALID_CALL, {"error": f"tool call {number}: {error}", "text": text})

    if not closed:
        return invalid("</tool_call> is missing")
    try:
        data = json.loads(text)
        if isinstance(data, dict) and isinstance(data.get("arguments"), str):
            data["arguments"] = json.loads(data["arguments"])  # encoded twice
    except (ValueError, RecursionError) as error:
        return invalid(f"not valid JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return invalid('it must be an object with a "name" (text) and "arguments" (an object)')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return invalid(f'"arguments" must be an object, not {type(arguments).__name__}')
    return ToolCall(data["name"], arguments, data["id"] if isinstance(data.get("id"), str) else "")


def read_answer(text: str) -> Message:
    """The assistant message a text spells; the inverse of `write_answer`. Never raises."""
    reasoning, body = _split_reasoning(text)
    calls: list[ToolCall] = []
    left: list[str] = []
    position = 0
    for match in _CALL.finditer(body):
        left.append(body[position : match.start()])
        calls.append(_read_call(match.group(1), match.group(2) is not None, len(calls) + 1))
        position = match.end()
    left.append(body[position:])
    if calls:  # what stands before the calls is content; blanks between and behind them are not
        rest = [part.strip("\n") for part in left[1:] if part.strip()]
        body = "\n".join([left[0].removesuffix("\n"), *rest] if left[0] else rest)
    return Message("assistant", body, reasoning=reasoning, tool_calls=tuple(calls))


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """A paragraph for the system message that offers tools, for templates that know none."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can use these tools (one JSON description a line):\n<tools>\n{listed}\n</tools>\n"
        "To use one, answer with a call of this form, several calls one after the other:\n"
        '<tool_call>\n{"name": NAME, "arguments": {ARGUMENT: VALUE}}\n</tool_call>'
    )
