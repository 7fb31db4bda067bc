"""Objectives: what each position (or unit) contributes to the loss. torch is imported inside the calls.

An objective returns weighted terms, to be summed, and statistics that add up over chunks, micro-batches and
ranks (`evaluate` documents their names).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios beyond e^20 are accidents; bounding them keeps one token from making the update infinite."""


def mismatch_stats(x: ObjectiveInputs) -> dict[str, Tensor]:
    """How far the current policy is from the sampler, over tokens whose sampler is known.

    With d = log pi(t) - log mu(t): `abs_log_diff` |d|, `kl_k1` -d and `kl_k3` exp(d) - 1 - d (both estimate
    KL(mu || pi) on mu's samples; Schulman 2020, "Approximating KL divergence").
    """
    import torch

    d = (x.logp_P - x.behaviour_P).detach()
    d = torch.where(torch.isnan(x.behaviour_P), torch.zeros_like(d), d)
    d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    size = d.abs()
    return {
        "abs_log_diff": size.sum(),
        "kl_k1": -d.sum(),
        "kl_k3": (torch.expm1(d) - d).sum(),
        "max/abs_log_diff": size.max(),
    }


@register_objective("ppo_clip")
@dataclass(frozen=True)
class PPOClip:
    """l_t = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(log pi - log pi_proximal).

    Source: PPO (Schulman et al. 2017); the two bounds apart: DAPO (Yu et al. 2025). `clip` None: -rho A. A
    clipped token has no gradient and keeps its place in the denominator.
    """

    clip: tuple[float, float] | None = (0.2, 0.2)
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip is not None and not (0 <= self.clip[0] <= 1 and self.clip[1] >= 0):
            raise ValueError(f"clip {self.clip}: the lower part lies in 0..1, the upper is not negative")

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.proximal_P is None or x.advantage_P is None:
            raise ValueError("ppo_clip reads proximal_P and advantage_P; one of them is missing")
        log_ratio = (x.logp_P - x.proximal_P).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio, advantage = torch.exp(log_ratio), x.advantage_P
        gain, clipped = ratio * advantage, torch.zeros_like(ratio, dtype=torch.bool)
        if self.clip is not None:
            low, high = 1 - self.clip[0], 1 + self.clip[1]
            bounded = ratio.clamp(low, high) * advantage
            clipped = bounded < gain
            gain = torch.minimum(gain, bounded)
        stats = {"ratio": ratio.detach().sum(), "clipped": clipped.sum(), **mismatch_stats(x)}
        return -x.weight_P * gain, stats


@register_objective("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy:
    """l_t = -log pi(t)."""

    level: ClassVar[Level] = "token"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -x.weight_P * x.logp_P, {"nll": -x.logp_P.detach().sum()}
