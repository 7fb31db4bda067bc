"""Credit: from rewards to advantages. Compared is within (group, player), never across."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from trivet.algorithms.base import Batch
from trivet.algorithms.registry import register_credit

Std = Literal["sample", "population"]

ROUNDING = 16 * float(np.finfo(np.float64).eps)
"""Relative difference up to which two rewards are one."""


def group_key(batch: Batch) -> np.ndarray:
    """int64 (_N,): the same for rollouts that are compared with each other, those of one (group, player)."""
    return batch.group_N * max(1, len(batch.players)) + batch.player_N


@dataclass(frozen=True, slots=True)
class GroupStack:
    """Rollouts stacked by (group, player): `index_GK` int64 into the rollouts, -1 fills short groups."""

    index_GK: np.ndarray
    rollouts: int

    @classmethod
    def of(cls, batch: Batch) -> GroupStack:
        """Stack the rollouts that are compared (scored and not aborted), in their order."""
        chosen = np.flatnonzero(batch.compared_N)
        return cls.by_key(group_key(batch)[chosen], chosen, batch.rollouts)

    @classmethod
    def by_key(cls, key: np.ndarray, chosen: np.ndarray, rollouts: int) -> GroupStack:
        """Stack the entries `chosen` of a column of length `rollouts` by their `key`."""
        order = np.argsort(key, kind="stable")
        key, chosen = key[order], chosen[order]
        first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, np.int64)
        size = np.diff(np.r_[first, len(key)])
        index_GK = np.full((len(first), int(size.max(initial=0))), -1, np.int64)
        column = np.arange(len(key)) - np.repeat(first, size)
        index_GK[np.repeat(np.arange(len(first)), size), column] = chosen
        return cls(index_GK, rollouts)

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


def normalised(reward_GK: np.ndarray, mask_GK: np.ndarray, *, population: bool = False) -> np.ndarray:
    """Reward minus its group's mean, over its standard deviation (n - 1; `population`: n); 0 as `centred`."""
    # Scaled by the largest deviation first: squares of 1e-200 or 1e200 would leave float64.
    delta_GK = centred(reward_GK, mask_GK)
    scale_G = np.abs(delta_GK).max(-1, keepdims=True, initial=0.0)
    delta_GK = delta_GK / np.where(scale_G > 0, scale_G, 1.0)
    n_G = mask_GK.sum(-1, keepdims=True) - (0 if population else 1)
    std_G = np.sqrt((delta_GK**2).sum(-1, keepdims=True) / np.maximum(n_G, 1))
    return delta_GK / np.where(std_G > 0, std_G, 1.0)


def pooled(batch: Batch) -> Batch:
    """The batch as one group: what compares over all prompts (players stay apart)."""
    return replace(batch, group_N=np.zeros_like(batch.group_N))


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
    """A_i = (r_i - mean(r)) / std(r), std with n - 1 (`std: population`: with n), nothing added to it.

    Source: GRPO (Shao et al. 2024, "DeepSeekMath"). A group of equal rewards is compared exactly and gives
    0, so the division needs no epsilon. A success among k of G gets sqrt((G - k)(G - 1) / (k G)), whatever
    the gap: a lone one at G = 16 gets 3.75.
    """

    std: Std = "sample"
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        return lift(partial(normalised, population=self.std == "population"))(batch)


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
        n_G = np.maximum(mask_GK.sum(-1, keepdims=True) - 1, 1)  # the others
        reward_GK = np.where(mask_GK, reward_GK, 0.0)
        out = reward_GK - (reward_GK.sum(-1, keepdims=True) - reward_GK) / n_G
        if self.normalise:
            out = out / _others_std(reward_GK, mask_GK, n_G)
        # Sums less one member lose all digits where that one lies far from the rest, and cannot tell that the
        # rest is equal. Only the largest or the smallest can: those two are taken from the others directly.
        for fill, extreme in ((-np.inf, np.argmax), (np.inf, np.argmin)):
            if mask_GK.shape[-1]:
                k_G = extreme(np.where(mask_GK, reward_GK, fill), -1)
                out[np.arange(len(out)), k_G] = self._directly(reward_GK, mask_GK, k_G)
        return np.where(mask_GK & ~all_equal(reward_GK, mask_GK)[..., None], out, 0.0)

    def _directly(self, reward_GK: np.ndarray, mask_GK: np.ndarray, k_G: np.ndarray) -> np.ndarray:
        """(_G,) the advantage of member k of each group, from the others themselves."""
        groups = np.arange(len(k_G))
        others = mask_GK.copy()
        others[groups, k_G] = False
        n_G, flat = others.sum(-1), all_equal(reward_GK, others)
        mean_G = np.where(others, reward_GK, 0.0).sum(-1) / np.maximum(n_G, 1)
        high_G = np.where(others, reward_GK, -np.inf).max(-1, initial=-np.inf)
        mean_G = np.where(flat & (n_G > 0), high_G, mean_G)  # the mean of equal numbers is that number
        gap_G = reward_GK[groups, k_G] - mean_G
        if not self.normalise:
            return gap_G
        delta_GK = np.where(others, reward_GK - mean_G[:, None], 0.0)
        scale_G = np.abs(delta_GK).max(-1, initial=0.0)
        scale_G = np.where(scale_G > 0, scale_G, 1.0)
        std_G = scale_G * np.sqrt(((delta_GK / scale_G[:, None]) ** 2).sum(-1) / np.maximum(n_G - 1, 1))
        return gap_G / np.where(flat | (std_G == 0), 1.0, std_G)


def _others_std(reward_GK: np.ndarray, mask_GK: np.ndarray, n_G: np.ndarray) -> np.ndarray:
    """(_G, _K) std (n - 1) of the others, from sums; good for all but a group's extremes, 1 where it is 0."""
    delta_GK = centred(reward_GK, mask_GK)
    scale_G = np.abs(delta_GK).max(-1, keepdims=True, initial=0.0)
    scale_G = np.where(scale_G > 0, scale_G, 1.0)
    delta_GK = delta_GK / scale_G
    square_GK = delta_GK**2
    mean_GK = (delta_GK.sum(-1, keepdims=True) - delta_GK) / n_G
    rest_GK = square_GK.sum(-1, keepdims=True) - square_GK - n_G * mean_GK**2
    std_GK = scale_G * np.sqrt(np.maximum(rest_GK, 0.0) / np.maximum(n_G - 1, 1))
    return np.where(std_GK > 0, std_GK, 1.0)
