"""Messages, tasks, rewards, rollouts: exact round trips, strict on shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.types import (
    Group,
    IssueKey,
    Message,
    Part,
    Pending,
    Rollout,
    SchemaError,
    Scored,
    Task,
    Termination,
    ToolCall,
    Trace,
    Unscored,
    content_hash,
    reward_from_dict,
    reward_to_dict,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
calls = st.builds(ToolCall, name=st.text(max_size=5), arguments=objects, id=st.text(max_size=4))
parts = st.builds(Part, st.just("text"), text=st.text(max_size=5))
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user"]), st.text(max_size=9)),
    st.builds(Message, st.just("user"), st.lists(parts, max_size=3).map(tuple)),
    st.builds(
        Message,
        st.just("assistant"),
        st.text(max_size=9),
        reasoning=st.none() | st.text(max_size=5),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
        train=st.none() | st.floats(0, 2),
    ),
    st.builds(Message, st.just("tool"), st.text(max_size=5), tool_call_id=st.text(max_size=3)),
)
tasks = st.builds(
    Task,
    env=st.text(max_size=5),
    messages=st.lists(messages, min_size=1, max_size=3).map(tuple),
    payload=objects,
    tags=st.lists(st.text(max_size=3), max_size=2).map(tuple),
)
finite = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.one_of(
    st.builds(Scored, finite, st.dictionaries(st.text(max_size=3), finite, max_size=2)),
    st.builds(Unscored, st.text(max_size=5), st.text(max_size=5)),
    st.builds(Pending, finite),
)


@settings(max_examples=100, deadline=None)
@given(messages, tasks, rewards)
def test_round_trips(message: Message, task: Task, reward: object) -> None:
    assert Message.from_dict(message.to_dict()) == message
    assert Task.from_dict(task.to_dict()) == task
    assert reward_from_dict(reward_to_dict(reward)) == reward  # type: ignore[arg-type]
    trace = Trace()
    trace.add_sampled(trace.add(-1, [1, 2]), [3], [-1.5], 4)
    rollout = Rollout(task, trace, reward, Termination.LENGTH, 3, "g", messages=[message])  # type: ignore[arg-type]
    rollout.counters["turns"] = 2.0
    again = Rollout.from_bytes(rollout.to_bytes())
    assert again.header() == rollout.header()
    assert again.trace.to_bytes() == trace.to_bytes()


def test_a_task_without_id_is_named_by_its_content() -> None:
    one = Task("math", (Message("user", "1+1"),), {"answer": "2"})
    assert one.id == Task("math", (Message("user", "1+1"),), {"answer": "2"}).id
    assert one.id != Task("math", (Message("user", "1+1"),), {"answer": "3"}).id
    assert Task("math", one.messages, id="own").id == "own"


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_a_score_is_a_finite_number(value: object) -> None:
    with pytest.raises(SchemaError, match="return Unscored"):
        Scored(value)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="reward part is"):
        Scored(1.0, {"part": value})  # type: ignore[dict-item]


def test_shapes_are_checked() -> None:
    with pytest.raises(SchemaError, match="role 'ai'"):
        Message("ai")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="content must be text"):
        Message("user", None)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="cannot be trained"):
        Message("user", "x", train=1.0)
    with pytest.raises(SchemaError, match="arguments must be an object"):
        ToolCall("f", "{}")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"unknown key\(s\) \['contnet'\]"):
        Message.from_dict({"role": "user", "contnet": "x"})
    with pytest.raises(SchemaError, match="no opening message"):
        Task("math", ())
    with pytest.raises(SchemaError, match="not a stored reward"):
        reward_from_dict({"kind": "zero"})
    with pytest.raises(SchemaError, match="media"):
        _ = Message("user", (Part("image", attachment="ab"),)).text


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            "type 'input_text' is not one of",
        ),
        ({"role": "user", "content": [{"text": "x"}]}, "content part: 'type' is missing"),
        ({"role": "user", "content": ["x"]}, "content part must be an object, not a str"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "text must be text, not int"),
        (
            {"role": "user", "content": [{"type": "text", "attachment": "ab"}]},
            "text part holds no attachment",
        ),
        ({"role": "user", "content": [{"type": "image", "text": "x"}]}, "image part holds no text"),
        ({"role": "user", "content": {"text": "x"}}, "content must be text"),
        ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "tool call: 'name' is missing"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "tool call: 'arguments' is missing"),
        ({"role": "assistant", "tool_calls": [{"name": None, "arguments": {}}]}, "name must be text"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "tool call must be an object, not a str"),
        ({"role": "assistant", "reasoning": 3}, "assistant message: reasoning must be text, not int"),
        ({"role": "user", "name": ["a"]}, "user message: name must be text, not list"),
        ({"role": "assistant", "train": "yes"}, "train is 'yes': a loss weight is a finite number"),
        ({"role": "assistant", "train": -1}, "train is -1: a loss weight"),
        ({"role": "assistant", "train": math.nan}, "train is nan: a loss weight"),
    ],
)
def test_records_that_are_no_messages(record: dict[str, object], message: str) -> None:
    """All are SchemaErrors: what is read from a file is refused by name, and no part of it is lost."""
    with pytest.raises(SchemaError, match=message):
        Message.from_dict(record)


def test_records_that_are_no_tasks() -> None:
    with pytest.raises(SchemaError, match="task: 'env' is missing"):
        Task.from_dict({"messages": [{"role": "user"}]})
    with pytest.raises(SchemaError, match="task: 'messages' is missing"):
        Task.from_dict({"env": "math"})
    with pytest.raises(SchemaError, match="message must be an object, not a str"):
        Task.from_dict({"env": "math", "messages": ["hi"]})


def test_numbers_no_reward_can_have() -> None:
    with pytest.raises(SchemaError, match="a score is a finite number"):
        Scored(10**400)
    with pytest.raises(SchemaError, match="until is nan"):
        Pending(math.nan)
    assert Pending(math.inf).expired() is False


def test_text_that_utf8_cannot_hold_has_a_hash() -> None:
    assert content_hash("\ud800") != content_hash("\ud801")
    assert Task("math", (Message("user", "\ud800"),)).id


def test_a_group_is_ready_when_nothing_is_pending() -> None:
    task = Task("math", (Message("user", "1+1"),))
    done = Rollout(task, Trace(), Scored(1), Termination.FINISHED)
    waiting = Rollout(task, Trace(), Pending(until=10.0), Termination.FINISHED)
    key = IssueKey(task.id, 1)
    assert Group("g", key, [done]).ready and not Group("g", key, [done, waiting]).ready
    assert Pending(10.0).expired(now=10.0) and not Pending(10.0).expired(now=9.9)
    assert str(key) == f"{task.id}@1.0"
    assert Termination.LENGTH.truncated and not Termination.FINISHED.truncated
