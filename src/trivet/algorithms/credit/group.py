"""Credit: from rewards to advantages. Compared is within (group, player), never across."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trivet.algorithms.base import Batch
from trivet.algorithms.registry import register_credit

ROUNDING = 16 * float(np.finfo(np.float64).eps)
"""Relative difference up to which two rewards are one."""


@dataclass(frozen=True, slots=True)
class GroupStack:
    """Rollouts stacked by (group, player): `index_GK` int64 into the rollouts, -1 fills short groups."""

    index_GK: np.ndarray
    rollouts: int

    @classmethod
    def of(cls, batch: Batch, keep_N: np.ndarray | None = None) -> GroupStack:
        """Stack the rollouts in `keep_N` (default: scored and not aborted), in their order."""
        chosen = np.flatnonzero(batch.compared_N if keep_N is None else keep_N)
        key = batch.group_N[chosen] * max(1, len(batch.players)) + batch.player_N[chosen]
        order = np.argsort(key, kind="stable")
        key, chosen = key[order], chosen[order]
        first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, np.int64)
        size = np.diff(np.r_[first, len(key)])
        index_GK = np.full((len(first), int(size.max(initial=0))), -1, np.int64)
        column = np.arange(len(key)) - np.repeat(first, size)
        index_GK[np.repeat(np.arange(len(first)), size), column] = chosen
        return cls(index_GK, batch.rollouts)

    @property
    def mask_GK(self) -> np.ndarray:
        return self.index_GK >= 0

    def gather(self, values_N: np.ndarray) -> np.ndarray:
        """(_N,) -> (_G, _K); what the padding holds is unspecified."""
        return values_N[self.index_GK]

    def scatter(self, values_GK: np.ndarray) -> np.ndarray:
        """(_G, _K) -> (_N,) float64, NaN for rollouts that are not in the stack."""
        out = np.full(self.rollouts, np.nan)
        out[self.index_GK[self.mask_GK]] = values_GK[self.mask_GK]
        return out


GroupFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(reward_GK, mask_GK) -> advantage_GK: written for one group along the last axis, called once for all."""


def lift(function: GroupFunction) -> Callable[[Batch], np.ndarray]:
    """A credit from a per-group function. Left-out rollouts get NaN: no advantage, which is not 0."""

    def credit(batch: Batch) -> np.ndarray:
        stack = GroupStack.of(batch)
        mask_GK = stack.mask_GK
        reward_GK = np.where(mask_GK, stack.gather(batch.reward_N), 0.0)
        return stack.scatter(function(reward_GK, mask_GK))

    return credit


def all_equal(reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
    """(_G,) the group's rewards are the same, but for the last bits that adding up their parts may leave
    (0.1 + 0.2 is not 0.3). Decided before any mean is taken: no residue must ever become a signal.
    """
    high = np.where(mask_GK, reward_GK, -np.inf).max(-1, initial=-np.inf)
    low = np.where(mask_GK, reward_GK, np.inf).min(-1, initial=np.inf)
    return high - low <= ROUNDING * np.maximum(np.abs(high), np.abs(low))


def centred(reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
    """Reward minus its group's mean; exactly 0 in groups of equal rewards and of one."""
    n_G = np.maximum(mask_GK.sum(-1, keepdims=True), 1)
    mean_G = np.where(mask_GK, reward_GK, 0.0).sum(-1, keepdims=True) / n_G
    flat = all_equal(reward_GK, mask_GK)[..., None]
    return np.where(mask_GK & ~flat, reward_GK - mean_G, 0.0)


@register_credit("mean_only")
@dataclass(frozen=True)
class MeanOnly:
    """A_i = r_i - mean(r). Source: Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training").

    Unlike the normalised form it grows with the reward gap and does not blow up rare successes.
    """

    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        return lift(centred)(batch)


@register_credit("group_normalised")
@dataclass(frozen=True)
class GroupNormalised:
    """A_i = (r_i - mean(r)) / std(r), std with n - 1 (`population`: with n), nothing added to it.

    Source: GRPO (Shao et al. 2024, "DeepSeekMath"). A group of equal rewards is compared exactly and gives
    0, so the division needs no epsilon. A lone success among G gets sqrt(G - 1) * sqrt(G - 1) / sqrt(G).
    """

    population: bool = False
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        return lift(self._normalise)(batch)

    def _normalise(self, reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
        # Scaled by the largest deviation first: squares of 1e-200 or 1e200 would leave float64.
        delta_GK = centred(reward_GK, mask_GK)
        scale_G = np.abs(delta_GK).max(-1, keepdims=True, initial=0.0)
        delta_GK = delta_GK / np.where(scale_G > 0, scale_G, 1.0)
        n_G = mask_GK.sum(-1, keepdims=True) - (0 if self.population else 1)
        std_G = np.sqrt((delta_GK**2).sum(-1, keepdims=True) / np.maximum(n_G, 1))
        return delta_GK / np.where(std_G > 0, std_G, 1.0)


@register_credit("leave_one_out")
@dataclass(frozen=True)
class LeaveOneOut:
    """A_i = r_i - mean of the others; with `normalise` divided by the others' std (n - 1).

    Source: RLOO (Ahmadian et al. 2024, "Back to basics"). Where the others are all equal their std is 0 and
    the plain difference stands.
    """

    normalise: bool = False
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        return lift(self._leave_one_out)(batch)

    def _leave_one_out(self, reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
        out, same_G = np.zeros_like(reward_GK), all_equal(reward_GK, mask_GK)
        for k in range(
            reward_GK.shape[-1]
        ):  # over members, all groups at once; exact where sums would not be
            others = mask_GK.copy()
            others[:, k] = False
            n_G = others.sum(-1)
            flat = all_equal(reward_GK, others)
            first = np.where(others, reward_GK, -np.inf).max(-1, initial=-np.inf)
            mean_G = np.where(others, reward_GK, 0.0).sum(-1) / np.maximum(n_G, 1)
            mean_G = np.where(flat, first, mean_G)  # the mean of equal numbers is that number
            square = np.where(others, reward_GK - mean_G[:, None], 0.0) ** 2
            std_G = np.sqrt(square.sum(-1) / np.maximum(n_G - 1, 1))
            scale_G = np.where(flat | (std_G == 0), 1.0, std_G) if self.normalise else 1.0
            signal = mask_GK[:, k] & (n_G > 0) & ~same_G
            out[signal, k] = ((reward_GK[:, k] - np.where(signal, mean_G, 0.0)) / scale_G)[signal]
        return out
