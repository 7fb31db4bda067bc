"""Rows that hold a task and what somebody answered: what is scored offline; and pairs of answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trivet.data.preference import pair_messages
from trivet.data.sft import ExampleDropped
from trivet.recipe import schema
from trivet.rewards.offline import Sample
from trivet.tasks.base import TasksetError, nearest
from trivet.tasks.layouts import Dropped
from trivet.tasks.load import load_tasks, reader, records
from trivet.tasks.readers import Record
from trivet.types import Message, SchemaError, Task, Termination, content_hash

RESPONSES = ("response", "completion", "generation", "prediction", "output", "model_output")
LISTS = ("responses", "completions", "generations", "predictions", "outputs", "samples")
_ENDED = {"length": Termination.LENGTH, "max_tokens": Termination.LENGTH}
_FINISH = ("finish_reason", "termination")
_IDS = ("task_id", "id", "key", "question_id")


@dataclass(slots=True)
class Answers:
    """Samples in the rows' order; `dropped` counts rows (or answers) without one, by cause. `env` is the
    environment the rows ask for: their own tasks', or that of the layout they were recognised as."""

    samples: list[Sample] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    layout: str = ""
    env: str = ""


def response_message(value: Any) -> Message:
    """An answer as a message: a message, or its text. What stands before `</think>` is its reasoning, as it
    would be if the policy had written it here. Raises Dropped."""
    if isinstance(value, Mapping):
        try:
            return Message.from_dict({"role": "assistant", **value})
        except SchemaError as error:
            raise Dropped("bad_response") from error
    if not isinstance(value, str):
        raise Dropped("no_response" if value is None else "bad_response")
    if not value.strip():
        raise Dropped("empty_response")
    before, mark, after = value.rpartition("</think>")
    if not mark:
        return Message("assistant", value)
    return Message("assistant", after.strip(), reasoning=before.removeprefix("<think>").strip())


def _column(row: Mapping[str, Any], named: str | None, place: str) -> str | None:
    """The column that holds the answer or answers; None: the messages end with it."""
    if named is not None:
        if named not in row:
            raise TasksetError(
                f"{place}: no column {named!r}{nearest(named, row)} (columns: {', '.join(row)})"
            )
        return named
    found = next((name for name in (*RESPONSES, *LISTS) if name in row), None)
    if found is None and "messages" not in row:
        raise TasksetError(
            f"{place}: which column is the answer that was given? Say --response COLUMN (columns: "
            f"{', '.join(row)})"
        )
    return found


def _given(row: Mapping[str, Any], column: str) -> list[Any]:
    value = row.get(column)
    return list(value) if isinstance(value, list) else [value]


def _ended(row: Mapping[str, Any]) -> Termination:
    said = next((row[name] for name in _FINISH if isinstance(row.get(name), str)), "")
    if said in _ENDED:
        return _ENDED[said]
    return Termination(said) if said in list(Termination) else Termination.FINISHED


def _own_task(row: Mapping[str, Any], place: str) -> Task:
    try:
        return Task.from_dict(row["task"])
    except (SchemaError, TypeError, KeyError) as error:
        raise TasksetError(f"{place}: its task: {error}") from error


def _maker(
    config: schema.Tasks, first: Record, column: str | None, known: Mapping[str, Task] | None, out: Answers
) -> Callable[[Record], Task]:
    """How a row's task is found: by its id in another taskset, as it stands, or as tasksets are read."""
    if known is not None:
        return lambda record: _by_id(record.row, known)
    if isinstance(first.row.get("task"), Mapping):
        out.env = str(first.row["task"].get("env", ""))
        return lambda record: _own_task(record.row, record.place)

    def bare(record: Record) -> Record:
        # The answer is not the task's: as `response` it would be read as a worked one.
        row = {key: value for key, value in record.row.items() if key != column}
        if column is None:
            row["messages"] = row["messages"][:-1]
        return Record(row, record.place)

    make, layout, _ = reader(config, bare(first))
    if layout is not None:
        out.layout, out.env = layout.name, layout.env
    return lambda record: make(bare(record))


def _by_id(row: Mapping[str, Any], known: Mapping[str, Task]) -> Task:
    name = next((str(row[key]) for key in _IDS if isinstance(row.get(key), str | int)), None)
    if name is None:
        raise Dropped("no_id")
    if name not in known:
        raise Dropped("unknown_task")
    return known[name]


def _ids(config: schema.Tasks) -> tuple[dict[str, Task], str]:
    """Tasks by their ids, and by the last part of an id ("humaneval/3": the source's own is "3" or
    "HumanEval/3"), where that names one; and the environment of their layout."""
    taskset = load_tasks(config)
    out: dict[str, Task] = {}
    doubled: set[str] = set()
    for task in taskset.tasks:
        tail = task.id.rpartition("/")[2]
        for name in {tail, f"HumanEval/{tail}", f"Mbpp/{tail}"} - {task.id}:
            if out.setdefault(name, task) is not task:
                doubled.add(name)
    for name in doubled:
        del out[name]
    return {**out, **{task.id: task for task in taskset.tasks}}, taskset.layout_env


def read_answers(
    config: schema.Tasks, *, response: str | None = None, tasks: schema.Tasks | None = None
) -> Answers:
    """The answers of the source that `config` names.

    A row is {"task": ..., "response": ...}; or what a taskset's row is, with the answer in `response` (the
    column's name; else the first of RESPONSES and LISTS, or the last of `messages`); or, with `tasks`, an
    answer to the task of that id. A list holds several answers. Raises TasksetError.
    """
    out = Answers()
    rows = iter(records(config.source, config.subset, config.split))
    stop = None if config.limit is None else config.skip + config.limit
    rows = islice(rows, config.skip, stop)
    first = next(rows, None)
    if first is None:
        raise TasksetError(f"{config.source}: there is no row")
    column = _column(first.row, response, first.place)
    known = None
    if tasks is not None:
        known, out.env = _ids(tasks)
    make = _maker(config, first, column, known, out)
    for record in chain([first], rows):
        out.rows += 1
        try:
            given = _given(record.row, column) if column else [_last(record.row)]
            task = make(record)
        except Dropped as cause:
            out.dropped[str(cause)] += 1
            continue
        for number, value in enumerate(given):
            try:
                message = response_message(value)
            except Dropped as cause:
                out.dropped[str(cause)] += 1
                continue
            place = f"{record.place}#{number}" if len(given) > 1 else record.place
            out.samples.append(Sample(task, message, _ended(record.row), place))
    if not out.samples:
        causes = ", ".join(f"{cause}: {n}" for cause, n in out.dropped.items())
        raise TasksetError(f"{config.source}: no answer is left to be scored ({causes})")
    return out


def _last(row: Mapping[str, Any]) -> Any:
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role", last.get("from")) not in ("assistant", "gpt"):
        raise Dropped("no_response")
    return last.get("content", last.get("value"))


# -- pairs -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pairs:
    """Valid pairs as (chosen, rejected); `dropped` counts the others by cause, `first` quotes one of each."""

    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    layout: str = ""


def read_pairs(config: schema.Tasks) -> Pairs:
    """The pairs of a preference set: Arena, HelpSteer, HH-RLHF, and whatever has prompt, chosen and rejected.

    Degenerate ones are dropped and counted: ties, the same answer twice, an empty answer, nobody's question,
    rows that cannot be read. Raises TasksetError when none is left.
    """
    out = Pairs()
    stop = None if config.limit is None else config.skip + config.limit
    rows = islice(records(config.source, config.subset, config.split), config.skip, stop)
    first = next(rows, None)
    if first is None:
        raise TasksetError(f"{config.source}: there is no row")
    make, layout, _ = reader(config, first)
    out.layout = layout.name if layout else ""
    for record in chain([first], rows):
        out.rows += 1
        try:
            out.pairs.append(_pair(make(record), record.place))
        except (Dropped, ExampleDropped, TasksetError) as error:
            cause = getattr(error, "cause", "") or ("unreadable" if isinstance(error, TasksetError) else "")
            cause = cause or str(error)
            out.dropped[cause] += 1
            out.first.setdefault(cause, f"{record.place}: {error}")
    if not out.pairs:
        causes = "; ".join(f"{cause} {n} ({out.first[cause]})" for cause, n in out.dropped.items())
        raise TasksetError(f"{config.source}: no valid pair: {causes}")
    return out


def _pair(task: Task, place: str) -> tuple[Sample, Sample]:
    sides = []
    for name, messages in zip(("chosen", "rejected"), pair_messages(task), strict=True):
        *opening, answer = messages
        if answer.role != "assistant":
            raise Dropped("no_answer")
        if not answer.text.strip():
            raise Dropped("empty_answer")
        if not any(one.role == "user" and one.text.strip() for one in opening):
            raise Dropped("no_user_turn")
        payload = {key: one for key, one in task.payload.items() if key not in ("chosen", "rejected")}
        asked = tuple(replace(one, train=None) for one in opening)
        sides.append(
            Sample(
                replace(task, messages=asked, payload=payload),
                replace(answer, train=None),
                place=f"{place} {name}",
            )
        )
    if sides[0].task.messages == sides[1].task.messages and (
        sides[0].message.text.strip() == sides[1].message.text.strip()
    ):
        raise Dropped("same_answers")
    return sides[0], sides[1]


# -- prompts ---------------------------------------------------------------------------------------


def prompt_rows(tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
    """Each different opening once, as a row of a taskset that `load_tasks` reads: id and messages."""
    seen: set[str] = set()
    for task in tasks:
        messages = [message.to_dict() for message in task.messages]
        name = content_hash(messages)
        if name not in seen:
            seen.add(name)
            yield {"id": name, "messages": messages}


def export_prompts(tasks: Sequence[Task], path: Path) -> int:
    """Write `prompt_rows` as JSONL; the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    n = 0
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="utf-8") as file:
        for row in prompt_rows(tasks):
            file.write(json.dumps(row, ensure_ascii=True) + "\n")
            n += 1
    new.replace(path)
    return n
