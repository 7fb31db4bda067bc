"""Losses of scalar outputs: the critic's value, and the preferences a reward model learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from trivet.algorithms.base import Level, Model, ObjectiveInputs, UnitKind
from trivet.algorithms.objectives.preference import pair_margin
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor


@register_objective("value", needs={"value"})
@dataclass(frozen=True)
class ValueLoss:
    """l_t = 1/2 max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2), R the credit's column "return".

    Source: the clipped value loss of the PPO implementation (Schulman et al. 2017, OpenAI baselines `ppo2`):
    v_old is the estimate of before the step's first update; an update that has moved v by more than `clip`
    in the right direction stops pulling. `clip` None: 1/2 (v - R)^2. Tokens without a return are not trained.
    """

    clip: Annotated[float, Field(gt=0)] | None = 0.2
    level: ClassVar[Level] = "token"
    model: ClassVar[Model] = "critic"
    column: ClassVar[str] = "return"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.value_P is None:
            raise ValueError("the value loss reads value_P, which only a critic gives")
        value, target, old = x.value_P, x.columns["return"], x.columns["value"]
        square, clipped = (value - target).square(), torch.zeros_like(value, dtype=torch.bool)
        if self.clip is not None:
            bounded = (old + (value - old).clamp(-self.clip, self.clip) - target).square()
            clipped, square = bounded > square, torch.maximum(square, bounded)
        now = value.detach()
        stats = {
            "value": now.sum(),
            "return": target.sum(),
            "squared_error": (now - target).square().sum(),
            "clipped": clipped.sum(),
        }
        return 0.5 * x.weight_P * square, stats


@register_objective("bradley_terry")
@dataclass(frozen=True)
class BradleyTerry:
    """l = -log sigmoid(r_chosen - r_rejected - m), one term per pair; r read at an answer's last token; m:
    `margin` plus the pair's own, where the data has one.

    Source: Bradley & Terry 1952; as the loss of a reward model Stiennon et al. 2020, Ouyang et al. 2022; the
    margin: Touvron et al. 2023, "Llama 2", equation 2. A pair weighs what its two positions weigh together. A
    group of several chosen or rejected answers is compared by the mean of each side; one that has lost a side
    (to a mask, say) teaches nothing and is counted as `unpaired`.
    """

    margin: Annotated[float, Field(ge=0)] = 0.0
    level: ClassVar[Level] = "unit"
    unit: ClassVar[UnitKind] = "group"
    model: ClassVar[Model] = "critic"
    group_min: ClassVar[int] = 2

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.value_P is None or x.preference_P is None:
            raise ValueError("bradley_terry reads value_P and preference_P; one of them is missing")

        def per_unit(values_P: Tensor) -> Tensor:
            return values_P.new_zeros(x.units).index_add(0, x.unit_P, values_P)

        sides = [(x.preference_P == sign).to(x.value_P.dtype) for sign in (1, -1)]
        counts = [per_unit(side) for side in sides]
        means = [per_unit(x.value_P * s) / n.clamp_min(1) for s, n in zip(sides, counts, strict=True)]
        paired = ((counts[0] > 0) & (counts[1] > 0)).to(x.value_P.dtype)
        gap = means[0] - means[1]
        loss = -torch.nn.functional.logsigmoid(gap - self.margin - pair_margin(x))
        seen = gap.detach() * paired
        stats = {
            "unit/accuracy": (seen > 0).sum().to(gap.dtype),
            "unit/margin": seen.sum(),
            "unit/loss": (loss.detach() * paired).sum(),
            "sum/unpaired": (1 - paired).sum(),
        }
        return per_unit(x.weight_P) * paired * loss, stats
