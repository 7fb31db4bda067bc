"""An environment and its tasks in one file: "abc: 3 digits" asks for an answer of exactly three.

A policy from random weights gets a little of the reward by chance, so reinforcement learning can start
without any supervised example.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from trivet.envs import SingleTurn, register_env
from trivet.tasks.generated import Item, register_generator
from trivet.types import Message, Reward, Rollout, Scored, Task


@register_generator("digits")
def digits(rng: random.Random, *, longest: int = 3) -> Iterator[Item]:
    """Endless questions; `args: {longest: 3}` in the recipe."""
    while True:
        n, name = rng.randint(1, longest), "".join(rng.choices("abcdefgh", k=3))
        yield Item(key=f"{name}/{n}", prompt=f"{name}: {n} digits", answer=str(n), response="")


@register_env("digits")
class Digits(SingleTurn):
    """Reward: the share of the answer that is digits, less `penalty` per character too many or missing."""

    def __init__(self, *, penalty: float = 0.3) -> None:
        if penalty < 0:
            raise ValueError(f"penalty {penalty} must not be negative")
        self.penalty = penalty

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        wanted, text = int(task.payload["answer"]), message.text
        share = sum(c.isdigit() for c in text) / max(1, len(text))
        off = abs(len(text) - wanted)
        exact = float(share == 1 and off == 0)
        return Scored(share - self.penalty * off, {"digits": share, "off": off, "exact": exact})
