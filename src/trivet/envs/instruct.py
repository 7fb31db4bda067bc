"""Instructions that a program can check: the answer keeps to all of its constraints."""

from __future__ import annotations

import asyncio
from typing import get_args

from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards import instructions
from trivet.rewards.instructions.score import Mode
from trivet.types import Message, Reward, Rollout, Scored, Task, Termination


@register_env("instruct")
class Instruct(SingleTurn):
    """Reward 1 when the answer keeps to every instruction of the task, else `partial` times the share it
    keeps to. An answer that was cut off has not followed its instructions: 0, with `cut` 1.

    Instructions are `payload["instruction_id_list"]` and `["kwargs"]` (the columns of IFEval and IFBench) and
    `payload["constraints"]` (`generated:constraints` writes them). `mode` "loose" forgives an introduction, a
    closing line and markdown, as IFEval's loose score does. The prompt must state the instructions.
    """

    def __init__(self, *, partial: float = 0.0, mode: Mode = "strict") -> None:
        if not 0 <= partial < 1:
            raise ValueError(f"partial {partial} must be at least 0 and below 1")
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r} is not one of {', '.join(get_args(Mode))}")
        self.partial = partial
        self.mode: Mode = mode

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        # In a thread: a long answer must not hold up the event loop.
        reward = await asyncio.to_thread(self._judge_text, task, message.text)
        if isinstance(reward, Scored) and rollout.termination is not Termination.FINISHED:
            return Scored(0.0, {**reward.parts, "cut": 1.0})
        return reward

    def _judge_text(self, task: Task, text: str) -> Reward:
        row = task.payload
        if "prompt" not in row:  # kinds that compare with the question
            last = next((one for one in reversed(task.messages) if one.role == "user"), task.messages[-1])
            row = {**row, "prompt": last.text}
        return instructions.score_row(row, text, mode=self.mode, partial=self.partial)
