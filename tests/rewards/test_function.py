"""Functions as rewards: what they are given, what they may return, and how they may fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trivet.rewards.function import FunctionReward, to_reward
from trivet.rewards.pool import PoolError
from trivet.types import Message, Part, Reward, Scored, Task, Unscored

TARGETS = str(Path(__file__).with_name("function_targets.py"))
TASK = Task("callable", (Message("user", "say yes"),), {"answer": "yes"})


def score(reward: FunctionReward, text: str, task: Task = TASK) -> Reward:
    return asyncio.run(reward.score(task, Message("assistant", text)))


def load(name: str) -> Any:
    from trivet.rewards.load import load_object

    return load_object(f"{TARGETS}:{name}")


@pytest.fixture(params=["process", "thread"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def make(name: str, kind: str, **options: Any) -> FunctionReward:
    return FunctionReward(f"{TARGETS}:{name}" if kind == "process" else load(name), workers=1, **options)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("positional", "yes", 1.0),
        ("by_name", "yes", 1.0),
        ("by_name", "no", 0.0),
        ("only_text", "four", 4.0),
        ("everything", "yes", 1.25),
        ("coroutine", "any", 0.5),
    ],
)
def test_ways_to_be_called(name: str, text: str, value: float, kind: str) -> None:
    reward = make(name, kind)
    try:
        assert score(reward, text) == Scored(value)
    finally:
        reward.close()


def test_a_parameter_nothing_gives(kind: str) -> None:
    reward = make("needs", kind)
    try:
        got = score(reward, "x")
        assert isinstance(got, Unscored)
        assert got.cause == "verifier_raised"
        assert "'other', 'tolerance'" in got.detail
        full = Task("callable", TASK.messages, {"tolerance": 0.5, "other": ""})
        assert score(reward, "x", full) == Scored(0.5)
    finally:
        reward.close()


@pytest.fixture(scope="module")
def returning() -> Iterator[FunctionReward]:
    reward = FunctionReward(f"{TARGETS}:returns", workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bool", Scored(1.0)),
        ("int", Scored(3.0)),
        ("numpy", Scored(0.5)),
        ("zero_d", Scored(2.0)),
        ("parts", Scored(0.5, {"a": 1.0, "b": 2.0})),
        ("reward", Scored(1.0)),
        ("scored", Scored(0.75, {"x": 1.0})),
        ("unscored", Unscored("judge_offline", "no judge")),
    ],
)
def test_good_returns(returning: FunctionReward, text: str, expected: Reward) -> None:
    assert score(returning, text) == expected
    assert to_reward(load("returns")(TASK, text), "f") == expected


@pytest.mark.parametrize(
    "text", ["nan", "inf", "none", "string", "list", "huge", "array", "empty", "two", "bad_part", "nan_part"]
)
def test_bad_returns_are_unscored_with_a_reason(returning: FunctionReward, text: str) -> None:
    for got in (score(returning, text), to_reward(load("returns")(TASK, text), "f")):
        assert isinstance(got, Unscored)
        assert got.cause == "verifier_invalid"
        assert "returned" in got.detail


def test_failures_in_processes() -> None:
    with_limit = FunctionReward(f"{TARGETS}:misbehaves", workers=1, limit_s=0.5)
    try:
        causes = {"raise": "verifier_raised", "exit": "verifier_crashed", "sleep": "verifier_timeout"}
        for text, cause in causes.items():
            got = score(with_limit, text)
            assert isinstance(got, Unscored)
            assert got.cause == cause
            assert score(with_limit, "fine") == Scored(1.0)
        assert "ZeroDivisionError" in getattr(score(with_limit, "raise"), "detail", "")
    finally:
        with_limit.close()


def test_failures_in_threads_and_their_limit() -> None:
    release = [False]

    def hangs(task: Task, text: str) -> float:
        while text == "hang" and not release[0]:
            time.sleep(0.01)
        if text == "exit":
            raise SystemExit(3)
        return 1.0

    reward = FunctionReward(hangs, workers=2, limit_s=0.1, max_hung=3)

    async def many() -> list[Reward]:
        texts = ["hang"] * 3 + ["fine"]
        return await asyncio.gather(*(reward.score(TASK, Message("assistant", t)) for t in texts))

    rewards = asyncio.run(many())
    assert [getattr(r, "cause", None) for r in rewards[:3]] == ["verifier_timeout"] * 3
    assert reward.hung == 3
    got = score(reward, "fine")
    assert isinstance(got, Unscored)
    assert got.cause == "verifier_unavailable"
    assert "cannot be killed" in got.detail
    release[0] = True
    deadline = time.monotonic() + 10
    while reward.hung and time.monotonic() < deadline:
        time.sleep(0.01)
    assert score(reward, "fine") == Scored(1.0)
    got = score(reward, "exit")
    assert isinstance(got, Unscored)
    assert "SystemExit" in got.detail


def test_media_and_payloads_that_cannot_travel(returning: FunctionReward) -> None:
    image = Message("assistant", (Part("image", attachment="abc"),))
    got = asyncio.run(returning.score(TASK, image))
    assert isinstance(got, Unscored)
    assert "image" in got.detail
    odd = Task("callable", TASK.messages, {"answer": object()}, id="odd")
    got = score(returning, "bool", odd)
    assert isinstance(got, Unscored)
    assert got.cause == "verifier_invalid"
    assert "task odd" in got.detail


def test_functions_that_do_not_load() -> None:
    reward = FunctionReward(f"{TARGETS}:retruns", workers=1)
    try:
        with pytest.raises(PoolError, match="did you mean 'returns'"):
            asyncio.run(reward.warm())
        got = score(reward, "bool")
        assert isinstance(got, Unscored)
        assert got.cause == "verifier_unavailable"
    finally:
        reward.close()
