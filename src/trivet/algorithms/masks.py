"""Masks: which tokens may teach. Credit has been given before; the masked stay in their group's baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from trivet.algorithms.base import Batch
from trivet.algorithms.credit.group import GroupStack, all_equal
from trivet.algorithms.registry import register_mask


@register_mask("truncated")
def truncated(batch: Batch) -> np.ndarray:
    """keep_N: rollouts the policy ended itself. Source: DAPO (Yu et al. 2025), overlong filtering."""
    return ~batch.truncated_N


@register_mask("max_length")
def max_length(batch: Batch, *, tokens: Annotated[int, Field(gt=0)]) -> np.ndarray:
    """keep_N: rollouts of at most `tokens` trained tokens over all their rows.

    For a limit below the sampler's own: what is longer is compared with and teaches nothing. Unlike a
    penalty it does not say that long answers are bad.
    """
    return batch.length_N <= tokens


@register_mask("source")
def source(batch: Batch, *, only: Annotated[list[str], Field(min_length=1)]) -> np.ndarray:
    """keep_N: rollouts whose source is one of `only` (policy: what the stage sampled; expert: what somebody
    else wrote; others as their data name them). Source names that the batch lacks keep nothing."""
    wanted = [i for i, name in enumerate(batch.sources) if name in only]
    return np.isin(batch.source_N, wanted)


@register_mask("reward")
@dataclass(frozen=True)
class RewardRange:
    """keep_N: rollouts whose reward, as the verifier gave it, lies in (above, upto]; None: no bound.

    Source: Zhu et al. 2025, "The surprising effectiveness of negative reinforcement in LLM reasoning".
    Positive samples only with `above`, negative samples only with `upto`, e.g. 0.5 of rewards 0 and 1:
    learning from failures alone keeps answers varied, learning from successes alone sharpens them. Credit is
    given before, from the whole group. Rollouts without a reward, an expert's among them, stay.
    """

    above: float | None = None
    upto: float | None = None

    def __post_init__(self) -> None:
        if self.above is None and self.upto is None:
            raise ValueError("set above, upto or both; without them every reward is kept")
        if self.above is not None and self.upto is not None and self.above >= self.upto:
            raise ValueError(f"above {self.above:g} must lie below upto {self.upto:g}: nothing would be kept")

    def __call__(self, batch: Batch) -> np.ndarray:
        keep_N = np.ones(batch.rollouts, bool)
        if self.above is not None:
            keep_N &= ~(batch.raw_reward_N <= self.above)  # a NaN compares false, and stays
        if self.upto is not None:
            keep_N &= ~(batch.raw_reward_N > self.upto)
        return keep_N


@register_mask("equal_rewards")
def equal_rewards(batch: Batch) -> np.ndarray:
    """keep_N: rollouts of groups with at least two different rewards (after shaping, among those compared).

    Source: DAPO (Yu et al. 2025), equation 11, without the refill (`explorer.window.not_all_equal` has it).
    Groups all of whose answers are as good or as bad leave the denominators too, and every other stream: a
    distance to the reference is then not paid for them. Groups (of a player) in which fewer than two are
    compared, examples among them, stay: there was nothing to find equal. Unscored and aborted rollouts stay
    too: credit has nothing for them.
    """
    stack = GroupStack.of(batch)
    mask_GK = stack.mask_GK
    reward_GK = np.where(mask_GK, stack.gather(batch.reward_N), 0.0)
    same_G = all_equal(reward_GK, mask_GK) & (mask_GK.sum(-1) > 1)
    equal_N = stack.scatter(np.broadcast_to(same_G[:, None], mask_GK.shape).astype(np.float64))
    return ~(np.nan_to_num(equal_N) > 0)


def staleness_T(
    batch: Batch, current_version: int, distance: Callable[[int], int] | None = None
) -> np.ndarray:
    """int64 age of the turn each token belongs to, in publications; 0 where nothing was sampled.

    A turn is as old as its oldest token. `distance(version)` counts publications along the current line;
    without it versions are taken to be consecutive (`current_version - version`).
    """
    known_T = batch.sampled_T & (batch.version_T >= 0)
    versions, inverse = np.unique(batch.version_T[known_T], return_inverse=True)
    measure = distance or (lambda version: current_version - version)
    age = np.asarray([max(0, measure(int(v))) for v in versions], np.int64)
    age_T = np.zeros(batch.tokens, np.int64)
    age_T[known_T] = age[inverse]
    turns = int(batch.turn_T.max(initial=-1)) + 2
    key_T = batch.rollout_T * turns + batch.turn_T + 1
    oldest = np.zeros(batch.rollouts * turns, np.int64)
    np.maximum.at(oldest, key_T, age_T)
    return np.where(batch.turn_T >= 0, oldest[key_T], 0)
