"""Corrections: factors for tokens that another policy sampled. Detached; the denominator never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.objectives import LOG_RATIO_BOUND
from trivet.algorithms.registry import register_correction

if TYPE_CHECKING:
    from torch import Tensor


@register_correction("token_tis")
@dataclass(frozen=True)
class TokenTIS:
    """factor_t = clip(exp(log pi_proximal - log mu), low, high): truncated importance sampling per token.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; with
    both bounds: the truncated weights of Ionides (2008). mu is what the sampler said, so the factor repairs
    lag and the numerical gap between engine and trainer; rho of the objective starts from pi_proximal.
    """

    bounds: tuple[float, float] = (0.5, 2.0)
    level: ClassVar[Level] = "token"
    ratio: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.bounds[0] <= 1 <= self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: low must lie in 0..1 and high be at least 1")

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.proximal_P is None:
            raise ValueError("token_tis reads proximal_P, which is missing")
        log_ratio = (x.proximal_P - x.behaviour_P).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = torch.exp(log_ratio)
        factor = ratio.clamp(*self.bounds)
        return factor, {"tis_factor": factor.sum(), "tis_clipped": (factor != ratio).sum()}
