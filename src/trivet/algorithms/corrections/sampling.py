"""Corrections token by token: what the sampler's lag and low precision do to one token.

Three policies are at work ("decoupled PPO": Hilton et al. 2022, "Batch size-invariance for policy
optimization"; Fu et al. 2025, "AReaL"): mu sampled, pi_proximal is where the update starts, pi is trained.
With `proximal: recompute` the objective's ratio and clip are pi over pi_proximal, and the correction's factor
carries pi_proximal over mu; their product is the whole importance weight, but only the first is clipped as a
trust region.

A correction that multiplies by the ratio says so by `weigh`: two of them would weigh twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.objectives.policy import bounded
from trivet.algorithms.registry import register_correction

if TYPE_CHECKING:
    from torch import Tensor


def sampler_log_ratio(x: ObjectiveInputs, name: str) -> Tensor:
    """log pi_proximal - log mu, detached and bounded; 0 where no sampler is known. ValueError without a
    proximal policy."""
    import torch

    if x.proximal_P is None:
        raise ValueError(f"{name} reads proximal_P, which is missing")
    return bounded(torch.nan_to_num((x.proximal_P - x.behaviour_P).detach(), nan=0.0))


def check_bounds(bounds: tuple[float, float]) -> None:
    """Raises ValueError unless the two ratios enclose 1."""
    if not 0 <= bounds[0] <= 1 <= bounds[1]:
        raise ValueError(f"bounds {bounds}: low must lie in 0..1 and high be at least 1")


@register_correction("token_tis")
@dataclass(frozen=True)
class TokenTIS:
    """factor_t = clip(exp(log pi_proximal - log mu), low, high): truncated importance sampling per token.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; with
    both bounds: the truncated weights of Ionides (2008). mu is what the sampler said, so the factor repairs
    lag and the numerical gap between engine and trainer; rho of the objective starts from pi_proximal.
    Reports `tis_factor`, `tis_clipped` (share of tokens) and `ess/tis_factor`, the effective sample size per
    token, (sum f)^2 / (n sum f^2): 1 where all weigh alike (Kong 1992).
    """

    bounds: tuple[float, float] = (0.5, 2.0)
    level: ClassVar[Level] = "token"
    ratio: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True
    weigh: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.bounds)

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        ratio = torch.exp(sampler_log_ratio(x, "token_tis"))
        factor = ratio.clamp(*self.bounds)
        return factor, {
            "tis_factor": factor.sum(),
            "ess/tis_factor": factor.square().sum(),
            "tis_clipped": (factor != ratio).sum(),
        }


@register_correction("icepop")
@dataclass(frozen=True)
class IcePop:
    """factor_t = k where low <= k <= high, else 0; k = exp(log pi_proximal - log mu).

    Source: Ling Team 2025, "Every step evolves: scaling reinforcement learning for trillion-scale thinking
    model" (IcePop). A token on which engine and trainer disagree beyond the bounds says nothing reliable and
    is left out, where truncation would let it pull at the bound. `weigh` False: 1 inside the bounds instead
    of k, to be combined with a truncated weight. Reports `icepop_factor`, `icepop_masked` (share of tokens)
    and `ess/icepop_factor`.
    """

    bounds: tuple[float, float] = (0.5, 5.0)
    weigh: bool = True
    level: ClassVar[Level] = "token"
    ratio: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.bounds)

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        ratio = torch.exp(sampler_log_ratio(x, "icepop"))
        outside = (ratio < self.bounds[0]) | (ratio > self.bounds[1])
        factor = torch.where(outside, 0.0, ratio if self.weigh else torch.ones_like(ratio))
        return factor, {
            "icepop_factor": factor.sum(),
            "ess/icepop_factor": factor.square().sum(),
            "icepop_masked": outside.sum(),
        }
