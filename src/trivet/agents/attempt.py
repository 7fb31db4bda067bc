"""Which try at which task this is: all that seeds, order and session names are made from."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trivet.engine.base import request_seed
from trivet.types import IssueKey
from trivet.types.rollout import RolloutRole

# A requeued issue must not sample what its first round sampled: its retries count from here.
_RETRIES_PER_ROUND = 1000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at one issue of a task.

    `index` is the place in the group, `retry` counts tries lost to infrastructure, `order` is the issue's
    sequence number (deterministic engines admit in it), `deadline` a `time.monotonic()` value or None.
    """

    run: str
    issue: IssueKey
    group: str
    index: int
    retry: int = 0
    role: RolloutRole = "train"
    order: int = 0
    deadline: float | None = None

    @property
    def episode(self) -> str:
        """The name that all players and branches of this try share."""
        return f"{self.group}/{self.index}"

    def session(self, player: str = "policy") -> str:
        """The engine session of one player: what `Engine.expect` and `settle` name."""
        return f"{self.episode}.{self.retry}/{player}"

    def seed(self, player: str, turn: int) -> int:
        """The sampling seed of one request."""
        retry = self.issue.round * _RETRIES_PER_ROUND + self.retry
        issue = self.issue
        return request_seed(self.run, issue.task_id, issue.epoch, self.index, player, turn, retry)

    def remaining(self) -> float | None:
        """Seconds until the deadline (negative once it has passed), None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()
