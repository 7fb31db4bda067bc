"""Objectives whose ratio is that of a whole answer: a row, or a rollout with all its rows.

Each sees whole units, that is a unit's trained tokens: what a mask has taken is in no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.objectives.policy import (
    bounded,
    check_clip,
    clipped_gain,
    mismatch_stats,
    proximal_log_ratio,
)
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor


def unit_sum(x: ObjectiveInputs, values_P: Tensor) -> Tensor:
    """(_U,) sums over each unit's positions."""
    return values_P.new_zeros(x.units).index_add(0, x.unit_P, values_P)


def unit_mean(x: ObjectiveInputs, values_P: Tensor) -> Tensor:
    """(_U,) means over each unit's positions."""
    import torch

    return unit_sum(x, values_P) / unit_sum(x, torch.ones_like(values_P)).clamp_min(1)


@register_objective("gspo")
@dataclass(frozen=True)
class GSPO:
    """l_t = -min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the unit's tokens of
    log pi - log pi_proximal).

    Source: Zheng et al. 2025, "Group sequence policy optimization", equations 5 and 7; where advantages
    differ inside a unit, GSPO-token (equations 13, 14): each token's gradient is s A_t times that of its own
    log pi, which sums to the former where they do not. `unit`: row or rollout. The bounds are those of a
    mean, so far narrower than a token's.
    """

    clip: tuple[float, float] = (3e-4, 4e-4)
    unit: Literal["row", "rollout"] = "row"
    level: ClassVar[Level] = "unit"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip(self.clip)

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "gspo")
        mean_U = unit_mean(x, log_ratio.detach())
        own = x.logp_P - x.logp_P.detach()  # 0, with the token's gradient
        gain, clipped = clipped_gain(torch.exp(mean_U[x.unit_P] + own), advantage, self.clip)
        stats = {"clipped": clipped.sum(), "unit/ratio": torch.exp(mean_U).sum()}
        return -x.weight_P * gain, {**stats, **mismatch_stats(x)}


@register_objective("gmpo")
@dataclass(frozen=True)
class GMPO:
    """l_t = -A exp(mean over the unit's tokens of m_t), m_t = sgn(A) min(sgn(A) d_t, sgn(A) clip(d_t, -low,
    high)), d_t = log pi - log pi_proximal.

    Source: Zhao et al. 2025, "Geometric-mean policy optimization": the geometric mean of the
    tokens' clipped ratios, so one token far out moves the answer little. `clip` bounds log ratios, in the
    paper by e^-0.4 and e^0.4. `unit`: row or rollout. For one advantage per answer; where a credit gives
    each token its own, each weighs the answer's mean by it.
    """

    clip: tuple[float, float] = (0.4, 0.4)
    unit: Literal["row", "rollout"] = "row"
    level: ClassVar[Level] = "unit"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.clip) < 0:
            raise ValueError(f"clip {self.clip}: bounds of a log ratio to both sides, not negative")

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "gmpo")
        sign = torch.sign(advantage)
        near = sign * log_ratio.clamp(-self.clip[0], self.clip[1])
        clipped = near < sign * log_ratio
        mean_U = unit_mean(x, sign * torch.minimum(sign * log_ratio, near))
        ratio_U = torch.exp(mean_U)
        stats = {"clipped": clipped.sum(), "unit/ratio": ratio_U.detach().sum(), **mismatch_stats(x)}
        return -x.weight_P * advantage * ratio_U[x.unit_P], stats


@register_objective("topr")
@dataclass(frozen=True)
class TOPR:
    """l_t = -a A log pi(t), detached a = 1 where A > 0 and clip(pi(y) / mu(y), low, high) elsewhere.

    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE". y is the unit's answer (`unit`:
    row or rollout), mu its sampler. Good answers are learnt whoever wrote them; bad ones are pushed down only
    as far as the policy would still write them, so the loss cannot run away. `bounds` (low, high): of the
    trajectory's ratio where A <= 0.
    """

    bounds: tuple[float, float] = (0.0, 1.0)
    unit: Literal["row", "rollout"] = "row"
    level: ClassVar[Level] = "unit"
    advantage: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True
    weigh: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.bounds[0] <= self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: two ratios, the lower first, not negative")

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.advantage_P is None:
            raise ValueError("topr reads advantage_P, which is missing")
        total_U = bounded(unit_sum(x, bounded((x.logp_P - x.behaviour_P).detach())))
        ratio_U = torch.exp(total_U)
        taper_U = ratio_U.clamp(*self.bounds)
        factor = torch.where(x.advantage_P > 0, torch.ones_like(x.logp_P), taper_U[x.unit_P])
        stats = {
            "taper": factor.sum(),
            "unit/ratio": ratio_U.sum(),
            "unit/tapered": (ratio_U != taper_U).sum(),
            **mismatch_stats(x),
        }
        return -x.weight_P * factor * x.advantage_P * x.logp_P, stats
