"""Questions with a short answer, compared as text, as a number or as a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import get_args

from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards import format as form
from trivet.rewards.text import Match, Read, TextError, TextVerifier
from trivet.types import Message, Reward, Rollout, Scored, Task, Unscored


@register_env("qa")
class Qa(SingleTurn):
    """Reward 1 when the answer is one of `payload["answer"]` (text, a number, or a list of them), else 0.

    `match`: "exact", "normalised", "fuzzy", "number" or "choice" (with `payload["choices"]`); a task's
    `payload["match"]` goes first. `read` says where the answer stands: "whole", "box", "phrase" or
    "last_line". `threshold` is of fuzzy, `relative` and `absolute` of number matching; see `TextVerifier`.
    `format` names parts to report (`box`, `tags`, `think` ...), which are no reward.
    """

    def __init__(
        self,
        match: Match = "normalised",
        *,
        read: Read = "whole",
        threshold: float = 0.9,
        relative: float = 0.0,
        absolute: float = 0.0,
        format: Sequence[str] = (),
    ) -> None:
        form.validate(format)
        self.match: Match = match
        self.format = tuple(format)

        @lru_cache(len(get_args(Match)))
        def verifier(kind: Match) -> TextVerifier:
            return TextVerifier(kind, read=read, threshold=threshold, relative=relative, absolute=absolute)

        verifier(match)  # refuses wrong arguments before anything is played
        self._verifier = verifier

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        try:
            verifier = self._verifier(task.payload.get("match", self.match))
        except (TextError, TypeError) as error:
            return Unscored("bad_match", f"task {task.id}: payload.match: {error}")
        choices = task.payload.get("choices", ())
        if not isinstance(choices, Mapping | list | tuple):
            return Unscored("bad_choices", f"task {task.id}: payload.choices is {type(choices).__name__}")
        reward = verifier.score(message.text, task.payload.get("answer"), choices=choices)
        if isinstance(reward, Scored) and self.format:
            return Scored(reward.value, {**reward.parts, **form.parts(message.text, self.format)})
        return reward
