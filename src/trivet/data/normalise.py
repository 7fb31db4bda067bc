"""From a row of any source to a record of one form: roles, reasoning, calls with objects, loss flags.

A row is read by its format (`formats`), its tool text is turned into calls, what is broken is repaired by
named passes (`repair`), and the result is checked: texts that UTF-8 cannot hold and numbers JSON does not
know are refused. What cannot be used raises RecordDropped with a cause to count by; nothing else is ever
raised for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trivet.data.formats import read_row
from trivet.data.formats.chat import Chat, Draft, row_id
from trivet.data.formats.mapping import mapped
from trivet.data.formats.tooltext import tool_text, tools_from_system
from trivet.data.record import Record, RecordDropped
from trivet.data.repair import REPAIRS, switched_off
from trivet.data.repair.answers import Conflict, settle
from trivet.data.repair.calls import read_arguments
from trivet.data.repair.reasoning import well_formed_only
from trivet.data.repair.turns import REMOVED
from trivet.types import Message, SchemaError, ToolCall

_DEEPEST = 64  # nesting of arguments and tool definitions

# What a format needs in any case, where the pass that does it with repairs is switched off.
_PLAIN: dict[str, Callable[[Chat], None]] = {
    "reasoning_tags": well_formed_only,
    "arguments": partial(read_arguments, literals=False),
}


def normalise(
    row: Any,
    *,
    format: str | None = None,
    source: str = "",
    place: str = "",
    mapping: Mapping[str, str] | None = None,
    text_only: bool = True,
    repairs: Mapping[str, bool] | None = None,
) -> Record:
    """One row as a record.

    `format` is the file's (`formats.detect`); a row of another form is read as what it is. `mapping` names
    the columns of forms that are not known (`formats.mapping`). `text_only` refuses media
    (non_text_content). `repairs` switches passes on or off by name; all are on by default. Raises
    RecordDropped, and KeyError for a format or repair that does not exist.
    """
    off = switched_off(repairs) if repairs else frozenset()
    try:
        if mapping and isinstance(row, Mapping):
            row = mapped(row, mapping)
        chat = read_row(row, format, text_only)
        if not chat.drafts:
            raise RecordDropped("empty_conversation", "there is no message in it")
        if chat.rejected is not None:
            return _pair(row, chat, off, source, place)
        _repair(chat, off)
        return _record(row, chat, source, place)
    except RecursionError:
        raise RecordDropped("too_deep", "its values are nested too deep to be read") from None


def _repair(chat: Chat, off: frozenset[str]) -> None:
    tools_from_system(chat)
    for name, run in REPAIRS.items():
        if name == "arguments":  # the calls must be calls before their arguments are read
            tool_text(chat, literals=name not in off)
            if "reasoning_tags" not in off and any(draft.calls for draft in chat.drafts):
                REPAIRS["reasoning_tags"](chat)  # a block may have stood behind a call
        if name not in off:
            run(chat)
        elif name in _PLAIN:
            _PLAIN[name](chat)
    if not any(draft.role == "assistant" for draft in chat.drafts):
        raise RecordDropped("no_answer", "no assistant message")


def _pair(row: Mapping[str, Any], chat: Chat, off: frozenset[str], source: str, place: str) -> Record:
    """Chosen as messages, rejected from the first message that differs. An answer that breaks off cannot be
    compared with one that does not: the pair is dropped (incomplete)."""
    other = Chat(chat.rejected or [], list(chat.tools))
    # Two results in the rejected answer may be what it is rejected for.
    _repair(chat, off)
    _repair(other, off | {"answer_suffixes"})
    if "answer_suffixes" not in off:
        _settle_rejected(other)
    if REMOVED in chat.done or REMOVED in other.done:
        raise RecordDropped("incomplete", "chosen or rejected does not end with a finished answer")
    record = _record(row, chat, source, place)
    rejected = [_message(draft) for draft in other.drafts]
    shared = 0
    for ours, theirs in zip(record.messages, rejected, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared == len(rejected) or shared == len(record.messages):
        raise RecordDropped("same_answers", "chosen and rejected do not differ")
    record.rejected = rejected[shared:]
    return record


def _settle_rejected(chat: Chat) -> None:
    for draft in chat.drafts:
        if draft.role == "assistant" and isinstance(draft.content, str):
            try:
                draft.content = settle(draft.content)[0]
            except Conflict:
                continue


def _record(row: Mapping[str, Any], chat: Chat, source: str, place: str) -> Record:
    for tool in chat.tools:
        _check_value(tool, 0)
    category = row.get("category")
    return Record(
        [_message(draft) for draft in chat.drafts],
        source=source,
        place=place,
        tools=chat.tools,
        id=row_id(row),
        category=category if isinstance(category, str) else "",
        done=chat.done,
    )


def _message(draft: Draft) -> Message:
    calls: tuple[ToolCall, ...] = ()
    if draft.calls:
        for call in draft.calls:
            _check_value(call.arguments, 0)
            _check_text(call.name)
        calls = tuple([ToolCall(call.name, call.arguments, call.id or "") for call in draft.calls])
    content, reasoning = draft.content, draft.reasoning
    if isinstance(content, str):
        if not content.isascii():
            _check_text(content)
    else:
        for part in content:
            _check_text(part.text)
    if reasoning is not None and not reasoning.isascii():
        _check_text(reasoning)
    try:
        return Message(draft.role, content, reasoning, calls, draft.call_id, draft.name, draft.train)  # type: ignore[arg-type]
    except SchemaError as error:
        raise RecordDropped("bad_message", str(error)) from error


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecordDropped(
            "broken_unicode", "a text holds half a surrogate pair, which UTF-8 cannot"
        ) from None


def _check_value(value: Any, depth: int) -> None:
    """Raises RecordDropped for what cannot be written as JSON in UTF-8."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if value - value != 0:
            raise RecordDropped("bad_number", f"{value} among arguments or tools: JSON has no such number")
    elif isinstance(value, list | dict):
        if depth > _DEEPEST:
            raise RecordDropped("too_deep", f"arguments or tools are nested more than {_DEEPEST} deep")
        for item in value.items() if isinstance(value, dict) else value:
            if isinstance(item, tuple):
                _check_text(str(item[0]))
                item = item[1]
            _check_value(item, depth + 1)
    elif value is not None and not isinstance(value, bool | int):
        raise RecordDropped("bad_content", f"a {type(value).__name__} among arguments or tools is not JSON")
