"""Preferences: of two answers to one conversation, the chosen and the rejected, as a group of two; or one
answer that somebody called good or bad, as a group of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivet.algorithms.base import PAIR_MARGIN
from trivet.data.sft import ExampleDropped, conversation, example_weight, tools_of
from trivet.render import Renderer, RenderError, supervised_trace
from trivet.types import Group, IssueKey, Message, Rollout, SchemaError, Task, Termination, Unscored

NO_REWARD = Unscored("preference", "one of a pair; nothing is scored")
SIDES = ("chosen", "rejected")


def common_prefix(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many messages two conversations begin with alike."""
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    return n


def _messages(task: Task, side: str) -> list[Message]:
    """What `payload[side]` says, as messages: text, one message, or a list of them."""
    given = task.payload.get(side)
    if given is None or given in ("", []):
        raise ExampleDropped("no_answer", f"task {task.id}: its payload has no {side} answer")
    try:
        if isinstance(given, str):
            return [Message("assistant", given)]
        parts = [given] if isinstance(given, Mapping) else given
        return [m if isinstance(m, Message) else Message.from_dict(m) for m in parts]
    except (SchemaError, TypeError, AttributeError) as error:
        raise ExampleDropped("no_answer", f"task {task.id}: {side}: {error}") from error


def pair_messages(task: Task) -> tuple[list[Message], list[Message]]:
    """(the chosen conversation, the rejected one), whole, with what both begin with marked as not trained.

    `payload["chosen"]` and `["rejected"]` are text, a message, or messages that follow the task's own; or
    whole conversations that begin with the task's. Raises ExampleDropped.
    """
    opening = list(task.messages)
    sides = []
    for side in SIDES:
        messages = _messages(task, side)
        whole = len(messages) > len(opening) and messages[: len(opening)] == opening
        sides.append(messages if whole else [*opening, *messages])
    chosen, rejected = sides
    if chosen == rejected:
        raise ExampleDropped("same_answers", f"task {task.id}: chosen and rejected are the same")
    shared = min(common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    for messages in sides:
        messages[:shared] = [replace(m, train=0.0) if m.role == "assistant" else m for m in messages[:shared]]
        if not any(m.role == "assistant" and m.train != 0 for m in messages[shared:]):
            raise ExampleDropped("not_trained", f"task {task.id}: an answer has no assistant message")
    return chosen, rejected


def _margin(task: Task) -> float:
    """By how much the chosen answer is better, `payload["margin"]`, by default 0."""
    margin = task.payload.get("margin")
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise ExampleDropped(
            "bad_margin", f"task {task.id}: margin is {margin!r}; it must be a number, 0 or more"
        )
    return float(margin)


def _label(task: Task) -> bool | None:
    """What `payload["label"]` says of the one answer; None: the task is a pair. Raises ExampleDropped."""
    label = task.payload.get("label")
    if label is None or any(task.payload.get(side) is not None for side in SIDES):
        return None
    if label not in (True, False):  # 0 and 1 too
        raise ExampleDropped(
            "bad_label", f"task {task.id}: label is {label!r}; it must be true (a good answer) or false"
        )
    return bool(label)


def preference_group(
    task: Task,
    renderer: Renderer,
    issue: IssueKey,
    *,
    group_id: str,
    max_length: int | None = None,
    lone: bool = True,
) -> Group:
    """One pair as a group of two rollouts that an expert wrote. Raises ExampleDropped, with a cause to count
    by: a pair whose one side is too long is dropped whole. `payload["weight"]` multiplies the weights of both
    sides' tokens; `payload["margin"]` is what objectives that read margins ask of the pair (counter
    `pair_margin`).

    A task with one answer, as in a supervised task, and `payload["label"]` (true: good) is a group of one,
    the chosen or the rejected; with `lone` false it is refused, since there is nothing to compare it with.
    """
    label = _label(task)
    if label is None:
        sides = list(zip(SIDES, pair_messages(task), strict=True))
    elif lone:
        sides = [("chosen" if label else "rejected", conversation(task)[0])]
        if all(m.train == 0 for m in sides[0][1] if m.role == "assistant"):
            raise ExampleDropped("not_trained", f"task {task.id}: no assistant message has a weight above 0")
    else:
        raise ExampleDropped(
            "lone_answer",
            f"task {task.id} has one answer and a label; this algorithm compares two answers (chosen and "
            "rejected): take kto, which judges answers one by one",
        )
    weight, margin = example_weight(task), _margin(task)
    rollouts = []
    for attempt, (side, messages) in enumerate(sides):
        try:
            trace = supervised_trace(renderer, messages, tools=tools_of(task), weight=weight)
        except (RenderError, SchemaError) as error:
            raise ExampleDropped("not_renderable", f"task {task.id}: {side}: {error}") from error
        if max_length is not None and len(trace) > max_length:
            raise ExampleDropped(
                "too_long",
                f"task {task.id}: its {side} conversation has {len(trace)} tokens, above max_length "
                f"{max_length}: the pair is dropped, not cut",
            )
        counters = {
            "tokens": float(len(trace)),
            "trained_tokens": float((trace.column("train") > 0).sum()),
        }
        if margin:
            counters[PAIR_MARGIN] = margin
        rollouts.append(
            Rollout(
                task=task,
                trace=trace,
                reward=NO_REWARD,
                termination=Termination.FINISHED,
                attempt=attempt,
                group=group_id,
                source="expert",
                messages=messages,
                preference="chosen" if side == "chosen" else "rejected",
                counters=counters,
            )
        )
    return Group(group_id, issue, rollouts, "preference")
