"""Programming problems: the program in the answer is run on the problem's tests."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from trivet.agents import Attempt, Policy
from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards.code import CodeVerifier
from trivet.tasks.layouts.code import PROMPTS
from trivet.types import Message, Reward, Rollout, Scored, Task, Unscored

_KEPT = 4096


@register_env("code")
class Code(SingleTurn):
    """Reward 1 when the last ```python block passes every test in `payload["tests"]`, else 0.

    The limits and `stop_early` are those of `CodeVerifier`. A task without a system message is given the one
    of its kind, which says in what form to answer; `prompts: false` leaves tasks as they are.
    `check_reference`: a task whose own worked answer (`payload["response"]`) does not pass is unscored, found
    out once.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        test_s: float = 6.0,
        total_s: float = 30.0,
        memory_mb: int = 512,
        output_bytes: int = 1 << 20,
        max_tests: int = 50,
        tolerance: float | None = None,
        stop_early: bool = False,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        prompts: bool = True,
        check_reference: bool = False,
    ) -> None:
        self.score_limit_s = None  # every program has its own limits; the queue before it may be long
        self.prompts, self.check_reference = prompts, check_reference
        self.verifier = CodeVerifier(
            workers=workers,
            test_s=test_s,
            total_s=total_s,
            memory_mb=memory_mb,
            output_bytes=output_bytes,
            max_tests=max_tests,
            tolerance=tolerance,
            stop_early=stop_early,
            packages=packages,
            preload=preload,
        )
        self._asked: OrderedDict[int, tuple[Task, Task]] = OrderedDict()
        self._references: OrderedDict[str, Reward] = OrderedDict()

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]:
        rollouts = await super().rollout(self.asked(task) if self.prompts else task, policy, attempt)
        for rollout in rollouts:
            rollout.task = task  # what was asked is in its messages
        return rollouts

    def asked(self, task: Task) -> Task:
        """The task with the system message of its kind, if it has none. A group's attempts get one object."""
        tests = task.payload.get("tests")
        prompt = PROMPTS.get(tests.get("kind", "")) if isinstance(tests, Mapping) else None
        if prompt is None or task.messages[0].role == "system":
            return task
        known = self._asked.get(id(task))
        if known is None:
            made = dataclasses.replace(task, messages=(Message("system", prompt), *task.messages))
            known = self._asked[id(task)] = (task, made)
            while len(self._asked) > _KEPT:
                self._asked.popitem(last=False)
        return known[1]

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        tests = task.payload.get("tests")
        if self.check_reference and (found := await self._reference(task)) is not None:
            return found
        return await self.verifier.verify(message.text, tests, task.id)

    async def _reference(self, task: Task) -> Unscored | None:
        """Why the task cannot be judged; None where its worked answer passes, or there is none."""
        response = task.payload.get("response")
        if not isinstance(response, str):
            return None
        reward = self._references.get(task.id)
        if reward is None:
            reward = await self.verifier.verify(response, task.payload.get("tests"), task.id)
            if isinstance(reward, Unscored) and reward.cause == "sandbox_failed":
                return reward  # it may work the next time
            self._references[task.id] = reward
            while len(self._references) > _KEPT:
                self._references.popitem(last=False)
        if isinstance(reward, Unscored):
            return reward
        if isinstance(reward, Scored) and reward.value < 1.0:
            return Unscored(
                "tests_fail_reference", f"task {task.id}: its worked answer fails ({dict(reward.parts)})"
            )
        return None

    async def __aexit__(self, *exc: object) -> None:
        await self.verifier.close()
