"""Regularisers: the distance to another policy and the entropy, as terms of the loss.

Neither is proportional to an advantage: tokens whose advantage is 0 keep their pull.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from trivet.algorithms.base import Level, ObjectiveInputs
from trivet.algorithms.objectives.policy import bounded
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs", "low_var"]


@register_objective("kl")
@dataclass(frozen=True)
class KL:
    """An estimate of KL(pi || other) from d = log pi(t) - log other(t) of the sampled token:
    k1 d; k2 d^2 / 2; k3 exp(-d) - 1 + d; abs |d|; low_var k3 clamped to at most 10.

    Source: Schulman 2020, "Approximating KL divergence"; abs and low_var as the common trainers have them. k1
    and k3 have the right mean under pi, k2 nearly so near 0; k3 and k2 are never negative. As a loss, under
    samples of pi, their gradients differ from their values:
    k1: sum of grad log pi, 0 in the mean: noise and no pull (it belongs into the reward);
    k2: d grad log pi, the gradient of KL(pi || other);
    k3: (1 - exp(-d)) grad log pi, the gradient of KL(other || pi); unbounded where pi has left what the other
    policy would say; `low_var` has no gradient beyond its clamp (d < -2.6, d > 11);
    abs: sign(d) grad log pi, the same pull at any distance.

    `weigh`: times rho = pi / pi_proximal, with its gradient: the gradient of k1 and k3 is then d grad log pi
    too, that of KL(pi || other), also on samples of pi_proximal (DeepSeek-AI 2025, "DeepSeek-V3.2").
    `to`: reference (the model the stage started from unless another is named; needs ref_logp) or proximal
    (what the ratio starts from; with proximal: behaviour the sampler). Log ratios are bounded by 20.
    """

    estimator: Estimator = "k3"
    to: Literal["reference", "proximal"] = "reference"
    weigh: bool = False
    level: ClassVar[Level] = "token"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logp"}) if self.to == "reference" else frozenset()

    @property
    def ratio(self) -> bool:
        return self.weigh or self.to == "proximal"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        other = x.ref_P if self.to == "reference" else x.proximal_P
        if other is None:
            raise ValueError(f"kl reads log-probabilities of the {self.to} policy, which are missing")
        d = bounded(x.logp_P - other)
        k3 = torch.expm1(-d) + d
        terms = {"k1": d, "k2": d.square() / 2, "k3": k3, "abs": d.abs(), "low_var": k3.clamp(max=10)}
        stats = {"k1": d.detach().sum(), "k3": k3.detach().sum()}
        term = terms[self.estimator]
        if self.weigh:
            if x.proximal_P is None:
                raise ValueError("kl with weigh reads proximal_P, which is missing")
            term = term * torch.exp(bounded(x.logp_P - x.proximal_P))
        return x.weight_P * term, stats


@register_objective("entropy_bonus", entropy=True)
@dataclass(frozen=True)
class EntropyBonus:
    """l_t = -H(pi(. | before t)) over the whole vocabulary, at the row's temperature.

    Source: Williams & Peng 1991, "Function optimization using connectionist reinforcement learning
    algorithms"; Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning". Its scale is the
    bonus' coefficient: a small one keeps the policy from closing early, a large one drives it to noise.
    """

    level: ClassVar[Level] = "token"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if x.entropy_P is None:
            raise ValueError("entropy_bonus reads entropy_P, which is missing")
        return -x.weight_P * x.entropy_P, {}
