"""Worked examples that join the batches of a stage that samples: what mixed objectives imitate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from trivet.explorer import Game
from trivet.runtime.reader import Reader
from trivet.runtime.supply import Supply
from trivet.tasks import load_tasks

if TYPE_CHECKING:
    from trivet.buffer import Lease, Ledger, StageLedger
    from trivet.recipe import Stage
    from trivet.render import Renderer


class Experts:
    """Takes `expert.prompts` examples for every step, in seeded epochs that never end.

    Their ledger is a stage of its own, `<stage>.expert`: the same guarantees, and no task id of theirs meets
    one that is played. It is acknowledged after the stage's; a step that a kill cuts between the two reads
    the same examples again.
    """

    def __init__(self, ledger: StageLedger, supply: Supply, reader: Reader, prompts: int) -> None:
        self.ledger, self.supply, self.reader, self.prompts = ledger, supply, reader, prompts
        self.task_ids = frozenset(reader.games)

    @classmethod
    def of(
        cls, stage: Stage, ledger: Ledger, renderer: Renderer, seed: int, warn: Callable[[str, str], None]
    ) -> Experts | None:
        """The experts a stage asks for; None where it asks for none. Raises TasksetError."""
        if stage.expert is None:
            return None
        tasksets = [load_tasks(config, seed=seed) for config in stage.expert.tasks]
        tasks = {task.id: task for taskset in tasksets for task in taskset.tasks}
        fingerprint = "+".join(taskset.fingerprint for taskset in tasksets)
        own = ledger.stage(f"{stage.name}.expert", fingerprint=fingerprint)
        games = {name: Game(task, None) for name, task in tasks.items()}  # type: ignore[arg-type]
        reader = Reader(own, games, renderer, max_length=stage.batch.micro_tokens, warn=warn)
        return cls(own, Supply(own, list(tasks), epochs=None, seed=seed), reader, stage.expert.prompts)

    async def take(self, step: int) -> Lease:
        """The step's examples: those it was trained on before a restart, or the next ones."""
        pinned = {pinned for pinned, _ in await asyncio.to_thread(self.ledger.pinned)}
        if step in pinned:
            return await asyncio.to_thread(self.ledger.take, self.prompts, step=step)
        filled = await self.reader.fill(step, self.prompts, self.supply.claim)
        return await asyncio.to_thread(self.ledger.take, len(filled.accepted), step=step)
