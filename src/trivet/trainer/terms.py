"""The loss of one micro-batch as the head asks for it, and what an update reports."""

from __future__ import annotations

import numpy as np
import torch

from trivet.algorithms.base import Batch, PreparedBatch, Stream
from trivet.algorithms.evaluate import finalise, merge, stream_loss
from trivet.trainer.head import Positions, Read, Slopes
from trivet.trainer.labels import Observe


class Terms:
    """The loss of the trained positions of one micro-batch, as the head asks for its derivative."""

    def __init__(
        self,
        prepared: PreparedBatch,
        streams: list[Stream],
        target_N: np.ndarray,
        observe: Observe | None = None,
    ) -> None:
        self.prepared, self.streams, self.target_N, self.observe = prepared, streams, target_N, observe
        self.loss, self.stats = 0.0, {}

    def __call__(self, part: slice, read: Read) -> Slopes:
        """The loss of a range by its log-probabilities, entropies (where an objective differentiates them)
        and the entries' log-probabilities."""
        logp, entropy, top = read.logp.detach().requires_grad_(), read.entropy, read.top
        leaves = {"logp": logp}
        if self.observe is not None:
            self.observe(self.target_N[part], read.logp.detach().double().cpu().numpy())
        if entropy is not None and self.prepared.algorithm.entropy:
            entropy = leaves["entropy"] = entropy.detach().requires_grad_()
        if top is not None:
            top = leaves["top"] = top.detach().requires_grad_()
        with torch.enable_grad():
            total = logp.new_zeros(())
            for stream in self.streams:
                index_P = self.target_N[part]
                loss, stats = stream_loss(
                    self.prepared, stream, index_P, logp, entropy_P=entropy, top_logp_E=top
                )
                total = total + loss
                merge(self.stats, stats)
            grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        self.loss += float(total.detach())
        found = dict(zip(leaves, grads, strict=True))
        first = found.pop("logp")
        return Slopes(torch.zeros_like(logp) if first is None else first, **found)


def cut(whole: Slopes, at: Positions, part: slice) -> Slopes:
    """The slopes of a range of positions."""
    top = whole.top
    if top is not None and at.entries is not None:
        top = top[int(at.entries[0][part.start]) : int(at.entries[0][part.stop])]
    return Slopes(whole.logp[part], None if whole.entropy is None else whole.entropy[part], top)


def units_of(batch: Batch, streams: list[Stream]) -> np.ndarray:
    """What stays in one micro-batch, by row: the widest unit of the unit-level streams, else the row."""
    kinds = {stream.spec.unit for stream in streams if stream.level == "unit"}
    if "group" in kinds:
        return batch.group_N[batch.row_rollout_R]
    return batch.row_rollout_R if "rollout" in kinds else np.arange(batch.rows)


def metrics(streams: list[Stream], stats: dict[str, torch.Tensor]) -> dict[str, float]:
    """Each stream's own, and under plain names those a reader looks for first."""
    own = finalise(stats)
    out = {f"train/{name}": value for name, value in own.items()}
    for stream in streams:
        for name, plain in (
            ("entropy", "entropy"),
            ("kl_k3", "kl"),
            ("abs_log_diff", "gap"),
            ("ess/sampler_ratio", "ess"),
            ("clipped", "clipped"),
            ("accuracy", "accuracy"),
            ("margin", "margin"),
        ):
            if f"{stream.name}/{name}" in own:
                out.setdefault(f"train/{plain}", own[f"{stream.name}/{name}"])
    return out
