"""A step's metrics from those of its updates and of what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trivet.algorithms.objectives import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from trivet.algorithms.base import PreparedBatch

_SUMMED = ("train/micro_batches", "train/tokens_trained", "train/tokens_forwarded", "train/tokens_shared")
_LAST = ("train/lr", "train/updates", "train/bad_updates")


def joined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step's updates as one: times and counts summed, maxima kept, counters and the learning
    rate as they are after the last, gaps by age weighed by their tokens, all else averaged. Updates with
    nothing to train on count only where there is no other."""
    updates = [update for update in updates if not update.get("train/skipped")] or updates[:1]
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name.startswith("train/loss/"):  # ends with what somebody called a source
            out[name] = sum(values) / len(values)
            continue
        counted = name in _SUMMED or name.endswith(("/tokens", "/units")) or "/aged/" in name
        if counted or name.startswith("time/"):
            out[name] = sum(values)
        elif "/gap/" in name:
            tokens = [u.get(name.replace("/gap/", "/aged/"), 0.0) for u in updates if name in u]
            out[name] = sum(v * n for v, n in zip(values, tokens, strict=True)) / max(1.0, sum(tokens))
        elif name.replace("/critic/", "/") in _LAST:
            out[name] = values[-1]
        elif name.endswith("_max"):
            out[name] = max(values)
        else:
            out[name] = sum(values) / len(values)
    return out


def reference_kl(parts: Sequence[PreparedBatch]) -> dict[str, float]:
    """train/ref_kl: KL(sampling policy, reference) by the sampled tokens that are trained, where the
    reference was asked: mean of exp(-d) - 1 + d, d = log mu - log ref (k3; Schulman 2020). The same whether
    the distance enters the loss, the reward or neither."""
    total, count = 0.0, 0
    for part in parts:
        reference_T = part.batch.annotations.get("ref_logp")
        if reference_T is not None:
            d_T = np.asarray(part.batch.logprob_T, np.float64) - reference_T
            d_P = np.clip(d_T[part.trained_T & np.isfinite(d_T)], -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            total, count = total + float((np.expm1(-d_P) + d_P).sum()), count + len(d_P)
    return {"train/ref_kl": total / count} if count else {}
