"""Questions whose answers a trained reward model scores."""

from __future__ import annotations

from typing import Any, Literal, Self

from trivet.envs.base import SingleTurn
from trivet.envs.registry import EnvError, register_env
from trivet.rewards.reward_model import RewardModel
from trivet.types import Message, Reward, Rollout, Task


@register_env("reward_model")
class RewardModelEnv(SingleTurn):
    """Reward = the score that the reward model `model` gives the answer in its conversation.

    `model`: a directory; in a recipe also `stage:NAME` (what an earlier stage of algorithm reward_model
    trained) or `models:NAME` (an entry of `models:`). The task's messages and the answer are rendered with
    the reward model's own template, as its training data were; the policy's system prompt is not part of
    them. `batch`: answers per forward pass; `limit_s`: time for one. `renderer`, `template_args`: as
    `policy.renderer`. An answer that cannot be scored is unscored, never 0.
    """

    def __init__(
        self,
        model: str,
        *,
        batch: int = 16,
        limit_s: float = 60.0,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16"] = "float32",
        renderer: str = "auto",
        template_args: dict[str, Any] | None = None,
    ) -> None:
        self.score_limit_s = None  # every batch has its own limit; the queue before it may be long
        if batch < 1 or limit_s <= 0:
            raise ValueError(f"batch {batch} and limit_s {limit_s} must be above 0")
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {dtype!r} is not one of float32, bfloat16")
        self.reward = RewardModel(
            model,
            limit_s=limit_s,
            batch=batch,
            device=device,
            dtype=dtype,
            renderer=renderer,
            template_args=template_args,
        )

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        return await self.reward.score(task.messages, message)

    async def __aenter__(self) -> Self:
        try:
            await self.reward.load()
        except (ValueError, OSError) as error:
            raise EnvError(f"environment 'reward_model': {error}") from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.reward.__aexit__(*exc)
