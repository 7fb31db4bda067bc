"""Worked answers as training examples: every example is a group of one rollout whose answer an expert wrote.

Nothing is cut: an example longer than the limit would lose its end, and with it the token that teaches the
policy to stop. It is dropped and counted instead.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trivet.render import Renderer, RenderError, supervised_trace
from trivet.types import (
    Group,
    IssueKey,
    Message,
    Rollout,
    SchemaError,
    Task,
    Termination,
    Trace,
    Unscored,
)

NO_REWARD = Unscored("supervised", "an example to imitate; nothing is scored")


class ExampleDropped(ValueError):
    """An example that cannot be trained. `cause` is a word to count by: too_long, not_trained, no_answer,
    not_renderable, bad_weight; of preferences also same_answers, bad_margin, bad_label, lone_answer."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


def conversation(task: Task) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """(the whole conversation with its answer, tools) of a supervised task.

    The answer is `payload["response"]` (text, or a message as an object) behind the opening messages, or the
    messages end with it. `payload["tools"]` lists the tools that were offered, as objects or as their JSON
    text. Raises ExampleDropped.
    """
    messages = list(task.messages)
    response = task.payload.get("response")
    if messages[-1].role != "assistant":
        if response is None or response == "":
            raise ExampleDropped(
                "no_answer",
                f"task {task.id}: its messages do not end with an assistant message and its payload has no "
                "response: map a column to messages or to response (tasks: fields:)",
            )
        try:
            answer = (
                Message("assistant", response) if isinstance(response, str) else Message.from_dict(response)
            )
        except (SchemaError, TypeError) as error:
            raise ExampleDropped("no_answer", f"task {task.id}: response: {error}") from error
        messages.append(answer)
    return messages, tools_of(task)


def tools_of(task: Task) -> list[Mapping[str, Any]]:
    """The tools that were offered. Raises ExampleDropped."""
    tools = task.payload.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ExampleDropped("not_renderable", f"task {task.id}: tools: not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ExampleDropped(
            "not_renderable", f"task {task.id}: tools must be a list of objects, not {str(tools)[:60]!r}"
        )
    return tools


def example_weight(task: Task) -> float:
    """The example's own weight, `payload["weight"]`, by default 1. Raises ExampleDropped."""
    weight = task.payload.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ExampleDropped(
            "bad_weight", f"task {task.id}: weight is {weight!r}; it must be a number above 0"
        )
    return float(weight)


def _trace(task: Task, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any]) -> Trace:
    if not any(m.role == "assistant" and m.train != 0 for m in messages):
        raise ExampleDropped("not_trained", f"task {task.id}: no assistant message has a loss weight above 0")
    try:
        return supervised_trace(renderer, messages, tools=tools, weight=example_weight(task))
    except (RenderError, SchemaError) as error:
        raise ExampleDropped("not_renderable", f"task {task.id}: {error}") from error


def sft_group(
    task: Task,
    renderer: Renderer,
    issue: IssueKey,
    *,
    group_id: str,
    max_length: int | None = None,
) -> Group:
    """One example as a group of one. Raises ExampleDropped, with a cause to count by. `payload["weight"]`
    multiplies its tokens' weights.
    """
    messages, tools = conversation(task)
    trace = _trace(task, renderer, messages, tools)
    if max_length is not None and len(trace) > max_length:
        raise ExampleDropped(
            "too_long",
            f"task {task.id}: {len(trace)} tokens, above max_length {max_length}: dropped, not cut",
        )
    rollout = Rollout(
        task=task,
        trace=trace,
        reward=NO_REWARD,
        termination=Termination.FINISHED,
        group=group_id,
        source="expert",
        messages=messages,
        counters={"tokens": float(len(trace)), "trained_tokens": float((trace.column("train") > 0).sum())},
    )
    return Group(group_id, issue, [rollout], "sft")


def to_task(record: Task | Mapping[str, Any]) -> Task:
    """A record with `messages`, or with `prompt` and `response`, as a task. Raises SchemaError."""
    if isinstance(record, Task):
        return record
    payload = {key: record[key] for key in ("response", "tools") if record.get(key)}
    if record.get("weight") is not None:
        payload["weight"] = record["weight"]
    if record.get("messages"):
        messages = tuple(m if isinstance(m, Message) else Message.from_dict(m) for m in record["messages"])
    elif isinstance(record.get("prompt"), str) and record["prompt"]:
        messages = (Message("user", record["prompt"]),)
    else:
        raise SchemaError(
            f"a supervised record needs messages, or prompt and response; it has {sorted(record)}"
        )
    return Task(
        "sft", messages, payload, id=str(record.get("id") or ""), source=str(record.get("source") or "")
    )


@dataclass(slots=True)
class SftCounts:
    """What became of the examples read so far; `tokens` and `trained` of the kept ones."""

    kept: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class SftGroups:
    """An iterator over groups, in the order of the tasks; `counts` follows along.

    Raises RenderError at the end when not one example was left, naming the causes.
    """

    def __init__(
        self,
        tasks: Iterable[Task | Mapping[str, Any]],
        renderer: Renderer,
        *,
        stage: str,
        epoch: int,
        max_length: int | None,
    ) -> None:
        self.counts = SftCounts()
        self._first = ""  # the first reason for a drop, for the error
        self._groups = self._read(tasks, renderer, stage, epoch, max_length)

    def __iter__(self) -> Iterator[Group]:
        return self._groups

    def __next__(self) -> Group:
        return next(self._groups)

    def _read(
        self, tasks: Iterable[Any], renderer: Renderer, stage: str, epoch: int, max_length: int | None
    ) -> Iterator[Group]:
        counts = self.counts
        for record in tasks:
            task = to_task(record)
            issue = IssueKey(task.id, epoch)
            try:
                group = sft_group(task, renderer, issue, group_id=f"{stage}/{issue}", max_length=max_length)
            except ExampleDropped as reason:
                counts.dropped[reason.cause] += 1
                self._first = self._first or str(reason)
                continue
            numbers = group.rollouts[0].counters
            counts.kept += 1
            counts.tokens += int(numbers["tokens"])
            counts.trained += int(numbers["trained_tokens"])
            counts.longest = max(counts.longest, int(numbers["tokens"]))
            yield group
        if not counts.kept:
            causes = (
                ", ".join(f"{n} {cause}" for cause, n in counts.dropped.most_common()) or "there were none"
            )
            raise RenderError(f"no supervised example is left to train on ({causes}). First: {self._first}")


def sft_groups(
    tasks: Iterable[Task | Mapping[str, Any]],
    renderer: Renderer,
    *,
    stage: str = "sft",
    epoch: int = 0,
    max_length: int | None = None,
) -> SftGroups:
    """Supervised tasks, or records with `messages` or `prompt` and `response`, as groups of one; a record's
    `weight` multiplies its tokens' weights.

    `max_length` (tokens of the whole rendered example): longer ones are dropped and counted, never cut.
    """
    return SftGroups(tasks, renderer, stage=stage, epoch=epoch, max_length=max_length)
