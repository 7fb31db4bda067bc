"""A user's environment, as the documentation shows it, and functions for `env: callable`."""

from __future__ import annotations

from trivet.envs import SingleTurn, register_env
from trivet.types import Message, Reward, Rollout, Scored, Task


@register_env("loud")
class Shout(SingleTurn):
    def __init__(self, *, worth: float = 1.0) -> None:
        self.worth = worth

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        return Scored(self.worth * message.text.isupper())


class Incomplete(SingleTurn):
    pass


def digits(task: Task, text: str) -> float:
    return sum(char.isdigit() for char in text) / max(1, len(text))
