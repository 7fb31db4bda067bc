"""Credit for rollouts of many turns: shared by all of them, or told apart by the situation each was in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from trivet.algorithms.base import Batch
from trivet.algorithms.credit.group import (
    GroupStack,
    all_equal,
    centred,
    group_key,
    lift,
    normalised,
    pooled,
)
from trivet.algorithms.registry import register_credit


def lift_turns(batch: Batch, advantage_W: np.ndarray, other_N: np.ndarray) -> np.ndarray:
    """(_T,) each turn's advantage on its tokens; `other_N` on tokens of none (an expert's, a prompt's)."""
    turn_T = batch.turn_index_T
    if not len(advantage_W):
        return other_N[batch.rollout_T]
    return np.where(turn_T >= 0, advantage_W[turn_T], other_N[batch.rollout_T])


def turn_returns(batch: Batch, gamma: float) -> np.ndarray:
    """(_W,) R_w = sum over the rollout's turns v >= w of gamma^(v - w) r_v.

    r_v is what was earned at the turn; the rollout's reward is earned at its last one, and they add up.
    """
    rollout_W = batch.turn_rollout_W
    first_N = np.searchsorted(rollout_W, np.arange(batch.rollouts + 1))
    column_W = np.arange(len(rollout_W)) - first_N[rollout_W]
    last_W = column_W == (np.diff(first_N) - 1)[rollout_W]
    earned_W = np.nan_to_num(batch.turn_reward_W) + np.where(last_W, batch.reward_N[rollout_W], 0.0)
    out = np.zeros((batch.rollouts, int(column_W.max(initial=-1)) + 2))
    out[rollout_W, column_W] = earned_W
    for column in range(out.shape[1] - 2, -1, -1):
        out[:, column] += gamma * out[:, column + 1]
    return out[rollout_W, column_W]


@register_credit("gigpo")
@dataclass(frozen=True)
class GiGPO:
    """A_w = A_E + omega * A_S(w). Source: GiGPO (Feng et al. 2025, "Group-in-group policy optimization").

    A_E compares the rollout's reward within its group. A_S compares the discounted return of turn w with
    those of all turns of the (group, player) that were taken in the same state (`Node.state`, the anchor);
    it is 0 where no other turn shares it and for turns without one. `gamma`: discount per turn. Both
    comparisons subtract the mean and, with `normalise`, divide by the std (n - 1).
    """

    omega: float = 1.0
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.95
    normalise: bool = False
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_T,); NaN for unscored and aborted rollouts, A_E = 0 for a group of one and for equal rewards."""
        compare = normalised if self.normalise else centred
        episode_N = lift(compare)(batch)
        stack = _same_state(batch)
        mask_GK = stack.mask_GK
        return_GK = np.where(mask_GK, stack.gather(turn_returns(batch, self.gamma)), 0.0)
        step_W = np.nan_to_num(stack.scatter(compare(return_GK, mask_GK)))
        return lift_turns(batch, episode_N[batch.turn_rollout_W] + self.omega * step_W, episode_N)


def _same_state(batch: Batch) -> GroupStack:
    """Turns stacked by (group, player, state), where at least two share it."""
    chosen = np.flatnonzero(batch.compared_N[batch.turn_rollout_W] & (batch.turn_state_W >= 0))
    key = group_key(batch)[batch.turn_rollout_W[chosen]] * max(1, len(batch.states))
    key = key + batch.turn_state_W[chosen]
    dense, count = np.unique(key, return_inverse=True, return_counts=True)[1:]
    shared = count[dense] > 1
    return GroupStack.by_key(dense[shared], chosen[shared], len(batch.turn_rollout_W))


@register_credit("multi_step_grpo")
@dataclass(frozen=True)
class MultiStepGRPO:
    """A_w = (R - mean R) / std R for every turn w of the rollout: the last turn's advantage for all of them.

    Source: multi-step GRPO of Trinity-RFT (2025), after rLLM. The mean is the group's. `std`: `group`,
    `batch` (over all rollouts of the player: keeps the gaps of groups comparable) or `none` (not divided);
    with n - 1. `per_turn`: divided by the rollout's turns, so that long rollouts do not weigh more by their
    number of turns.
    """

    std: Literal["group", "batch", "none"] = "group"
    per_turn: bool = False
    group_min: ClassVar[int] = 2

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_N,); NaN for unscored and aborted rollouts, 0 for a group of one and for equal rewards."""
        advantage_N = lift(normalised if self.std == "group" else centred)(batch)
        if self.std == "batch":
            advantage_N = advantage_N / lift(_std)(pooled(batch))
        if self.per_turn:
            turns_N = np.bincount(batch.turn_rollout_W, minlength=batch.rollouts)
            advantage_N = advantage_N / np.maximum(turns_N, 1)
        return advantage_N


def _std(reward_GK: np.ndarray, mask_GK: np.ndarray) -> np.ndarray:
    """Each member's group's std (n - 1); 1 where rewards are equal."""
    delta_GK = centred(reward_GK, mask_GK)
    scale_G = np.abs(delta_GK).max(-1, keepdims=True, initial=0.0)
    unit_GK = delta_GK / np.where(scale_G > 0, scale_G, 1.0)
    n_G = np.maximum(mask_GK.sum(-1, keepdims=True) - 1, 1)
    std_G = scale_G * np.sqrt((unit_GK**2).sum(-1, keepdims=True) / n_G)
    flat_G = all_equal(reward_GK, mask_GK)[..., None]
    return np.broadcast_to(np.where(flat_G, 1.0, std_G), reward_GK.shape)
