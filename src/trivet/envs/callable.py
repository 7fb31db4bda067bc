"""Any Python function as the judge of a single answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from trivet.envs.base import SingleTurn
from trivet.envs.registry import EnvError, register_env
from trivet.rewards.function import FunctionReward
from trivet.rewards.pool import PoolError
from trivet.types import Message, Reward, Rollout, Task


@register_env("callable")
class Function(SingleTurn):
    """Reward = `function(task, text)`, or called by its parameters' names; see `FunctionReward`.

    `function`: "module:name", "file.py:name" (killable processes), or, from Python, the function itself.
    """

    def __init__(
        self, function: str | Callable[..., Any], *, workers: int = 2, limit_s: float = 10.0
    ) -> None:
        self.reward = FunctionReward(function, workers=workers, limit_s=limit_s)
        self.score_limit_s = None  # every call has its own limit; the queue before it may be long

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        return await self.reward.score(task, message)

    async def __aenter__(self) -> Self:
        try:
            await self.reward.warm()
        except PoolError as error:
            await self.reward.__aexit__()
            raise EnvError(f"environment 'callable': {error}") from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.reward.__aexit__(*exc)
