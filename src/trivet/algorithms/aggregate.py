"""Aggregation: from a mask to weights, the denominator inside.

With m_t the mask (0, 1, or a supervised loss weight), n_i the sum of m over a rollout's tokens (all its
rows), N the rollouts with n_i > 0. The weights of `token_mean` and `sequence_mean` sum to 1, and those
of `attempt_mean` where no attempt is shorter than its floor. An all-0 mask gives all-0 weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from trivet.algorithms.base import Batch
from trivet.algorithms.registry import register_aggregation


def _per_rollout(batch: Batch, mask_T: np.ndarray) -> tuple[np.ndarray, int]:
    """(n_i (_N,), N)."""
    n_N = np.bincount(batch.rollout_T, mask_T, minlength=batch.rollouts)
    return n_N, int(np.count_nonzero(n_N))


@register_aggregation("token_mean")
def token_mean(batch: Batch, mask_T: np.ndarray) -> np.ndarray:
    """w_t = m_t / sum m. Source: DAPO (Yu et al. 2025); the usual mean of supervised training."""
    total = mask_T.sum()
    return mask_T / total if total > 0 else np.zeros_like(mask_T)


@register_aggregation("sequence_mean")
def sequence_mean(batch: Batch, mask_T: np.ndarray) -> np.ndarray:
    """w_t = m_t / (N n_i): the mean of the rollouts' token means. Source: GRPO (Shao et al. 2024)."""
    n_N, count = _per_rollout(batch, mask_T)
    return mask_T / np.where(n_N > 0, n_N, 1.0)[batch.rollout_T] / max(count, 1)


@register_aggregation("weighted_sequence_mean")
def weighted_sequence_mean(batch: Batch, mask_T: np.ndarray) -> np.ndarray:
    """w_t = m_t / (c_i M), c_i a rollout's tokens with m > 0, M = sum over rollouts of n_i / c_i.

    As sequence_mean, but a rollout weighs the mean loss weight of its tokens: for examples and pairs that
    have a weight of their own. The weights sum to 1; where every m is 0 or 1 they are sequence_mean's.
    """
    n_N, _ = _per_rollout(batch, mask_T)
    c_N = np.bincount(batch.rollout_T, mask_T > 0, minlength=batch.rollouts)
    c_N = np.where(c_N > 0, c_N, 1.0)
    total = (n_N / c_N).sum()
    return mask_T / c_N[batch.rollout_T] / (total if total > 0 else 1.0)


@register_aggregation("sequence_sum")
def sequence_sum(batch: Batch, mask_T: np.ndarray) -> np.ndarray:
    """w_t = m_t / N: the mean of the rollouts' token sums, the plain policy gradient."""
    return mask_T / max(_per_rollout(batch, mask_T)[1], 1)


@register_aggregation("fixed")
@dataclass(frozen=True)
class Fixed:
    """w_t = m_t / (N L), L a constant number of tokens. Source: Dr. GRPO (Liu et al. 2025)."""

    length: Annotated[int, Field(gt=0)]

    def __call__(self, batch: Batch, mask_T: np.ndarray) -> np.ndarray:
        return sequence_sum(batch, mask_T) / self.length


@register_aggregation("attempt_mean")
@dataclass(frozen=True)
class AttemptMean:
    """w_t = m_t / (A max(n_a, floor)): the mean over attempts of each one's token mean.

    An attempt is all that was played together: the rollouts of all players with one attempt number in one
    group. n_a sums m over them, A counts attempts with n_a > 0. `floor` (tokens; FireFlash 2026 takes 2,048)
    keeps a very short attempt from putting its whole weight on a few tokens.
    """

    floor: Annotated[int, Field(gt=0)] = 1

    def __call__(self, batch: Batch, mask_T: np.ndarray) -> np.ndarray:
        attempts = int(batch.attempt_N.max(initial=-1)) + 1
        key_N = batch.group_N * attempts + batch.attempt_N
        attempt_N = np.unique(key_N, return_inverse=True)[1].reshape(-1)
        n_A = np.bincount(attempt_N[batch.rollout_T], mask_T, minlength=1)
        floored = np.maximum(n_A, self.floor)[attempt_N]
        return mask_T / floored[batch.rollout_T] / max(int(np.count_nonzero(n_A)), 1)
