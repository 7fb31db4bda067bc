"""Questions with one final answer, compared by the mathematics verifier."""

from __future__ import annotations

from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards.answers import Fallback
from trivet.rewards.math import MathVerifier
from trivet.types import Message, Reward, Rollout, Task


@register_env("math")
class Math(SingleTurn):
    """Reward 1 when the last box equals `payload["answer"]`, else 0. With `payload["match"]` "exact" equality
    is letter by letter.

    `fallback` accepts answers without a box, see `MathVerifier`; `workers` and `limit_s` are of its
    processes.
    """

    def __init__(self, *, fallback: Fallback = "none", workers: int = 2, limit_s: float = 3.0) -> None:
        self.score_limit_s = None  # every call has its own limit; the queue before it may be long
        self.verifier = MathVerifier(fallback=fallback, workers=workers, limit_s=limit_s)

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        exact = task.payload.get("match") == "exact"
        return await self.verifier.verify(message.text, task.payload.get("answer"), exact=exact)

    async def __aexit__(self, *exc: object) -> None:
        await self.verifier.__aexit__(*exc)
