"""Corrections answer by answer: a row, or a rollout with all its rows, weighs or falls as a whole.

A unit's ratio is over its trained tokens; what a mask has taken is not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.corrections.sampling import check_bounds, sampler_log_ratio
from trivet.algorithms.objectives.policy import bounded
from trivet.algorithms.objectives.sequence import unit_mean, unit_sum
from trivet.algorithms.registry import register_correction

if TYPE_CHECKING:
    from torch import Tensor

Unit = Literal["row", "rollout"]
Veto = Annotated[float, Field(gt=0, lt=1)]


def _vetoed(x: ObjectiveInputs, log_ratio_P: Tensor, veto: float | None) -> Tensor:
    """bool_U: some token of the unit has a ratio below `veto`."""
    import torch

    if veto is None:
        return torch.zeros(x.units, dtype=torch.bool, device=log_ratio_P.device)
    return unit_sum(x, (log_ratio_P < math.log(veto)).to(log_ratio_P.dtype)) > 0


def _outside(ratio_U: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio_U < bounds[0]) | (ratio_U > bounds[1])


@register_correction("sequence_tis")
@dataclass(frozen=True)
class SequenceTIS:
    """factor = clip(exp(sum over the unit's tokens of log pi_proximal - log mu), low, high), for all of them.

    Source: Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch": the weight of the whole answer, unbiased but for the truncation, where
    token_tis is biased by leaving out what came before a token. Its variance grows with the length. `unit`:
    row or rollout. Reports, over units, `sequence_factor`, `sequence_clipped` and `ess/sequence_factor`.
    """

    bounds: tuple[float, float] = (0.5, 2.0)
    unit: Unit = "row"
    level: ClassVar[Level] = "unit"
    ratio: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True
    weigh: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.bounds)

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        ratio_U = torch.exp(bounded(unit_sum(x, sampler_log_ratio(x, "sequence_tis"))))
        factor_U = ratio_U.clamp(*self.bounds)
        return factor_U[x.unit_P], {
            "unit/sequence_factor": factor_U.sum(),
            "ess/unit/sequence_factor": factor_U.square().sum(),
            "unit/sequence_clipped": (factor_U != ratio_U).sum(),
        }


@register_correction("sequence_mis")
@dataclass(frozen=True)
class SequenceMIS:
    """factor = r where low <= r <= high and no token's own ratio lies below `veto`, else 0, for all tokens of
    the unit; r = exp(sum over the unit's tokens of log pi_proximal - log mu).

    Source: masked importance sampling of Liu, Li et al. 2025, "When speed kills stability": a weight beyond
    the bounds is no sample of this policy and is dropped rather than truncated. `weigh` False: 1 in place of
    r. `unit`: row or rollout. `veto` None: none. Reports, over units, `mis_factor`, `mis_masked`,
    `mis_vetoed` and `ess/mis_factor`.
    """

    bounds: tuple[float, float] = (0.0, 2.0)
    veto: Veto | None = 1e-4
    weigh: bool = True
    unit: Unit = "row"
    level: ClassVar[Level] = "unit"
    ratio: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self.bounds)

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio = sampler_log_ratio(x, "sequence_mis")
        ratio_U = torch.exp(bounded(unit_sum(x, log_ratio)))
        vetoed = _vetoed(x, log_ratio, self.veto)
        masked = vetoed | _outside(ratio_U, self.bounds)
        factor_U = torch.where(masked, 0.0, ratio_U if self.weigh else torch.ones_like(ratio_U))
        return factor_U[x.unit_P], {
            "unit/mis_factor": factor_U.sum(),
            "ess/unit/mis_factor": factor_U.square().sum(),
            "unit/mis_masked": masked.sum(),
            "unit/mis_vetoed": vetoed.sum(),
        }


@register_correction("geometric_mask")
@dataclass(frozen=True)
class GeometricMask:
    """factor = 1 where low <= g <= high and no token's own ratio lies below `veto`, else 0, for all tokens of
    the unit; g = exp(mean over the unit's tokens of log pi_proximal - log mu).

    Source: the geometric form of Liu, Li et al. 2025, "When speed kills stability": the mean gap of a token,
    whatever the length, tells answers that have left the policy. It is no importance weight, so it only
    masks; combine it with token_tis. `bounds` are close to 1: the source takes about 0.999 to 1.001 for the
    numerical gap alone, samples of older versions want more. `veto` None: none. Reports, over units,
    `geometric_ratio`, `geometric_masked`, `geometric_vetoed` and `ess/geometric_kept`, the share kept.
    """

    bounds: tuple[float, float] = (0.99, 1.01)
    veto: Veto | None = 1e-4
    unit: Unit = "row"
    level: ClassVar[Level] = "unit"
    ratio: ClassVar[bool] = True
    behaviour: ClassVar[bool] = True
    weigh: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bounds(self.bounds)

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio = sampler_log_ratio(x, "geometric_mask")
        ratio_U = torch.exp(unit_mean(x, log_ratio))
        vetoed = _vetoed(x, log_ratio, self.veto)
        masked = vetoed | _outside(ratio_U, self.bounds)
        factor_U = torch.where(masked, 0.0, torch.ones_like(ratio_U))
        return factor_U[x.unit_P], {
            "unit/geometric_ratio": ratio_U.sum(),
            "unit/geometric_kept": factor_U.sum(),
            "ess/unit/geometric_kept": factor_U.sum(),
            "unit/geometric_masked": masked.sum(),
            "unit/geometric_vetoed": vetoed.sum(),
        }
