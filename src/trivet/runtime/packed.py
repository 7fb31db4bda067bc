"""A supervised stage on packed data: `StageRun` with packs in the place of groups under a lease."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from trivet.explorer import Filled
from trivet.recipe import Stage
from trivet.runtime.packs import PackReader
from trivet.runtime.stage import Experience, StageRun


class OtherData(RuntimeError):
    """A checkpoint was written on other packs than the stage has now."""


class PackedRun(StageRun):
    """Every step takes the next packs, in an order that data, seed and step decide alone.

    The ledger holds no rows of them: what a step was trained on can be computed again at any time
    (`PackOrder.taken`). It keeps the data's fingerprint and the stage's checkpoints.
    """

    used_up = "all packs are used up"

    def __init__(self, *args: Any, packs: PackReader, **more: Any) -> None:
        super().__init__(*args, **more)
        self.packs = packs

    async def experience(self, step: int, settings: Stage) -> Experience:
        begin = time.monotonic()
        packs = await asyncio.to_thread(self.packs.read, step)
        return Experience(Filled(seconds=time.monotonic() - begin), packs=packs)

    async def train(self, step: int, settings: Stage, experience: Experience) -> dict[str, float]:
        from trivet.trainer.packs import collate_packs

        updates = settings.batch.updates_per_batch
        return await self.update(step, lambda: collate_packs(experience.packs, step=step), updates)

    def position(self, step: int) -> dict[str, Any] | None:
        """The data's fingerprint and the row that follows `step` (None: there is none)."""
        return {"data": self.packs.data.fingerprint, "next": self.packs.order.cursor(step)}

    def check_position(self, step: int, saved: dict[str, Any] | None) -> None:
        """Raises OtherData."""
        own = self.position(step) or {}
        if saved is None or saved.get("data") != own["data"]:
            raise OtherData(
                f"stage {self.stage.name}: the checkpoint of step {step} was trained on other packs than "
                f"{self.packs.data.folder} holds now. Put the old folder back, or start anew with --fresh"
            )
        after = saved.get("next")
        if after is not None and own["next"] is not None and after != own["next"]:
            raise OtherData(
                f"stage {self.stage.name}: after step {step} the checkpoint goes on with {after}, the recipe "
                f"with {own['next']}: seed, batch or the order of packs are not what they were. Put them "
                "back, or start anew with --fresh"
            )

    def close(self) -> None:
        self.packs.close()
        super().close()

    def _describe(self, step: int, settings: Stage, experience: Experience) -> dict[str, float]:
        order = self.packs.order
        return {
            "train/prompts": float(sum(len(pack.lengths_D) for pack in experience.packs)),
            "train/packs": float(len(experience.packs)),
            "train/epoch": order.end(step) / len(order.tokens_P),
        }
