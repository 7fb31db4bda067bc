"""The environment of programming problems."""

from __future__ import annotations

import asyncio
import string
from typing import Any

import pytest
from tests.envs.test_envs import Says

from trivet.agents import Attempt, Policy
from trivet.envs import EnvError, environment_names, make_env
from trivet.envs.code import Code
from trivet.recipe import schema
from trivet.render import get_renderer
from trivet.render.tiny import tiny_tokenizer
from trivet.rewards.code import CodeVerifier
from trivet.sandbox import SandboxError
from trivet.tasks.layouts import FUNCTIONAL_PROMPT, STDIO_PROMPT
from trivet.types import IssueKey, Message, Rollout, Scored, Task, Termination, Unscored

FUNCTIONAL = {"kind": "functional", "entry_point": "f", "asserts": ["assert f(2) == 4", "assert f(0) == 0"]}
STDIO = {"kind": "stdio", "cases": [{"input": "2", "output": "4"}]}
RIGHT = "Here:\n```python\ndef f(x):\n    return 2 * x\n```"
WRONG = "Here:\n```python\ndef f(x):\n    return x + 2\n```"


@pytest.fixture(scope="module")
def walls() -> None:
    async def probe() -> None:
        async with CodeVerifier(workers=1) as verifier:
            await verifier.warm()

    try:
        asyncio.run(probe())
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")


def task(tests: Any, *messages: Message, **payload: Any) -> Task:
    return Task("code", messages or (Message("user", "double it"),), {"tests": tests, **payload}, id="t")


def verdicts(env: Any, given: Task, *answers: str) -> list[Rollout]:
    async def run() -> list[Rollout]:
        async with env:
            return await asyncio.gather(*(env.verdict(given, Message("assistant", one)) for one in answers))

    return asyncio.run(run())


def test_it_is_known_by_name_and_checks_its_arguments() -> None:
    assert "code" in environment_names()
    with pytest.raises(EnvError, match="did you mean 'max_tests'"):
        make_env("code", max_test=3)
    with pytest.raises(EnvError, match="test_s"):
        make_env("code", test_s=-1.0)


def test_answers_are_judged(walls: None) -> None:
    right, wrong, none = verdicts(make_env("code"), task(FUNCTIONAL), RIGHT, WRONG, "f doubles")
    assert right.reward == Scored(1.0, {"answered": 1.0, "tests": 2.0, "passed": 2.0, "fraction": 1.0})
    assert wrong.reward == Scored(0.0, {"answered": 1.0, "tests": 2.0, "passed": 1.0, "fraction": 0.5})
    assert none.reward == Scored(0.0, {"answered": 0.0})


@pytest.mark.parametrize(
    ("tests", "cause"),
    [(None, "no_tests"), ({"kind": "x"}, "unknown_modality"), ({"kind": "stdio"}, "no_tests")],
)
def test_tasks_at_fault_are_unscored(tests: Any, cause: str) -> None:
    (rollout,) = verdicts(make_env("code"), task(tests), RIGHT)
    assert isinstance(rollout.reward, Unscored) and rollout.reward.cause == cause


def test_a_worked_answer_that_fails_leaves_its_task_unscored(walls: None) -> None:
    bad, good = task(FUNCTIONAL, response=WRONG), task(FUNCTIONAL, response=RIGHT)
    (plain,) = verdicts(make_env("code"), bad, RIGHT)
    assert plain.score == 1.0
    first, second = verdicts(make_env("code", check_reference=True), bad, RIGHT, WRONG)
    for rollout in (first, second):
        assert isinstance(rollout.reward, Unscored) and rollout.reward.cause == "tests_fail_reference"
    right, wrong = verdicts(make_env("code", check_reference=True), good, RIGHT, WRONG)
    assert (right.score, wrong.score) == (1.0, 0.0)


def test_the_system_message_of_the_kind() -> None:
    env = Code()
    functional, stdio = task(FUNCTIONAL), task(STDIO)
    assert env.asked(functional).messages == (Message("system", FUNCTIONAL_PROMPT), *functional.messages)
    assert env.asked(stdio).messages[0] == Message("system", STDIO_PROMPT)
    assert env.asked(functional) is env.asked(functional) and env.asked(functional).id == functional.id
    own = task(FUNCTIONAL, Message("system", "In Latin."), Message("user", "double it"))
    assert env.asked(own) is own
    nothing = task(None)
    assert env.asked(nothing) is nothing


@pytest.mark.parametrize("prompts", [True, False])
def test_it_is_played(walls: None, prompts: bool) -> None:
    letters = "".join(dict.fromkeys(string.printable))
    renderer = get_renderer(tiny_tokenizer(schema.TinyModel(alphabet=letters)))
    engine = Says(renderer, RIGHT)
    policy = Policy(engine, renderer, schema.Sampling(max_tokens=200), context=2048)  # type: ignore[arg-type]

    given = task(FUNCTIONAL)

    async def run() -> list[Rollout]:
        async with make_env("code", prompts=prompts) as env:
            return await env.rollout(given, policy, Attempt("r", IssueKey("t", 1), "g", 0))

    (rollout,) = asyncio.run(run())
    assert rollout.score == 1.0 and rollout.termination is Termination.FINISHED
    assert [one.role for one in rollout.messages] == (["system"] if prompts else []) + ["user", "assistant"]
    assert rollout.task is given and rollout.timings["score_s"] > 0
    assert engine.events == ["settled"]
