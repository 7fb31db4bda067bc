"""Brings the trainer's weights into the engine and proves that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.engine.base import Engine, WeightsNotArrived
from trivet.recipe.schema import Weights as WeightsConfig
from trivet.weights import ProofFailed, WeightStore, prove, prove_probe

if TYPE_CHECKING:
    from trivet.buffer import Ledger

# Two forward passes that differ only in how they are cut: float32 rounding, and bfloat16's coarser one.
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}


class Synchroniser:
    """publish -> fetch -> update -> proof, under a version from the ledger's table."""

    def __init__(
        self,
        ledger: Ledger,
        store: WeightStore,
        engine: Engine,
        config: WeightsConfig,
        *,
        stage: str,
        incarnation: str,
        probe_ids: np.ndarray,
        dtype: str,
        timeout_s: float,
    ) -> None:
        self.ledger, self.store, self.engine, self.config = ledger, store, engine, config
        self.stage, self.incarnation, self.probe_ids = stage, incarnation, probe_ids
        self.tolerance, self.timeout_s = _TOLERANCE[dtype], timeout_s
        self.version: int | None = None
        self.step: int | None = None

    async def sync(
        self,
        step: int,
        tensors: Mapping[str, Any],
        probe: Callable[[np.ndarray], np.ndarray],
        run: Callable[[Callable[[], dict[str, float]]], Awaitable[dict[str, float]]],
    ) -> dict[str, float]:
        """Make the engine sample with the weights after `step`; `probe` gives the trainer's
        log-probabilities, `run` runs it all on the trainer's thread.

        Raises WeightsNotArrived (naming version and tensor, or what was waited for) and leaves the engine
        unusable until a whole update succeeds.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await run(lambda: self._sync(step, tensors, probe))
        except TimeoutError:
            raise WeightsNotArrived(
                f"weights after step {step}: the engine did not take them within {self.timeout_s:.0f} s "
                "(runtime.step_timeout_s); it may be dead or out of memory. Start the run again: it goes on "
                "from the last checkpoint"
            ) from None

    def _sync(
        self, step: int, tensors: Mapping[str, Any], probe: Callable[[np.ndarray], np.ndarray]
    ) -> dict[str, float]:
        version = self.ledger.new_version(
            step=step, stage=self.stage, parent=self.version, incarnation=self.incarnation
        )
        published = self.store.publish(tensors, version, step)
        self.ledger.seal(version, published.total)
        out: dict[str, float] = {"sync/version": float(version)}
        got = self.engine.update(self.store.fetch(version), version)
        try:
            if self.config.proof in ("checksum", "both"):
                prove(published.checksums, got, version, tied=published.tied)
            if self.config.proof in ("probe", "both"):
                ours, theirs = probe(self.probe_ids), self.engine.logprobs(self.probe_ids)
                out["sync/probe_gap"] = prove_probe(ours, theirs, version, tolerance=self.tolerance)
        except ProofFailed as error:
            raise WeightsNotArrived(f"after step {step}: {error}") from error
        self.version, self.step = version, step
        return out
