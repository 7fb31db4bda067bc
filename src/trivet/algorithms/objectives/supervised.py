"""The loss of imitation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor


@register_objective("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy:
    """l_t = -log pi(t): imitation. Weights of messages and examples are in w_t already."""

    level: ClassVar[Level] = "token"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -x.weight_P * x.logp_P, {"nll": -x.logp_P.detach().sum()}
