"""The counterpart of the explorer for data: turns issues into examples or pairs instead of playing them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from trivet.buffer import StageLedger
from trivet.data.preference import preference_group
from trivet.data.sft import ExampleDropped, sft_group
from trivet.explorer import Filled, Game
from trivet.explorer.explorer import Refill
from trivet.recipe import Stage
from trivet.render import Renderer
from trivet.types import Group, IssueKey

_ROUNDS = 100  # a source in which so many draws in a row give nothing is not worth reading on


class NothingToRead(RuntimeError):
    """All of the data was read and no example of it could be used; the message counts why."""


class Reader:
    """Renders worked answers into groups of one, with `pairs` preferences into groups of two, with
    `lone` also single answers called good or bad. What is longer than `max_length` tokens is dropped."""

    def __init__(
        self,
        ledger: StageLedger,
        games: Mapping[str, Game],
        renderer: Renderer,
        *,
        max_length: int | None,
        warn: Callable[[str, str], None],
        pairs: bool = False,
        lone: bool = False,
    ) -> None:
        self._group = partial(preference_group, lone=lone) if pairs else sft_group
        self.ledger, self.games, self.renderer = ledger, games, renderer
        self.max_length, self.warn = max_length, warn

        self.advance: Callable[[int], None] = lambda n: None

    def settle(self, settings: Stage) -> None:
        """Nothing of a phase concerns reading."""

    async def fill(self, step: int, prompts: int, refill: Refill) -> Filled:
        """As `Explorer.fill`: `prompts` examples ready in the ledger, dropped ones with their cause.

        Raises NothingToRead when a whole pass over the data (or a hundred rounds) gives none.
        """
        begin = time.monotonic()
        filled = Filled()
        read, dropped = 0, Counter[str]()
        while len(filled.accepted) < prompts and filled.rounds < _ROUNDS:
            keys = await asyncio.to_thread(refill, prompts - len(filled.accepted))
            if not keys:
                filled.exhausted = True
                break
            filled.rounds += 1
            dropped += await asyncio.to_thread(self._read, step, keys, filled)
            read += len(keys)
            if not filled.accepted and read >= len(self.games):
                break
        if not filled.accepted and not filled.exhausted:
            causes = ", ".join(f"{cause} {n}" for cause, n in dropped.most_common())
            raise NothingToRead(
                f"stage {self.ledger.name}, step {step}: none of {read} examples in a row can be trained on "
                f"({causes}); look at max_length ({self.max_length or 'no limit'}) and at the answers in the "
                "data"
            )
        filled.seconds = time.monotonic() - begin
        return filled

    def _read(self, step: int, keys: Sequence[IssueKey], filled: Filled) -> Counter[str]:
        """Store what `keys` give; how many were dropped for what."""
        made: list[Group] = []
        dropped = Counter[str]()
        for key in keys:
            try:
                made.append(
                    self._group(
                        self.games[key.task_id].task,
                        self.renderer,
                        key,
                        group_id=f"{self.ledger.name}/{key}",
                        max_length=self.max_length,
                    )
                )
            except ExampleDropped as reason:
                self.ledger.filtered(key, reason.cause, step=step)
                self.warn(f"dropped_{reason.cause}", f"example {key}: {reason}")
                dropped[reason.cause] += 1
        self.ledger.put_all(made)
        filled.accepted += made
        filled.failed += dropped.total()
        self.advance(len(made))
        return dropped
