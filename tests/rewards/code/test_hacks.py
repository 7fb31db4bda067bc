"""Attempts to be judged right without being right: each scores 0, and is a verdict (not unscored)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rewards.code.conftest import Judge
from tests.rewards.code.hacks import BUDGET, FUNCTIONAL, STDIO

from trivet.types import Reward, Scored

HEAD: dict[str, Any] = {"kind": "functional", "entry_point": "double"}
PAIRS = {
    **HEAD,
    "asserts": ["assert double(2) == 4", "assert double(x=5) == 10", "assert abs(double(3) - 6) < 0.1"],
}
SCRIPTS = {
    **HEAD,
    "asserts": [
        "assert sorted([double(2), double(0)]) == [0, 4]",
        "assert double(2) + 1 == 5 and isinstance(double(2), int)",
        "assert 4 == double(double(1))",
        "assert double([1]) == [1, 1]",
    ],
}
CHECK = {
    **HEAD,
    "check": "def check(candidate):\n"
    "    for n in range(1, 4):\n"
    "        assert candidate(n) == 2 * n, 'wrong'\n"
    "        assert not candidate(n) != 2 * n\n",
}
FORMS = {"pairs": PAIRS, "scripts": SCRIPTS, "check": CHECK}
CASES = {"kind": "stdio", "cases": [{"input": "2\n", "output": "4\n"}, {"input": "0\n", "output": "0\n"}]}


def assert_zero(reward: Reward) -> None:
    assert isinstance(reward, Scored), reward
    assert reward.value == 0.0, reward
    assert reward.parts["passed"] == 0.0, reward


@pytest.mark.parametrize("form", FORMS)
def test_an_honest_program_scores_1(judge: Judge, form: str) -> None:
    reward = judge("def double(x): return x * 2", FORMS[form])
    assert isinstance(reward, Scored) and reward.value == 1.0 and "weak" not in reward.parts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functions(judge: Judge, name: str, form: str) -> None:
    assert_zero(judge(FUNCTIONAL[name], FORMS[form]))


@pytest.mark.parametrize("name", BUDGET)
def test_functions_that_take_too_much(judge: Judge, name: str) -> None:
    assert_zero(judge(BUDGET[name], PAIRS))
    if name not in ("endless loop", "endless loop that catches", "alarm off, then sleep", "fork bomb"):
        assert_zero(judge(BUDGET[name], SCRIPTS))


@pytest.mark.parametrize("name", STDIO)
def test_programs(judge: Judge, name: str) -> None:
    assert_zero(judge(STDIO[name], CASES))


def test_what_was_patched_is_whole_for_the_next(judge: Judge) -> None:
    judge(FUNCTIONAL["patched builtins"], PAIRS)
    reward = judge("def double(x): return x * 2", SCRIPTS)
    assert isinstance(reward, Scored) and reward.value == 1.0
