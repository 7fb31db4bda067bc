"""Checkers that are programs: their verdicts, and everything that can be wrong with them and with answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from trivet.envs import make_env
from trivet.rewards.checker import ProgramChecker
from trivet.sandbox import report
from trivet.types import Message, Reward, Rollout, Scored, Task, Termination, Trace, Unscored

if not {name: holds for name, holds, _ in report()}["bubblewrap"]:
    pytest.skip("no bubblewrap here", allow_module_level=True)

SORTED = "def check(answer, data):\n    return sorted(answer.split()) == sorted(data['words'])"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def checker(loop: asyncio.AbstractEventLoop) -> Iterator[ProgramChecker]:
    one = ProgramChecker(workers=1, limit_s=1.0)
    yield one
    loop.run_until_complete(one.close())


@pytest.mark.parametrize(
    ("source", "answer", "value"),
    [
        (SORTED, "b a", 1.0),
        (SORTED, "b b", 0.0),
        ("def check(answer):\n    return len(answer) / 10", "12345", 0.5),
        ("import math\ndef check(answer, data):\n    return math.isclose(float(answer), 0.5)", "0.5", 1.0),
        ("def check(answer):\n    return 'é\\ud800' not in answer", "a\x00\udcff", 1.0),
    ],
)
def test_verdicts(checker: ProgramChecker, loop: Any, source: str, answer: str, value: float) -> None:
    reward = loop.run_until_complete(checker.check(source, answer, {"words": ["a", "b"]}))
    assert isinstance(reward, Scored)
    assert reward.value == value


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("", "no_checker"),
        (None, "no_checker"),
        ("def check(answer): raise KeyError('x')", "verifier_raised"),
        ("def check(answer:", "verifier_raised"),
        ("def test(answer): return 1", "verifier_raised"),
        ("def check(answer): return 2", "verifier_invalid"),
        ("def check(answer): return float('nan')", "verifier_invalid"),
        ("def check(answer): return 'yes'", "verifier_invalid"),
        ("def check(answer):\n    while True: pass", "verifier_timeout"),
        ("import os\ndef check(answer): os._exit(0)", "verifier_crashed"),
        ("def check(answer): return bytearray(1 << 40)", "verifier_raised"),
    ],
)
def test_a_checker_at_fault_never_costs_an_answer(
    checker: ProgramChecker, loop: Any, source: Any, cause: str
) -> None:
    reward = loop.run_until_complete(checker.check(source, "a"))
    assert isinstance(reward, Unscored)
    assert reward.cause == cause
    after = loop.run_until_complete(checker.check("def check(answer): return True", "a"))
    assert isinstance(after, Scored)


def judge(loop: Any, env: Any, payload: dict[str, Any], text: str) -> Reward:
    task = Task("t", (Message("user", "q"),), payload)
    message = Message("assistant", text)
    rollout = Rollout(task, Trace(), Unscored("x"), Termination.FINISHED, messages=[message])
    return loop.run_until_complete(env.score(task, message, rollout))


def test_puzzles_and_constraints_may_be_programs(loop: Any) -> None:
    puzzle, instruct = make_env("puzzle"), make_env("instruct", partial=0.5)
    spec = {"puzzle": {"kind": "program", "checker": SORTED, "data": {"words": ["a", "b"]}}}
    shout = {"kind": "program", "checker": "def check(answer): return answer.isupper()"}
    both = {"constraints": [{"kind": "word_count", "at_most": 2}, shout]}
    try:
        for text, value in (("<answer>b a</answer>", 1.0), ("a", 0.0)):
            assert judge(loop, puzzle, spec, text) == Scored(value, {"answered": 1.0})
        assert [judge(loop, instruct, {"constraints": [shout]}, t).value for t in ("A B", "a")] == [1.0, 0.0]  # type: ignore[union-attr]
        values = [judge(loop, instruct, both, text).value for text in ("A B", "A B C", "a b c")]  # type: ignore[union-attr]
        assert values == [1.0, 0.25, 0.0]
        bad = {"constraints": [*both["constraints"], {"kind": "program"}]}
        assert judge(loop, instruct, bad, "A").cause == "no_checker"  # type: ignore[union-attr]
    finally:
        for env in (puzzle, instruct):
            loop.run_until_complete(env.__aexit__(None, None, None))
