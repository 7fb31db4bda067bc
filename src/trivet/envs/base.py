"""The environment protocol, and the base of environments that ask once and score the answer."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Protocol, Self

from trivet.agents import Attempt, Policy
from trivet.render import supervised_trace
from trivet.types import (
    Group,
    Message,
    Pending,
    Reward,
    Rollout,
    Scored,
    Task,
    Termination,
    Trace,
    Unscored,
)

DEMONSTRATION = 1_000_000  # the attempt's number of a group's worked answer: after all that are played
NOT_SCORED = Unscored("not_scored", "the environment has not scored it yet")


class Environment(Protocol):
    """Plays a task and judges it: one rollout per trained player, usually one.

    An environment owns its resources through its context manager, is shared by all attempts at once, and
    never sees the trainer. Infrastructure errors propagate out of `rollout`: the caller retries.

    One that compares the members of a group also has `async def score_group(self, group: Group) -> None`,
    which sets their rewards; see `judge_group`.
    """

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


async def judge_group(env: Environment, group: Group, limit_s: float = 600.0) -> None:
    """Have the environment score a finished group as a whole, where it does that. Never raises but on
    cancellation: what fails leaves the group's rollouts unscored."""
    score_group = getattr(env, "score_group", None)
    if score_group is None:
        return
    name = type(env).__name__
    lost: Unscored | None = None
    try:
        async with asyncio.timeout(limit_s) as timer:
            await score_group(group)
    except Exception as error:  # a user's code: whatever it raises must not become a 0 or end the run
        if isinstance(error, TimeoutError) and timer.expired():
            lost = Unscored("verifier_timeout", f"{name}.score_group took over {limit_s:g} s")
        else:
            lost = Unscored("verifier_crashed", f"{name}.score_group raised {type(error).__name__}: {error}")
    for rollout in group.rollouts:
        if lost is not None:
            rollout.reward = lost
        elif not isinstance(rollout.reward, Scored | Unscored | Pending):
            kind = type(rollout.reward).__name__
            rollout.reward = Unscored("verifier_invalid", f"{name}.score_group left {kind} as a reward")


class SingleTurn(ABC):
    """One question, one answer, one score. A subclass gives `score`:

        @register_env("shout")
        class Shout(SingleTurn):
            async def score(self, task, message, rollout):
                return Scored(float(message.text.isupper()))

    `score` runs on the event loop: work that takes long belongs into a pool or a thread. It is given
    `score_limit_s` seconds; what it raises or returns amiss leaves the rollout unscored, never 0.
    """

    score_limit_s: float | None = 120.0
    demonstrate = False  # `env_args: {demonstrate: true}`, see `demonstration`

    @abstractmethod
    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        """The reward of `message`, the policy's answer; `rollout` holds trace, termination, counters."""

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]:
        conversation = policy.conversation(task, attempt)
        try:
            message = await conversation.reply()
        finally:
            # Before scoring: a deterministic engine must not wait for a session that is only being judged.
            conversation.settle()
        rollout = conversation.rollout(NOT_SCORED)
        begin = time.perf_counter()
        rollout.reward = await self._judge(task, message, rollout)
        rollout.timings["score_s"] = time.perf_counter() - begin
        if self.demonstrate and attempt.role == "train" and attempt.index == 0:
            return [rollout, await self.demonstration(task, policy)]
        return [rollout]

    async def demonstration(self, task: Task, policy: Policy) -> Rollout:
        """The task's own worked answer, `payload["response"]`, as an expert's rollout: one for each group,
        judged like the policy's. Raises ValueError where the task has none."""
        response = task.payload.get("response")
        if not isinstance(response, str) or not response:
            raise ValueError(f"demonstrate: task {task.id} has no worked answer (payload.response)")
        messages = [*policy.opening(task), Message("assistant", response)]
        trace = await asyncio.to_thread(supervised_trace, policy.renderer, messages)
        rollout = Rollout(
            task,
            trace,
            NOT_SCORED,
            Termination.FINISHED,
            attempt=DEMONSTRATION,
            source="expert",
            messages=messages,
        )
        rollout.reward = await self._judge(task, messages[-1], rollout)
        return rollout

    async def verdict(
        self, task: Task, message: Message, termination: Termination = Termination.FINISHED
    ) -> Rollout:
        """An answer that was written elsewhere, judged as if it had been played; without tokens."""
        rollout = Rollout(task, Trace(), NOT_SCORED, termination, messages=[*task.messages, message])
        rollout.reward = await self._judge(task, message, rollout)
        return rollout

    async def _judge(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        if rollout.termination is Termination.DEADLINE:
            return Unscored("deadline", "the rollout's wall-clock limit passed before there was an answer")
        name = type(self).__name__
        try:
            async with asyncio.timeout(self.score_limit_s) as timer:
                reward = await self.score(task, message, rollout)
        except Exception as error:  # a user's code: whatever it raises must not become a 0 or end the run
            if isinstance(error, TimeoutError) and timer.expired():
                return Unscored("verifier_timeout", f"{name}.score took over {self.score_limit_s} s")
            return Unscored("verifier_crashed", f"{name}.score raised {type(error).__name__}: {error}")
        if not isinstance(reward, Scored | Unscored | Pending):
            kind = type(reward).__name__
            return Unscored(
                "verifier_invalid", f"{name}.score returned {kind}; return Scored, Unscored or Pending"
            )
        return reward

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None
