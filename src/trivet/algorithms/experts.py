"""Parts for batches that hold an expert's answers beside the policy's: who is imitated, how much, when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from trivet.algorithms.base import Aggregation, Batch, Credit, Level, Mask, ObjectiveInputs
from trivet.algorithms.credit.group import GroupStack
from trivet.algorithms.registry import register_control, register_mask, register_objective

if TYPE_CHECKING:
    from torch import Tensor

EXPERT = "expert"
"""`Rollout.source` of answers that somebody else wrote."""

Side = Literal["imitate", "reward"]


def by_expert(batch: Batch) -> np.ndarray:
    """keep_N: rollouts an expert wrote."""
    wanted = [i for i, name in enumerate(batch.sources) if name == EXPERT]
    return np.isin(batch.source_N, wanted)


def by_policy(batch: Batch) -> np.ndarray:
    """keep_N: all others."""
    return ~by_expert(batch)


@dataclass(frozen=True)
class WithoutExperts:
    """A credit that does not see an expert's rewards: they are in no baseline and have no advantage."""

    credit: Credit

    def __call__(self, batch: Batch) -> np.ndarray | Mapping[str, np.ndarray]:
        reward_N = np.where(by_expert(batch), np.nan, batch.reward_N)
        return self.credit(replace(batch, reward_N=reward_N))


@dataclass(frozen=True)
class Share:
    """The weights of an aggregation over all rollouts, on those of `select` alone: streams under one
    denominator."""

    aggregation: Aggregation
    select: Mask

    def __call__(self, batch: Batch, mask_T: np.ndarray) -> np.ndarray:
        return self.aggregation(batch, mask_T) * self.select(batch)[batch.rollout_T]


@dataclass(frozen=True)
class OldSuccesses:
    """keep_N: the policy's own rollouts with a reward of at least `threshold`; with `older` only those of
    which the newest version in the batch sampled no token."""

    threshold: float
    older: bool

    def __call__(self, batch: Batch) -> np.ndarray:
        good_N = batch.compared_N & (np.nan_to_num(batch.raw_reward_N) >= self.threshold) & by_policy(batch)
        if self.older:
            newest = int(batch.version_T.max(initial=-1))
            fresh = batch.rollout_T[batch.sampled_T & (batch.version_T == newest)]
            good_N &= np.bincount(fresh, minlength=batch.rollouts) == 0
        return good_N


@register_mask("best_of")
def best_of(batch: Batch, *, k: Annotated[int, Field(gt=0)] = 1, above: float = 0.0) -> np.ndarray:
    """keep_N: the `k` rollouts of each group with the highest reward, where it is over `above`; of equal ones
    the first. Source: RAFT (Dong et al. 2023), best of K."""
    stack = GroupStack.of(batch)
    reward_GK = np.where(stack.mask_GK, stack.gather(batch.reward_N), -np.inf)
    rank_GK = np.argsort(np.argsort(-reward_GK, axis=-1, kind="stable"), axis=-1, kind="stable")
    kept_GK = stack.mask_GK & (rank_GK < k) & (reward_GK > above)
    return np.nan_to_num(stack.scatter(kept_GK.astype(np.float64))) > 0


@register_objective("uncertain_cross_entropy")
@dataclass(frozen=True)
class UncertainCrossEntropy:
    """l_t = -phi_t log pi(t), phi_t = p (1 - p), p = pi(t), detached.

    Source: CHORD-phi (Zhang et al. 2025, "On-policy RL meets off-policy experts", CHORD): an expert's token
    teaches most where the policy is undecided; neither what it knows already nor what would tear it away.
    """

    level: ClassVar[Level] = "token"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        p = x.logp_P.detach().exp()
        phi = p * (1 - p)
        return -x.weight_P * phi * x.logp_P, {"nll": -x.logp_P.detach().sum(), "phi": phi.sum()}


@register_control("alternate")
@dataclass(frozen=True)
class Alternate:
    """Every `period`-th step imitates only, the others learn from rewards only: scale 1 in turn, else 0."""

    side: Side
    period: Annotated[int, Field(ge=2)] = 2

    def __call__(self, scale: float, step: int, metrics: Mapping[str, float]) -> float:
        imitates = (step + 1) % self.period == 0  # the scale of the next step is asked for
        return float(imitates == (self.side == "imitate"))


@register_control("entropy_share")
@dataclass(frozen=True)
class EntropyShare:
    """share = mu exp(-H), H the policy's entropy (nats a token) in the step just trained; the other side has
    1 - share. Source: SRFT (Fu et al. 2025, "SRFT: a single-stage method with supervised and reinforcement
    fine-tuning for reasoning"): an undecided policy is pulled less by answers it would not give."""

    side: Side
    mu: Annotated[float, Field(ge=0, le=1)] = 0.1

    def __call__(self, scale: float, step: int, metrics: Mapping[str, float]) -> float:
        entropy = metrics.get("train/entropy")
        if entropy is None or not math.isfinite(entropy):
            return scale
        share = self.mu * math.exp(-max(0.0, entropy))
        return share if self.side == "imitate" else 1 - share
