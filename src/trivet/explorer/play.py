"""One attempt at a task: its deadline, its retries, and what its failure is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trivet.agents import Attempt, Policy
from trivet.engine.base import EngineError
from trivet.envs import Environment
from trivet.recipe.schema import Explorer as ExplorerConfig
from trivet.types import Rollout, Task, Termination, Trace, Unscored

GRACE_S = 5.0  # after its deadline a rollout has this long to end itself, and a quarter of the deadline

Warn = Callable[[str, str], None]
"""(cause, text): told about every failure; the monitor folds repetitions."""


@dataclass(frozen=True, slots=True)
class Played:
    """The rollouts of one attempt (one per trained player) and how many tries they took."""

    rollouts: list[Rollout]
    tries: int


def _lost(task: Task, attempt: Attempt, termination: Termination, cause: str, detail: str) -> Rollout:
    return Rollout(
        task=task,
        trace=Trace(),
        reward=Unscored(cause, detail),
        termination=termination,
        attempt=attempt.index,
        group=attempt.group,
        role=attempt.role,
    )


async def play(
    env: Environment, policy: Policy, task: Task, attempt: Attempt, config: ExplorerConfig, warn: Warn
) -> Played:
    """Play one attempt; never raises but on cancellation.

    A failure of the engine is infrastructure's: the attempt is played again with a new seed, `retries`
    times, and is then `aborted`. An exception of the environment is an `error`; a deadline that the
    conversation did not notice itself (a hanging tool, a hanging verifier) is `aborted` too. None of them has
    a score.
    """
    # The conversation ends itself at the deadline and keeps its tokens; this outer one is for what hangs.
    grace = max(GRACE_S, 0.25 * config.deadline_s)
    for retry in range(config.retries + 1):
        now = replace(attempt, retry=retry, deadline=time.monotonic() + config.deadline_s)
        try:
            async with asyncio.timeout(config.deadline_s + grace):
                return Played(await env.rollout(task, policy, now), retry + 1)
        except EngineError as error:
            cause, detail = "engine", f"{type(error).__name__}: {error}"
            warn(cause, f"{attempt.issue} attempt {attempt.index}, try {retry + 1}: {detail}")
        except TimeoutError:
            cause = "deadline"
            detail = (
                f"environment {task.env!r} gave no result within {config.deadline_s + grace:.0f} s "
                "(explorer.deadline_s and its grace)"
            )
            warn(cause, f"{attempt.issue} attempt {attempt.index}: {detail}")
            return Played([_lost(task, attempt, Termination.ABORTED, cause, detail)], retry + 1)
        except Exception as error:  # a user's environment may raise anything; it must not end the run
            cause, detail = "environment", f"{type(error).__name__}: {error}"
            warn(cause, f"{attempt.issue} attempt {attempt.index}: environment {task.env!r} raised {detail}")
            return Played([_lost(task, attempt, Termination.ERROR, cause, detail)], retry + 1)
    return Played([_lost(task, attempt, Termination.ABORTED, cause, detail)], config.retries + 1)
