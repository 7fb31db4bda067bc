"""The supervised counterpart of the explorer: turns issues into examples instead of playing them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from trivet.buffer import StageLedger
from trivet.data.sft import ExampleDropped, sft_group
from trivet.explorer import Filled, Game
from trivet.explorer.explorer import Refill
from trivet.recipe import Stage
from trivet.render import Renderer
from trivet.types import Group, IssueKey

_ROUNDS = 100  # a source in which so many draws in a row give nothing is not worth reading on


class Reader:
    """Renders worked answers into groups of one; longer ones than `max_length` tokens are dropped."""

    def __init__(
        self,
        ledger: StageLedger,
        games: Mapping[str, Game],
        renderer: Renderer,
        *,
        max_length: int | None,
        warn: Callable[[str, str], None],
    ) -> None:
        self.ledger, self.games, self.renderer = ledger, games, renderer
        self.max_length, self.warn = max_length, warn

        self.advance: Callable[[int], None] = lambda n: None

    def settle(self, settings: Stage) -> None:
        """Nothing of a phase concerns reading."""

    async def fill(self, step: int, prompts: int, refill: Refill) -> Filled:
        """As `Explorer.fill`: `prompts` examples ready in the ledger, dropped ones with their cause."""
        begin = time.monotonic()
        filled = Filled()
        while len(filled.accepted) < prompts and filled.rounds < _ROUNDS:
            keys = await asyncio.to_thread(refill, prompts - len(filled.accepted))
            if not keys:
                filled.exhausted = True
                break
            filled.rounds += 1
            await asyncio.to_thread(self._read, step, keys, filled)
        filled.seconds = time.monotonic() - begin
        return filled

    def _read(self, step: int, keys: Sequence[IssueKey], filled: Filled) -> None:
        made: list[Group] = []
        for key in keys:
            try:
                made.append(
                    sft_group(
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
                filled.failed += 1
        self.ledger.put_all(made)
        filled.accepted += made
        self.advance(len(made))
