"""Hands out issues: epochs over a stage's tasks, each in its own order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trivet.buffer import StageLedger
from trivet.types import IssueKey


class Supply:
    """Issues every task once an epoch, epochs 1, 2, ...; `epochs=None` never ends.

    The order of epoch e is a permutation seeded by (`seed`, e). What was issued before a restart is handed
    out
    first, in its old order.
    """

    def __init__(
        self,
        ledger: StageLedger,
        task_ids: Sequence[str],
        *,
        epochs: int | None,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if not task_ids:
            raise ValueError("a stage without tasks cannot issue any")
        self.ledger, self.task_ids, self.epochs = ledger, list(task_ids), epochs
        self.seed, self.shuffle = seed, shuffle
        self._next = 1
        while sum(ledger.counts(self._next).values()):
            self._next += 1

    def order(self, epoch: int) -> list[str]:
        """Task ids in the order of `epoch`."""
        if not self.shuffle:
            return self.task_ids
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.task_ids))
        return [self.task_ids[i] for i in order]

    def claim(self, n: int) -> list[IssueKey]:
        """Up to n issues, in flight from now on; fewer only when the last epoch is used up."""
        keys = self.ledger.claim(n)
        while len(keys) < n and (self.epochs is None or self._next <= self.epochs):
            self.ledger.issue(self.order(self._next), self._next)
            self._next += 1
            keys += self.ledger.claim(n - len(keys))
        return keys
