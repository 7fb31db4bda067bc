"""Objectives: what each position (or unit) contributes to the loss. torch is imported inside the calls.

An objective returns weighted terms, to be summed, and statistics that add up over chunks, micro-batches and
ranks (`evaluate` documents their names).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios beyond e^20 are accidents; bounding them keeps one token from making the update infinite."""


def mismatch_stats(x: ObjectiveInputs) -> dict[str, Tensor]:
    """How far the current policy is from the sampler, over tokens whose sampler is known.

    With d = log pi(t) - log mu(t): `abs_log_diff` |d|, `kl_k1` -d and `kl_k3` exp(d) - 1 - d (both estimate
    KL(mu || pi) on mu's samples; Schulman 2020, "Approximating KL divergence"). `sampler_ratio` exp(d), with
    its effective sample size per token, (sum exp(d))^2 / (n sum exp(2 d)): 1 on-policy (Kong 1992).
    """
    import torch

    d = (x.logp_P - x.behaviour_P).detach()
    d = torch.where(torch.isnan(x.behaviour_P), torch.zeros_like(d), d)
    d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    size, ratio = d.abs(), torch.exp(d)
    return {
        "abs_log_diff": size.sum(),
        "kl_k1": -d.sum(),
        "kl_k3": (torch.expm1(d) - d).sum(),
        "max/abs_log_diff": size.max(),
        "sampler_ratio": ratio.sum(),
        "ess/sampler_ratio": ratio.square().sum(),
    }


def bounded(log_ratio: Tensor) -> Tensor:
    """A log ratio within +-LOG_RATIO_BOUND. NaN stays: broken weights must show in the loss."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def proximal_log_ratio(x: ObjectiveInputs, name: str) -> tuple[Tensor, Tensor]:
    """(log pi - log pi_proximal bounded, the advantage). Raises ValueError where one is missing."""
    if x.proximal_P is None or x.advantage_P is None:
        raise ValueError(f"{name} reads proximal_P and advantage_P; one of them is missing")
    return bounded(x.logp_P - x.proximal_P), x.advantage_P


def check_clip(clip: tuple[float, float]) -> None:
    """Raises ValueError unless 1 - low and 1 + high enclose 1 and are no negative ratios."""
    if not (0 <= clip[0] <= 1 and clip[1] >= 0):
        raise ValueError(f"clip {clip}: the lower part lies in 0..1, the upper is not negative")


def clipped_gain(ratio: Tensor, advantage: Tensor, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(min(rho A, clip(rho, 1 - low, 1 + high) A), where the clip took effect)."""
    import torch

    gain = ratio * advantage
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage
    return torch.minimum(gain, clipped), clipped < gain


@register_objective("ppo_clip")
@dataclass(frozen=True)
class PPOClip:
    """l_t = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(log pi - log pi_proximal); with `dual` c
    where A < 0: -max(min(...), c A).

    Source: PPO (Schulman et al. 2017), equation 7; the two bounds apart: DAPO (Yu et al. 2025); the dual
    clip: Ye et al. 2020, "Mastering complex control in MOBA games with deep reinforcement learning": a token
    of a bad answer that has become c times as likely would otherwise pull without limit. `clip` None: -rho
    A. A clipped token has no gradient and keeps its place in the denominator.
    """

    clip: tuple[float, float] | None = (0.2, 0.2)
    dual: Annotated[float, Field(gt=1)] | None = None
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_clip(self.clip)
        if self.dual is not None and self.clip is not None and self.dual <= 1 + self.clip[1]:
            raise ValueError(f"dual {self.dual} must lie above the clip's upper bound {1 + self.clip[1]:g}")

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "ppo_clip")
        ratio = torch.exp(log_ratio)
        gain, clipped = ratio * advantage, torch.zeros_like(ratio, dtype=torch.bool)
        if self.clip is not None:
            gain, clipped = clipped_gain(ratio, advantage, self.clip)
        stats = {"ratio": ratio.detach().sum()}
        if self.dual is not None:
            floor = self.dual * advantage
            dual = (advantage < 0) & (gain < floor)
            gain, clipped = torch.where(dual, floor, gain), clipped | dual
            stats["dual_clipped"] = dual.sum()
        return -x.weight_P * gain, {**stats, "clipped": clipped.sum(), **mismatch_stats(x)}
