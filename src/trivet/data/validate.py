"""Whether a conversation can be trained on: what is broken is refused by name, what is odd is warned of.

Run it after the rounds are split: a broken answer then costs the one example that trains it. Nothing is
changed here; a call's arguments are compared with the schema that was declared for its tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from trivet.data.interleave import is_trained, is_wrapped_result
from trivet.data.record import Record, RecordDropped
from trivet.types import Message, ToolCall

CAUSES: dict[str, str] = {
    "empty_conversation": "the record has no messages",
    "not_trained": "no assistant message has a loss weight above 0",
    "empty_answer": "a trained assistant message has neither text nor a call (reasoning alone is no answer)",
    "unbalanced_reasoning": "an assistant text holds a thinking tag without its partner, or a message's "
    "reasoning holds thinking tags of its own",
    "result_in_answer": "a trained assistant text holds a tool result: the model would learn to write them",
    "system_not_first": "a system message stands behind another message",
    "result_without_call": "a tool message follows neither an assistant message with calls nor another one",
    "result_of_no_call": "a tool message answers a call that the message before the results did not make",
    "call_answered_twice": "two tool messages answer the same call",
    "results_out_of_order": "results of parallel calls are not in the calls' order, which is all that "
    "templates without call ids go by",
    "call_not_answered": "the assistant goes on although a call has no result, or one of several has none",
    "call_id_repeated": "two calls have the same id",
}
"""Why `validate` refuses a record."""

WARNINGS: dict[str, str] = {
    "arguments_invalid": "a call's arguments do not fit the schema that was declared for its tool",
    "tool_undeclared": "a call names a tool that the record, which declares tools, does not declare",
    "schema_invalid": "the schema declared for a called tool cannot be used; its arguments were not compared",
    "call_without_result": "a request follows calls of which none has a result: the response ended with them",
    "result_misnamed": "a tool message names another tool than the call that it answers",
}
"""What `validate` warns of; the record is kept."""


class Caveat(NamedTuple):
    """A warning: `cause` is a key of WARNINGS, `text` says what was seen."""

    cause: str
    text: str


_TAG = re.compile(r"<(/?)think(?:ing)?>")
_RESULT = re.compile(r"<tool_response>|</tool_response>")
_SHOWN = 80  # characters of foreign text in a message


def validate(record: Record, *, check_arguments: bool = True) -> tuple[Record, list[Caveat]]:
    """The record, and what is odd about it. Raises RecordDropped with a key of CAUSES.

    A preference pair's rejected answer must be as sound as the chosen one; a conversation may end with calls
    or with results, as the last example of a trajectory that was cut.
    """
    caveats = _check(record, record.messages, check_arguments)
    if record.rejected is not None:
        for what, message in _each(record.rejected, "rejected message"):
            _check_text(record, what, message)
        if not any(m.role == "assistant" for m in record.rejected):
            raise RecordDropped(
                "not_trained", f"{_where(record)}: the rejected answer has no assistant message"
            )
    return record, caveats


def _check(record: Record, messages: list[Message], check_arguments: bool) -> list[Caveat]:
    if not messages:
        raise RecordDropped("empty_conversation", f"{_where(record)}: it has no messages")
    for what, message in _each(messages, "message"):
        _check_text(record, what, message)
    caveats = _check_turns(record, messages)
    if not any(map(is_trained, messages)):
        raise RecordDropped("not_trained", f"{_where(record)}: {CAUSES['not_trained']}")
    if check_arguments and record.tools:
        caveats += _check_calls(record, messages)
    return caveats


def _each(messages: list[Message], name: str) -> Iterator[tuple[str, Message]]:
    return ((f"{name} {i}", message) for i, message in enumerate(messages))


def _where(record: Record) -> str:
    return record.place or record.id or "record"


def _check_text(record: Record, what: str, message: Message) -> None:
    if message.role != "assistant":
        return
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    where = f"{_where(record)}: {what}"
    depth = 0
    for tag in _TAG.finditer(text):
        depth += -1 if tag[1] else 1
        if depth not in (0, 1):
            break
    if depth:
        raise RecordDropped("unbalanced_reasoning", f"{where}: thinking tags do not pair: {text[:_SHOWN]!r}")
    if message.reasoning and (tag := _TAG.search(message.reasoning)):
        raise RecordDropped("unbalanced_reasoning", f"{where}: its reasoning holds {tag[0]!r}")
    if not is_trained(message):
        return
    if _RESULT.search(text):
        raise RecordDropped("result_in_answer", f"{where}: {CAUSES['result_in_answer']}")
    media = not isinstance(content, str) and any(part.type != "text" for part in content)
    if not (text.strip() or media or message.tool_calls):
        only = " but reasoning" if (message.reasoning or "").strip() else ""
        raise RecordDropped("empty_answer", f"{where}: it has nothing{only}")


class _Pending:
    """The calls of one assistant message and what has been answered of them."""

    def __init__(self, calls: tuple[ToolCall, ...] = ()) -> None:
        self.calls = calls
        self.answered: set[int] = set()

    def answer(self, message: Message) -> tuple[str, ToolCall | None]:
        """(a cause to refuse, or none; the call that the result belongs to)."""
        left = [i for i in range(len(self.calls)) if i not in self.answered]
        if not self.calls:
            return "result_without_call", None
        if not message.tool_call_id:  # results without ids keep the calls' order
            found = left[0] if left else -1
        else:
            found = next((i for i, c in enumerate(self.calls) if c.id == message.tool_call_id), -1)
        if found in self.answered:
            return "call_answered_twice", None
        if found < 0:
            return "result_of_no_call", None
        if found != left[0]:
            return "results_out_of_order", None
        self.answered.add(found)
        return "", self.calls[found]

    @property
    def open(self) -> list[ToolCall]:
        return [call for i, call in enumerate(self.calls) if i not in self.answered]


def _check_turns(record: Record, messages: list[Message]) -> list[Caveat]:
    """Roles in an order that templates can write, and each call answered once, in order, at once."""
    caveats: list[Caveat] = []
    pending = _Pending()
    seen: set[str] = set()
    for i, message in enumerate(messages):
        where = f"{_where(record)}: message {i}"
        if message.role == "tool":
            cause, call = pending.answer(message)
            if cause or call is None:
                raise RecordDropped(cause, f"{where} (answering {message.tool_call_id!r}): {CAUSES[cause]}")
            if message.name and message.name != call.name:
                text = f"{where}: the result is of {message.name!r}, the call of {call.name!r}"
                caveats.append(Caveat("result_misnamed", text))
            continue
        if pending.open and not is_wrapped_result(message):
            text = f"{where} follows, but the call of {pending.open[0].name!r} has no result"
            if message.role != "user" or pending.answered:
                raise RecordDropped("call_not_answered", text)
            caveats.append(Caveat("call_without_result", text))  # a call that ended its response
        if message.role == "system" and i:
            raise RecordDropped("system_not_first", f"{where}: {CAUSES['system_not_first']}")
        pending = _Pending(message.tool_calls)
        for call in message.tool_calls:
            if call.id and call.id in seen:
                raise RecordDropped("call_id_repeated", f"{where}: a call before has the id {call.id!r}, too")
            seen.add(call.id)
    if pending.answered and pending.open:
        name = pending.open[0].name
        raise RecordDropped(
            "call_not_answered", f"{_where(record)}: it ends with results, but the call of {name!r} has none"
        )
    return caveats


# -- arguments -------------------------------------------------------------------------------------


def declared_schemas(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The schema of each tool's arguments by the tool's name; {} where none is given. Reads the chat form
    ({"type": "function", "function": {name, parameters}}), the flat one, and input_schema."""
    out: dict[str, Any] = {}
    for tool in tools:
        inner = tool.get("function")
        body = inner if isinstance(inner, Mapping) else tool
        name = body.get("name")
        if isinstance(name, str):
            given = next((body[k] for k in ("parameters", "input_schema") if body.get(k) is not None), {})
            out[name] = given
    return out


def _check_calls(record: Record, messages: list[Message]) -> list[Caveat]:
    schemas = declared_schemas(record.tools)
    validators: dict[str, Any] = {}
    caveats: list[Caveat] = []
    for i, message in enumerate(messages):
        for call in message.tool_calls:
            where = f"{_where(record)}: message {i}: {call.name}"
            if call.name not in schemas:
                caveats.append(Caveat("tool_undeclared", f"{where} is not among {sorted(schemas)[:8]}"))
                continue
            try:
                if call.name not in validators:
                    validators[call.name] = _validator(json.dumps(schemas[call.name]))
                if problem := _misfit(call.arguments, validators[call.name]):
                    caveats.append(Caveat("arguments_invalid", f"{where}: {problem}"))
            except Exception as error:  # a foreign schema can make the library raise anything; it is counted
                text = f"{type(error).__name__}: {getattr(error, 'message', error)}"
                caveats.append(Caveat("schema_invalid", f"{where}: {text[: 2 * _SHOWN]}"))
    return caveats


def _misfit(arguments: dict[str, Any], validator: Any) -> str:
    """Where and how arguments break a schema; nothing where they keep to it."""
    if _plainly_fits(arguments, validator.schema):
        return ""
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments))
    return "" if error is None else f"{error.json_path}: {error.message[: 2 * _SHOWN]}"


_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
    "boolean": bool,
}
_NOTES = {"description", "title", "default", "examples"}


def _plainly_fits(value: Any, schema: Any) -> bool:
    """Whether a value keeps to a schema of types, properties, items and choices; False: the library decides.
    Most tools' schemas are such, and the library takes several times as long."""
    if not isinstance(schema, dict):
        return False
    for key, rule in schema.items():
        if key in _NOTES:
            continue
        if key == "type":
            kind = _TYPES.get(rule) if isinstance(rule, str) else None
            fits = kind is not None and isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        elif key == "enum":
            fits = isinstance(value, str) and value in rule
        elif key == "required":
            fits = isinstance(value, dict) and all(name in value for name in rule)
        elif key == "properties":
            fits = isinstance(value, dict) and all(
                _plainly_fits(inner, rule[name]) for name, inner in value.items() if name in rule
            )
        elif key == "additionalProperties" and isinstance(value, dict):
            fits = rule is True or value.keys() <= schema.get("properties", {}).keys()
        elif key == "items":
            fits = isinstance(value, list) and all(_plainly_fits(inner, rule) for inner in value)
        else:
            fits = False
        if not fits:
            return False
    return True


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Any:
    """A validator for a schema, given as JSON. Raises what the library raises."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(schema_text)
    if not isinstance(schema, dict):
        raise TypeError(f"the schema is no object but {schema_text[:_SHOWN]}")
    base = validator_for(schema, default=Draft202012Validator)
    base.check_schema(schema)
    # Of its own accord the library would fetch references from the network: an empty registry has none.
    return _without_patterns(base)(schema, registry=Registry())


@lru_cache(maxsize=16)
def _without_patterns(base: Any) -> Any:
    """The validator class without regular expressions: those of a data set are foreign code that can run for
    hours on the right text. Where keys are named by pattern, additional ones cannot be told and pass."""
    from jsonschema.validators import extend

    def passes(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        return iter(())

    def additional(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if "patternProperties" not in schema:
            yield from base.VALIDATORS["additionalProperties"](validator, value, instance, schema) or ()

    changed = dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), passes)
    return extend(base, validators={**changed, "additionalProperties": additional})
