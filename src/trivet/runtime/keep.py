"""Checkpoints and the ledger move together: first the files, then the ledger's mark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.recipe.schema import Checkpoints

if TYPE_CHECKING:
    from trivet.buffer import AttachmentStore, StageLedger
    from trivet.trainer import Trainer


class Keeper:
    """Writes, finds and thins the checkpoints of one stage.

    `kept` is the step of the newest one (0: the stage's start), `pinned` the later steps whose rollouts are
    stored and are trained on again before anything is sampled, `damaged` the newer folders that were passed
    over, and why.
    """

    def __init__(
        self, directory: Path, config: Checkpoints, *, keep_tokens: bool, attachments: AttachmentStore
    ) -> None:
        self.directory, self.config = directory, config
        self.keep_tokens, self.attachments = keep_tokens, attachments
        self.others: list[StageLedger] = []  # further ledgers that go along with the stage's
        self.kept = 0
        self.damaged: dict[Path, str] = {}
        self.pinned: set[int] = set()

    def due(self, step: int) -> bool:
        """`checkpoints.every` steps have passed since the last one."""
        every = self.config.every
        return every > 0 and step // every > self.kept // every

    def write(self, step: int, trainer: Trainer, ledger: StageLedger, state: dict[str, Any]) -> None:
        """Durable on disk before the ledger counts its steps as final. A step is written once unless it ends
        the stage."""
        from trivet.trainer import checkpoint

        checkpoint.write(self.directory, step, trainer, state)
        for each in (*self.others, ledger):
            each.checkpoint(step, state)
        self.kept = step
        oldest = checkpoint.retain(self.directory, self.config.keep_last)
        if not self.keep_tokens:
            for each in (*self.others, ledger):
                each.collect(oldest, self.attachments)

    def _damaged(self, found: Path | None) -> dict[Path, str]:
        """Checkpoint folders newer than `found`, each with what is wrong with it."""
        from trivet.trainer import checkpoint

        folders = sorted(self.directory.glob("step_*")) if self.directory.is_dir() else []
        newer = [path for path in folders if found is None or path.name > found.name]
        return {path: "; ".join(checkpoint.faults(path)) for path in newer}

    @staticmethod
    def _aside(path: Path) -> Path:
        """Out of the way under another name: it must not count as the newest when old ones are removed."""
        target = path.with_name(f"damaged_{path.name}")
        if target.exists():
            shutil.rmtree(target)
        return path.rename(target)

    def restore(self, trainer: Trainer, ledger: StageLedger) -> dict[str, Any]:
        """The newest whole checkpoint's state ({} without one), with the ledger brought back to it."""
        from trivet.trainer import checkpoint

        found = checkpoint.latest(self.directory)
        self.damaged = {self._aside(path): fault for path, fault in self._damaged(found).items()}
        state: dict[str, Any] = {}
        if found is not None:
            state = checkpoint.read(found, trainer)
        self.kept = int(state.get("step", 0))
        for each in (*self.others, ledger):
            each.rewind(self.kept)
            each.resample()  # a step that was never finished is played again as a whole
        self.pinned = {step for step, _ in ledger.pinned()}
        return state
