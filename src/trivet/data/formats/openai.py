"""Messages with role and content: OpenAI's chat form and what others made of it.

Read are `tool_calls`, the older `function_call` with answers of role `function`, null content, part lists,
loss flags, and reasoning beside the content (`reasoning_content`, `reasoning`, `thinking`). Our own messages
are in this form too. ShareGPT's from and value may stand in for role and content, message by message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.chat import CALL, Call, Chat, Draft, loss_weight, role_of, system_of
from trivet.data.formats.literal import NotReadable, read_json
from trivet.data.formats.parts import Parts, read_parts
from trivet.data.formats.tools import tools_of
from trivet.data.record import RecordDropped
from trivet.types import Part

COLUMNS = ("messages", "conversations", "conversation", "trajectory", "dialogue", "dialog", "chat", "turns")
_REASONING = ("reasoning", "reasoning_content", "thinking")
_MEDIA_COLUMNS = {"images": "<image>", "audios": "<audio>", "videos": "<video>"}
_CUT = ("length", "max_tokens")


def column_of(row: Mapping[str, Any]) -> str | None:
    """The column that holds the messages: a list of objects, or the JSON text of one."""
    for key in COLUMNS:
        value = row.get(key)
        if isinstance(value, list) and (not value or isinstance(value[0], dict)):
            return key
        if isinstance(value, str) and value.lstrip()[:2] in ("[{", "[]"):
            return key
    return None


def is_openai(row: Mapping[str, Any]) -> bool:
    return column_of(row) is not None


def read_chat(row: Mapping[str, Any], text_only: bool) -> Chat:
    """A row with a column of messages. Raises RecordDropped."""
    key = column_of(row)
    value = row.get(key) if key else None
    if isinstance(value, str):
        try:
            value = read_json(value)
        except NotReadable as error:
            raise RecordDropped("bad_message", f"column {key!r} is no JSON: {error}") from None
    if not isinstance(value, list):
        raise RecordDropped("bad_message", f"column {key!r} holds no list of messages")
    drafts = system_of(row)
    for message in value:
        read_message(message, drafts, text_only)
    end_of_row(row, drafts)
    _place_media(row, drafts, text_only)
    return Chat(drafts, tools_of(row))


def end_of_row(row: Mapping[str, Any], drafts: list[Draft]) -> None:
    """A row's finish reason is its last message's."""
    if drafts and (row.get("finish_reason") in _CUT or row.get("stop_reason") in _CUT):
        drafts[-1].cut = True


def read_message(message: Any, drafts: list[Draft], text_only: bool) -> None:
    """Appends the message; one that holds results beside other things becomes several. Raises
    RecordDropped."""
    if not isinstance(message, dict):
        raise RecordDropped("bad_message", f"a message is a {type(message).__name__}, not an object")
    if "role" in message:
        word, content = message["role"], message.get("content")
    elif "from" in message:
        word, content = message["from"], message.get("value")
    else:
        raise RecordDropped("bad_message", f"a message without role; it has {sorted(map(str, message))[:10]}")
    if content is None:
        content = _other_content(message)
    role = role_of(word)
    if len(message) == 2 and isinstance(content, str) and role != CALL:
        drafts.append(Draft(role, content))
        return
    if isinstance(content, dict):
        content = [content]
    parts: Parts | None = None
    if isinstance(content, list):
        parts = read_parts(content, text_only)
        content = parts.content()
    elif not isinstance(content, str):
        raise RecordDropped("bad_content", f"content is a {type(content).__name__}; it must be text or parts")
    if role == CALL:
        drafts.append(_call_alone(content, message, drafts))
        return
    _append(message, role, content, parts, drafts)


def _other_content(message: Mapping[str, Any]) -> Any:
    for key in ("content", "value", "text"):
        if message.get(key) is not None:
            return message[key]
    return ""


def _append(
    message: Mapping[str, Any],
    role: str,
    content: str | tuple[Part, ...],
    parts: Parts | None,
    drafts: list[Draft],
) -> None:
    if parts is not None and parts.results:
        drafts += [Draft("tool", result.content, call_id=result.call_id) for result in parts.results]
        if not content:
            return
    draft = Draft(role, content)
    name = message.get("name")
    draft.name = name if isinstance(name, str) and name else None
    if role == "assistant":
        draft.reasoning = _reasoning(message)
        draft.calls = _calls(message)
        draft.train = loss_weight(message)
        draft.cut = message.get("finish_reason") in _CUT or message.get("stop_reason") in _CUT
        if parts is not None:
            draft.calls = [*(draft.calls or []), *parts.calls] or None
            draft.call_text = parts.call_text or None
            if draft.reasoning is None:
                draft.reasoning = parts.thought()
    else:
        if parts is not None and (parts.calls or parts.call_text):
            raise RecordDropped("bad_tool_call", f"a {role} message holds calls")
        if role == "tool":
            given = message.get("tool_call_id") or message.get("tool_use_id")
            draft.call_id = given if isinstance(given, str) and given else None
    drafts.append(draft)


def _reasoning(message: Mapping[str, Any]) -> str | None:
    for key in _REASONING:
        value = message.get(key)
        if isinstance(value, str):
            return value.strip()
    return None


def _call_alone(content: Any, message: Mapping[str, Any], drafts: list[Draft]) -> Draft:
    """A message of role function_call. Calls in the text form that its system prompt asks for stay text."""
    if not isinstance(content, str):
        raise RecordDropped("bad_tool_call", "a function_call message is not text")
    train = loss_weight(message)
    if content.lstrip().startswith("<function="):
        last = drafts[-1] if drafts else None
        if last and last.role == "assistant" and isinstance(last.content, str) and last.train == train:
            drafts.pop()  # one turn: words, then the call
            last.content = f"{last.content}\n\n{content}".lstrip("\n")
            return last
        return Draft("assistant", content, train=train)
    return Draft("assistant", "", call_text=[content], train=train)


def _calls(message: Mapping[str, Any]) -> list[Call] | None:
    given = message.get("tool_calls")
    if isinstance(given, str) and given.strip():
        try:
            given = read_json(given)
        except NotReadable as error:
            raise RecordDropped("bad_tool_call", f"tool_calls: {error}") from None
    if isinstance(given, dict):
        given = [given]
    if given and not isinstance(given, list):
        raise RecordDropped("bad_tool_call", f"tool_calls is a {type(given).__name__}; it must be a list")
    calls = [one_call(call) for call in given or ()]
    older = message.get("function_call")
    if isinstance(older, dict):
        calls.append(one_call(older))
        calls[-1].id = calls[-1].id or ""  # that form has no ids
    return calls or None


def one_call(call: Any) -> Call:
    """A call as an object: OpenAI's, its inner function alone, or ours. Raises RecordDropped."""
    if not isinstance(call, dict):
        raise RecordDropped("bad_tool_call", f"a tool call is a {type(call).__name__}, not an object")
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    name = function if isinstance(function, str) else inner.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RecordDropped("bad_tool_call", f"a tool call has no name: {str(call)[:120]}")
    arguments = next((inner[k] for k in ("arguments", "parameters", "args", "input") if k in inner), None)
    given = call.get("id")
    return Call(name.strip(), arguments, given if isinstance(given, str) and given else None)


def _place_media(row: Mapping[str, Any], drafts: list[Draft], text_only: bool) -> None:
    """Media named in a column of the row stand where the text has <image>, <audio>, <video>."""
    for column, mark in _MEDIA_COLUMNS.items():
        given = row.get(column)
        files = [given] if isinstance(given, str) and given else given
        if not isinstance(files, list) or not files:
            continue
        if text_only:
            raise RecordDropped("non_text_content", f"{len(files)} {column} in a text-only run")
        left = list(files)
        for draft in drafts:
            if isinstance(draft.content, str) and mark in draft.content:
                draft.content = _with_media(draft.content, mark, column.removesuffix("s"), left)
        if left:
            raise RecordDropped(
                "bad_media", f"{len(left)} of {len(files)} {column} have no {mark} in the text"
            )


def _with_media(text: str, mark: str, kind: str, left: list[Any]) -> tuple[Part, ...]:
    pieces: list[Part] = []
    for index, piece in enumerate(text.split(mark)):
        if index:
            if not left or not isinstance(left[0], str):
                raise RecordDropped("bad_media", f"the text has a {mark} too many, or its file is not named")
            pieces.append(Part(kind, attachment=left.pop(0)))  # type: ignore[arg-type]
        if piece.strip():
            pieces.append(Part("text", piece))
    return tuple(pieces)
