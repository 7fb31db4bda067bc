"""Instructions that a program can check: the answer keeps to all of its constraints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, get_args

from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards import instructions
from trivet.rewards.checker import ProgramChecker
from trivet.rewards.instructions.score import Mode
from trivet.types import Message, Reward, Rollout, Scored, Task, Termination


def _split(payload: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]:
    """(the payload without constraints that are programs, or None where nothing else is left; those)."""
    constraints = payload.get("constraints")
    if not isinstance(constraints, list):
        return payload, []
    programs = [c for c in constraints if isinstance(c, Mapping) and c.get("kind") == "program"]
    rest = [c for c in constraints if c not in programs]
    if programs and not rest and not payload.get("instruction_id_list"):
        return None, programs
    return {**payload, "constraints": rest}, programs


@register_env("instruct")
class Instruct(SingleTurn):
    """Reward 1 when the answer keeps to every instruction of the task, else `partial` times the share it
    keeps to. An answer that was cut off has not followed its instructions: 0, with `cut` 1.

    Instructions are `payload["instruction_id_list"]` and `["kwargs"]` (the columns of IFEval and IFBench) and
    `payload["constraints"]` (`generated:constraints` writes them). `mode` "loose" forgives an introduction, a
    closing line and markdown, as IFEval's loose score does. The prompt must state the instructions.

    A constraint {"kind": "program", "checker": SOURCE} is checked by `def check(answer)` in a sandbox,
    `workers` at once for at most `limit_s` seconds each.
    """

    def __init__(
        self, *, partial: float = 0.0, mode: Mode = "strict", workers: int = 2, limit_s: float = 5.0
    ) -> None:
        if not 0 <= partial < 1:
            raise ValueError(f"partial {partial} must be at least 0 and below 1")
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r} is not one of {', '.join(get_args(Mode))}")
        self.partial = partial
        self.mode: Mode = mode
        self.programs = ProgramChecker(workers=workers, limit_s=limit_s)

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        plain, programs = _split(task.payload)
        rewards = [await self.programs.check(one.get("checker"), message.text) for one in programs]
        if plain is not None:
            # In a thread: a long answer must not hold up the event loop.
            rewards.insert(0, await asyncio.to_thread(self._judge_text, task, plain, message.text))
        reward = self._together(rewards)
        if isinstance(reward, Scored) and rollout.termination is not Termination.FINISHED:
            return Scored(0.0, {**reward.parts, "cut": 1.0})
        return reward

    def _together(self, rewards: list[Reward]) -> Reward:
        """All must hold; one that cannot be told leaves the answer unscored."""
        if len(rewards) == 1:
            return rewards[0]
        parts: dict[str, float] = {}
        for number, reward in enumerate(rewards):
            if not isinstance(reward, Scored):
                return reward
            parts |= {name if number == 0 else f"program_{number}": v for name, v in reward.parts.items()}
        shares = [reward.value >= 1 for reward in rewards if isinstance(reward, Scored)]
        return Scored(1.0 if all(shares) else self.partial * sum(shares) / len(shares), parts)

    async def __aexit__(self, *exc: object) -> None:
        await self.programs.close()

    def _judge_text(self, task: Task, row: Mapping[str, Any], text: str) -> Reward:
        if "prompt" not in row:  # kinds that compare with the question
            last = next((one for one in reversed(task.messages) if one.role == "user"), task.messages[-1])
            row = {**row, "prompt": last.text}
        return instructions.score_row(row, text, mode=self.mode, partial=self.partial)
