"""From a row of any data set to a task: which column is what, and what the policy is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trivet.data.preference import common_prefix
from trivet.data.shapes import plain_message, transcript
from trivet.recipe import schema
from trivet.rewards.answers import last_boxed
from trivet.tasks.base import TasksetError, nearest
from trivet.tasks.layouts import Dropped
from trivet.tasks.readers import Record
from trivet.types import Message, SchemaError, Task, ToolCall, canonical_json

KNOWN = ("prompt", "answer", "id", "messages", "response", "chosen", "rejected", "label")
_PAIR = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "problem", "instruction", "query")
_PLACE = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
_CALCULATION = re.compile(r"<<[^<>]*>>")
_MARK = "####"


class FieldMap:
    """Which column of a source each of our fields is read from.

    Without a mapping of its own, a source with `messages` is read as conversations, else the first of prompt,
    question, problem, instruction, query is the prompt; conversations `chosen` and `rejected` (lists of
    messages, or texts of Human: and Assistant: turns) bring their own; a `label` of true or false beside an
    answer says whether the answer is good. Two well-known shapes are then
    understood: an `answer` that ends in "#### 72" (GSM8K), and a `solution` with a box (MATH). Raises
    TasksetError for unknown fields and columns.
    """

    def __init__(self, config: schema.Tasks, first: Record) -> None:
        self.config = config
        columns = list(first.row)
        self.columns = dict(config.fields)
        self.whole = False  # chosen and rejected are whole conversations
        for ours, column in self.columns.items():
            if ours not in KNOWN and not ours.startswith("payload."):
                raise TasksetError(
                    f"fields: {ours!r} is not one of ours{nearest(ours, KNOWN)} (known: {', '.join(KNOWN)}, "
                    "payload.NAME)"
                )
            if not _has(first.row, column):
                raise TasksetError(
                    f"{first.place}: fields.{ours}: no column {column!r}{nearest(column, columns)} "
                    f"(columns: {', '.join(columns)})"
                )
        self._guess(columns, first)
        self._check_template(columns, first)

    def _guess(self, columns: list[str], first: Record) -> None:
        if "prompt" not in self.columns and "messages" not in self.columns:
            guess = next((name for name in ("messages", *_PROMPTS) if name in columns), None)
            if guess is None and self._whole_pair(columns, first):
                guess, self.whole = "", True
            if guess is None:
                raise TasksetError(
                    f"{first.place}: which column is the prompt? Say `fields: {{prompt: COLUMN}}` "
                    f"(columns: {', '.join(columns)})"
                )
            if guess:
                self.columns["messages" if guess == "messages" else "prompt"] = guess
        for ours in ("answer", "response", *_PAIR):
            if ours not in self.columns and ours in columns:
                self.columns[ours] = ours
        answered = {"messages", "response"} & set(self.columns)
        if "label" not in self.columns and answered and isinstance(first.row.get("label"), bool):
            self.columns["label"] = "label"
        self.solution = "solution" if "solution" in columns and "response" not in self.columns else None

    def _whole_pair(self, columns: list[str], first: Record) -> bool:
        """Chosen and rejected are whole conversations: what both begin with is the prompt."""
        named = [self.columns.get(side, side) for side in _PAIR]
        values = [first.row[name] for name in named if name in columns]
        return len(values) == 2 and all(isinstance(v, list) or transcript(v) is not None for v in values)

    def _check_template(self, columns: list[str], first: Record) -> None:
        shown = [name for _, name in _PLACE.findall(self.config.template) if name]
        hidden = {self.columns.get("answer"), self.columns.get("response"), "answer", "response"}
        hidden |= {self.columns.get(side) for side in _PAIR} | set(_PAIR)
        hidden |= {self.solution}
        for name in shown:
            if name != "prompt" and name not in columns:
                raise TasksetError(
                    f"template: no column {name!r}{nearest(name, [*columns, 'prompt'])}; for the letters "
                    f"{{{name}}} themselves write {{{{{name}}}}}"
                )
            if name in hidden:
                raise TasksetError(
                    f"template: {{{name}}} would show the policy the answer; for the letters themselves "
                    f"write {{{{{name}}}}}"
                )
        if "messages" in self.columns and self.config.template != "{prompt}":
            raise TasksetError(f"{first.place}: a template is for prompts, but the rows are read as messages")

    # -- one row ---------------------------------------------------------------------------------

    def task(self, record: Record) -> Task:
        """The row as a task. Raises TasksetError naming the place, Dropped for rows without an answer."""
        payload = self._payload(record)
        messages = self._messages(record)
        given = self._get(record, "id") if "id" in self.columns else ""
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise TasksetError(f"{record.place}: id is {given!r}; an id is text or a whole number")
        try:
            canonical_json(payload)  # refuses dates, bytes and NaN
            return Task(
                env=self.config.env,
                messages=messages,
                payload=payload,
                id=str(given),
                tags=tuple(self.config.tags),
                source=self.config.source,
                licence=self.config.licence,
            )
        except (SchemaError, TypeError, ValueError) as error:
            raise TasksetError(f"{record.place}: {error}") from error

    def _get(self, record: Record, ours: str) -> Any:
        column = self.columns[ours]
        if not _has(record.row, column):
            raise TasksetError(f"{record.place}: column {column!r} (our {ours}) is missing in this row")
        return _read(record.row, column)

    def _messages(self, record: Record) -> tuple[Message, ...]:
        if "messages" in self.columns:
            return _conversation(self._get(record, "messages"), record.place)
        if "prompt" not in self.columns:
            return self._opening(record)
        prompt = self._get(record, "prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            shown = (
                "empty" if prompt in (None, "") or isinstance(prompt, str) else f"a {type(prompt).__name__}"
            )
            raise TasksetError(
                f"{record.place}: column {self.columns['prompt']!r} (our prompt) is {shown}; it must be text"
            )
        row = {**record.row, "prompt": prompt}
        text = _PLACE.sub(
            lambda m: "{" + m.group(1) + "}" if m.group(1) else _text(row, m.group(2), record.place),
            self.config.template,
        )
        return (Message("user", text),)

    def _opening(self, record: Record) -> tuple[Message, ...]:
        """What the two conversations of a pair begin with."""
        chosen, rejected = (_conversation(self._side(record, side), record.place) for side in _PAIR)
        if chosen == rejected:
            raise Dropped("same_answers")
        n = common_prefix(chosen, rejected)
        while n and chosen[n - 1].role == "assistant":  # they part at a later question: still one opening
            n -= 1
        if n == 0:
            raise TasksetError(
                f"{record.place}: chosen and rejected must begin with the same messages, the first of them "
                "not the assistant's: what both begin with is the prompt"
            )
        return chosen[:n]

    def _side(self, record: Record, side: str) -> Any:
        """chosen or rejected, in our messages. What is neither text nor messages stays as it is."""
        given = self._get(record, side)
        if self.whole and isinstance(given, str):
            turns = transcript(given)
            if turns is None:
                raise TasksetError(
                    f"{record.place}: {side} must be a conversation as in the first row, a list of messages "
                    f"or a text that begins with Human:, not {given[:60]!r}"
                )
            given = turns
        if isinstance(given, Mapping):
            return _conversation([given], record.place)[0].to_dict()
        if isinstance(given, list) and given:
            return [message.to_dict() for message in _conversation(given, record.place)]
        return given

    def _payload(self, record: Record) -> dict[str, Any]:
        payload: dict[str, Any] = {}
        for ours in self.columns:
            if ours.startswith("payload."):
                payload[ours.removeprefix("payload.")] = self._get(record, ours)
        if "answer" in self.columns:
            payload |= self._answer(record)
        elif self.solution and "messages" not in self.columns:
            payload |= _from_solution(record.row.get(self.solution))
        for side in _PAIR:
            if side in self.columns:
                payload[side] = self._side(record, side)
        if "label" in self.columns:
            payload["label"] = self._get(record, "label")
        if "response" in self.columns:
            payload["response"] = self._response(record)
        elif self.solution and isinstance(record.row.get(self.solution), str):
            payload["response"] = record.row[self.solution]
        return payload

    def _response(self, record: Record) -> str:
        response = self._get(record, "response")
        if not isinstance(response, str) or not response:
            shown = "empty" if response in (None, "") else f"a {type(response).__name__}"
            raise TasksetError(
                f"{record.place}: column {self.columns['response']!r} (our response) is {shown}; "
                "it must be text"
            )
        return response

    def _answer(self, record: Record) -> dict[str, Any]:
        answer = self._get(record, "answer")
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise Dropped("no_answer")
        if isinstance(answer, str) and _MARK in answer:
            worked, _, final = answer.rpartition(_MARK)
            if not final.strip():
                raise Dropped("no_answer")
            text = _CALCULATION.sub("", worked).rstrip()
            return {"answer": final.strip(), "response": f"{text}\n\\boxed{{{final.strip()}}}"}
        return {"answer": answer}


def _from_solution(solution: Any) -> dict[str, Any]:
    boxed = last_boxed(solution) if isinstance(solution, str) else None
    if boxed is None:
        raise Dropped("no_answer")
    return {"answer": boxed}


def _has(row: Mapping[str, Any], column: str) -> bool:
    """The column, or a.b.c inside nested columns, is there."""
    if column in row:
        return True
    head, dot, rest = column.partition(".")
    inner = row.get(head)
    return bool(dot) and isinstance(inner, Mapping) and _has(inner, rest)


def _read(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    head, _, rest = column.partition(".")
    return _read(row[head], rest)


def _text(row: Mapping[str, Any], name: str, place: str) -> str:
    value = row.get(name)
    if value is None or isinstance(value, dict | list):
        raise TasksetError(f"{place}: template column {name!r} holds {type(value).__name__}, not text")
    return str(value)


def _conversation(value: Any, place: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise TasksetError(f"{place}: messages must be a list of messages with role and content")
    out: list[Message] = []
    for index, one in enumerate(value):
        if not isinstance(one, Mapping):
            raise TasksetError(f"{place}: message {index} is a {type(one).__name__}, not an object")
        # Columnar files fill the keys a message lacks with null.
        given = plain_message({key: item for key, item in one.items() if item is not None})
        try:
            if calls := given.get("tool_calls"):
                given["tool_calls"] = [_call(call) for call in calls]
            out.append(Message.from_dict(given))
        except (SchemaError, KeyError, TypeError) as error:
            raise TasksetError(f"{place}: message {index}: {error}") from error
    return tuple(out)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of ours, or in the form {"id", "type": "function", "function": {"name", "arguments"}}."""
    import json

    inner = call.get("function")
    if not isinstance(inner, Mapping):
        return dict(call)
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise SchemaError(f"tool call {inner.get('name')!r}: arguments are not JSON ({error})") from error
    return ToolCall(str(inner["name"]), arguments, str(call.get("id") or "")).to_dict()
