"""Credit from a rollout's reward with other baselines than the group's mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from trivet.algorithms.base import ROLES, AlgorithmError, Batch
from trivet.algorithms.credit.group import (
    ROUNDING,
    GroupStack,
    Std,
    all_equal,
    centred,
    group_key,
    lift,
    normalised,
    pooled,
)
from trivet.algorithms.credit.returns import whitened
from trivet.algorithms.registry import register_credit


@register_credit("reinforce")
@dataclass(frozen=True)
class Reinforce:
    """A_i = r_i - b. Source: Williams 1992, "Simple statistical gradient-following algorithms".

    `baseline`: b, a number (0: the plain reward), or `batch`: the mean over the batch's rollouts of one
    player. A constant cannot bias the gradient; the closer to the mean reward, the less noise.
    """

    baseline: float | Literal["batch"] = 0.0

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts."""
        if self.baseline == "batch":
            return lift(centred)(pooled(batch))
        return np.where(batch.compared_N, batch.reward_N - self.baseline, np.nan)


@register_credit("reinforce_plus_plus_baseline")
@dataclass(frozen=True)
class ReinforcePlusPlusBaseline:
    """A_t = (a_i - mean a) / std a, a_i = r_i - mean of its group; the second mean and the std (n - 1) are
    over all trained tokens of the batch.

    Source: REINFORCE++ with baseline (Hu et al. 2025, "REINFORCE++"). One scale for the whole batch keeps
    the differences between groups' gaps, which a std per group erases. A group of equal rewards stays at
    exactly 0: the batch's mean of a comes from lengths alone and compares nothing.
    """

    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_T,); NaN for unscored, aborted and baseline rollouts and where nothing is trained; 0 for a group
        of one and for equal rewards."""
        gap_N, flat_N = lift(centred)(batch), lift(_flat)(batch) == 1
        counted_N = batch.compared_N & (batch.role_N != ROLES.index("baseline"))
        rollout_T = batch.rollout_T
        token_K = np.flatnonzero((batch.train_T > 0) & counted_N[rollout_T])
        out_T = np.full(batch.tokens, np.nan)
        out_T[token_K] = np.where(flat_N[rollout_T[token_K]], 0.0, whitened(gap_N[rollout_T[token_K]]))
        return out_T


def _flat(reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
    """1.0 for members of groups of equal rewards, a group of one among them."""
    return np.where(mask_GK & all_equal(reward_GK, mask_GK)[..., None], 1.0, 0.0)


@register_credit("remax")
@dataclass(frozen=True)
class ReMax:
    """A_i = r_i - r(greedy). Source: ReMax (Li et al. 2023, "ReMax: a simple, effective, and efficient ...").

    The baseline of a (group, player) is the mean reward of its rollouts of role `baseline`: the last attempt
    of each group is played greedily and never trained (`batch.group` counts it). Rollouts of a group whose
    baseline is missing, unscored or aborted have no advantage (counted as `masked_rollouts/no_advantage`).

    Raises AlgorithmError when no group of the batch has one.
    """

    group_min: ClassVar[int] = 2
    greedy: ClassVar[bool] = True

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, for the baselines and where there is none."""
        greedy_N = batch.role_N == ROLES.index("baseline")
        if batch.rollouts and not greedy_N.any():
            raise AlgorithmError(
                f"credit 'remax' compares with a greedy rollout, but none of the {batch.groups} groups has "
                "one: an attempt of each must have role 'baseline'"
            )
        key_N, chosen_N = group_key(batch), greedy_N & batch.compared_N
        size = int(key_N.max(initial=-1)) + 1
        count = np.bincount(key_N[chosen_N], minlength=size)
        total = np.bincount(key_N[chosen_N], batch.reward_N[chosen_N], minlength=size)
        baseline_N = np.where(count > 0, total / np.maximum(count, 1), np.nan)[key_N]
        gap_N = batch.reward_N - baseline_N
        same_N = np.abs(gap_N) <= ROUNDING * np.maximum(np.abs(batch.reward_N), np.abs(baseline_N))
        return np.where(batch.compared_N & ~greedy_N, np.where(same_N, 0.0, gap_N), np.nan)


@register_credit("opmd")
@dataclass(frozen=True)
class OPMD:
    """A_i = r_i - b. Source: online policy mirror descent, as in Kimi k1.5 (2025) and Trinity-RFT (2025).

    `baseline`: `mean`: the group's mean. `logavgexp`: b = tau log mean exp(r / tau), the regularised value
    of the group: the mean for a large tau, the maximum for a small one. `pairwise`: the mean of r_i - r_j
    over the others j, which is n / (n - 1) times the first.
    """

    baseline: Literal["mean", "logavgexp", "pairwise"] = "mean"
    tau: Annotated[float, Field(gt=0)] = 1.0
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        return lift(self._advantage)(batch)

    def _advantage(self, reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
        n_G = mask_GK.sum(-1, keepdims=True)
        if self.baseline != "logavgexp":
            factor_G = n_G / np.maximum(n_G - 1, 1) if self.baseline == "pairwise" else 1.0
            return centred(reward_GK, mask_GK) * factor_G
        high_G = np.where(mask_GK, reward_GK, -np.inf).max(-1, keepdims=True, initial=-np.inf)
        below_GK = np.where(mask_GK, reward_GK - high_G, 0.0)  # exp of at most 0: nothing overflows
        total_G = np.where(mask_GK, np.exp(below_GK / self.tau), 0.0).sum(-1, keepdims=True)
        value_G = self.tau * np.log(total_G / np.maximum(n_G, 1))
        return np.where(mask_GK & ~all_equal(reward_GK, mask_GK)[..., None], below_GK - value_G, 0.0)


@register_credit("asymre")
@dataclass(frozen=True)
class AsymRE:
    """A_i = r_i - (mean(r) + shift). Source: AsymRE (Arnal et al. 2025, "Asymmetric REINFORCE for off-policy
    reinforcement learning").

    A baseline below the mean (`shift` < 0) leans on what went well, which keeps learning from another
    policy's samples stable. Equal rewards give -shift to each by definition; a group of one gives 0.
    """

    shift: float = -0.1
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one."""
        return lift(self._advantage)(batch)

    def _advantage(self, reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
        several_G = mask_GK.sum(-1, keepdims=True) > 1
        return np.where(mask_GK & several_G, centred(reward_GK, mask_GK) - self.shift, 0.0)


@register_credit("maxrl")
@dataclass(frozen=True)
class MaxRL:
    """A_i = (r_i - mean(r)) / mean(r), 0 where the mean is 0.

    Source: Tajwar et al. 2026, "Maximum likelihood reinforcement learning". For rewards 0 and 1 with k
    successes among n a success gets n / k - 1 and a failure -1: the gradient of log pass rate (truncated at
    order n) instead of the pass rate, so hard prompts weigh more.

    Raises AlgorithmError for negative rewards: their mean is no success rate.
    """

    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        negative = np.flatnonzero(batch.compared_N & (batch.reward_N < 0))
        if len(negative):
            raise AlgorithmError(
                f"credit 'maxrl' divides by the group's mean reward, so rewards must not be negative; "
                f"{len(negative)} are, the first is {batch.reward_N[negative[0]]:g} of rollout "
                f"{batch.rollout_ids[negative[0]]!r}; drop the penalty or take credit mean_only"
            )
        return lift(self._advantage)(batch)

    def _advantage(self, reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
        delta_GK = centred(reward_GK, mask_GK)
        n_G = np.maximum(mask_GK.sum(-1, keepdims=True), 1)
        mean_G = np.where(mask_GK, reward_GK, 0.0).sum(-1, keepdims=True) / n_G
        return delta_GK / np.where(mean_G > 0, mean_G, 1.0)


@register_credit("success_offset")
@dataclass(frozen=True)
class SuccessOffset:
    """A = (R' - mean R') / std R' + (b - mean b) / bonus_scale, over the group. Source: FireFlash (2026).

    R' = `solve_value` for a solve (raw reward >= `solved`), `partial` * R for the rest: partial credit gives
    a direction and never rivals a solve. b = `bonus` (1 - tokens / longest solve) for a solve where the
    group has at least two, else 0; tokens are the rollout's trained ones. The length term stays where all
    are solved and the first is 0. `std` as of group_normalised.
    """

    solved: float = 1.0
    solve_value: float = 1.5
    partial: float = 0.5
    bonus: float = 0.2
    bonus_scale: Annotated[float, Field(gt=0)] = 0.5
    std: Std = "sample"
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one."""
        solved_N = batch.compared_N & (batch.raw_reward_N >= self.solved)
        offset_N = np.where(solved_N, self.solve_value, self.partial * batch.reward_N)
        stack = GroupStack.of(batch)
        mask_GK = stack.mask_GK
        reward_GK = np.where(mask_GK, stack.gather(offset_N), 0.0)
        bonus_GK = np.where(mask_GK, stack.gather(self.bonus * shortness_N(batch, solved_N)), 0.0)
        first = normalised(reward_GK, mask_GK, population=self.std == "population")
        return stack.scatter(first + centred(bonus_GK, mask_GK) / self.bonus_scale)


def shortness_N(batch: Batch, solved_N: np.ndarray) -> np.ndarray:
    """(_N,) 1 - tokens / tokens of the (group, player)'s longest solve, for solves; 0 elsewhere.

    A lone solve is its group's longest, which gives 0: a bonus takes two.
    """
    key_N = group_key(batch)
    longest = np.zeros(int(key_N.max(initial=-1)) + 1)
    np.maximum.at(longest, key_N[solved_N], batch.length_N[solved_N])
    share_N = batch.length_N / np.maximum(longest, 1)[key_N]
    return np.where(solved_N, 1 - share_N, 0.0)
