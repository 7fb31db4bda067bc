"""Instructions that a program can check: the answer keeps to all of its constraints."""

from __future__ import annotations

import asyncio

from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards import constraints
from trivet.types import Message, Reward, Rollout, Scored, Task, Termination, Unscored


@register_env("instruct")
class Instruct(SingleTurn):
    """Reward 1 when the answer keeps to every constraint in `payload["constraints"]`, else `partial` times
    the share it keeps to. An answer that was cut off has not followed its instructions: 0, with `cut` 1.

    The prompt must state the constraints (`generated:constraints` does; `constraints.describe` words them).
    """

    def __init__(self, *, partial: float = 0.0) -> None:
        if not 0 <= partial < 1:
            raise ValueError(f"partial {partial} must be at least 0 and below 1")
        self.partial = partial

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        wanted = task.payload.get("constraints")
        if not isinstance(wanted, list) or not wanted:
            return Unscored("no_constraints", f"task {task.id} has no list payload.constraints")
        try:
            # In a thread: a long answer must not hold up the event loop.
            reward = await asyncio.to_thread(constraints.score, wanted, message.text, partial=self.partial)
        except constraints.ConstraintError as error:
            return Unscored("bad_constraints", f"task {task.id}: {error}")
        if rollout.termination is not Termination.FINISHED:
            return Scored(0.0, {**reward.parts, "cut": 1.0})
        return reward
