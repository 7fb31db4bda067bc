"""Objectives that weigh or mask the plain score: l_t = -factor A log pi(t), the factor detached; and SAPO's
soft gate, which stands in a clip's place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from trivet.algorithms.base import Level, ObjectiveInputs, UnitKind
from trivet.algorithms.objectives.policy import check_clip, mismatch_stats, proximal_log_ratio
from trivet.algorithms.objectives.sequence import unit_mean
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor

Positive = Annotated[float, Field(gt=0)]
Clip = tuple[float, float]


@register_objective("cispo")
@dataclass(frozen=True)
class CISPO:
    """l_t = -sg(clip(rho, low, high)) A log pi(t), rho = exp(log pi - log pi_proximal), sg: no gradient.

    Source: MiniMax 2025, "MiniMax-M1": the weight is clipped, not the update, so rare
    tokens that turn an answer keep their gradient. `bounds`: of rho itself; the lower one is 0 in the paper,
    the upper one 5 in Khatri et al. 2025, "The art of scaling reinforcement learning compute for LLMs".
    """

    bounds: tuple[float, float] = (0.0, 5.0)
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.bounds[0] <= 1 <= self.bounds[1]:
            raise ValueError(f"bounds {self.bounds}: low must lie in 0..1 and high be at least 1")

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "cispo")
        ratio = torch.exp(log_ratio.detach())
        factor = ratio.clamp(*self.bounds)
        stats = {"ratio": ratio.sum(), "clipped": (factor != ratio).sum(), **mismatch_stats(x)}
        return -x.weight_P * factor * advantage * x.logp_P, stats


@register_objective("is_reinforce")
@dataclass(frozen=True)
class ISReinforce:
    """l_t = -sg(min(rho, cap)) A log pi(t), rho = exp(log pi - log pi_proximal), sg: no gradient.

    Source: REINFORCE (Williams 1992) with the importance weights of off-policy policy gradients (Degris et
    al. 2012, "Off-policy actor-critic"), per token. Its gradient is that of -rho A. `cap` None: unbounded
    (up to e^20), unbiased per token and of large variance on stale samples.
    """

    cap: Annotated[float, Field(ge=1)] | None = None
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "is_reinforce")
        ratio = torch.exp(log_ratio.detach())
        factor = ratio if self.cap is None else ratio.clamp(max=self.cap)
        stats = {"ratio": ratio.sum(), "clipped": (factor != ratio).sum(), **mismatch_stats(x)}
        return -x.weight_P * factor * advantage * x.logp_P, stats


@register_objective("dppo")
@dataclass(frozen=True)
class DPPO:
    """l_t = -M sg(min(rho, cap)) A log pi(t), rho = p / q, p = pi(t), q = pi_proximal(t).

    M = 0 where the token has already moved the way A pushes it (rho > 1 and A > 0, or rho < 1 and A < 0) and
    the divergence of "this token or another" exceeds its bound: tv |p - q|, or
    kl q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Source: Qi et al. 2026, "Rethinking the trust region in
    LLM reinforcement learning", the binary divergences: a ratio's clip hits rare tokens, whose ratio is
    noise, and lets frequent ones pass, whose shift is large. `bounds`: (where A < 0, where A > 0); None: 0.15
    for tv and 0.05 for kl. `cap` truncates the weight.
    """

    divergence: Literal["tv", "kl"] = "tv"
    bounds: tuple[Positive, Positive] | None = None
    cap: Annotated[float, Field(ge=1)] = 20.0
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "dppo")
        log_ratio = log_ratio.detach()
        ratio = torch.exp(log_ratio)
        p, q = x.logp_P.detach().exp(), (x.logp_P.detach() - log_ratio).exp()
        if self.divergence == "tv":
            distance, default = (p - q).abs(), 0.15
        else:
            # 1e-8: a token that one side is certain of leaves the others no probability to compare.
            rest = (1 - q) * torch.log(((1 - q).clamp_min(0) + 1e-8) / ((1 - p).clamp_min(0) + 1e-8))
            distance, default = rest - q * log_ratio, 0.05
        low, high = self.bounds or (default, default)
        away = torch.where(advantage > 0, (ratio > 1) & (distance > high), (ratio < 1) & (distance > low))
        factor = torch.where(away, torch.zeros_like(ratio), ratio.clamp(max=self.cap))
        stats = {
            "ratio": ratio.sum(),
            "clipped": away.sum(),
            "divergence": distance.sum(),
            **mismatch_stats(x),
        }
        return -x.weight_P * factor * advantage * x.logp_P, stats


@register_objective("sapo")
@dataclass(frozen=True)
class SAPO:
    """l_t = -(4 / tau) sigmoid(tau (rho - 1)) A, tau = `positive` where A > 0, else `negative`.

    Source: Gao et al. 2025, "Soft adaptive policy optimization". At rho = 1 the gradient is
    that of -rho A; away from it, it falls smoothly where a clip would cut it. The larger temperature for bad
    answers makes theirs, which spread over the whole vocabulary, fall sooner.
    """

    positive: Positive = 1.0
    negative: Positive = 1.05
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "sapo")
        ratio = torch.exp(log_ratio)
        ones = torch.ones_like(ratio)
        tau = torch.where(advantage > 0, self.positive * ones, self.negative * ones)
        gate = torch.sigmoid(tau * (ratio - 1))
        opening = 4 * gate * (1 - gate)  # of the gradient; 1 at rho = 1
        stats = {"ratio": ratio.detach().sum(), "gate": opening.detach().sum(), **mismatch_stats(x)}
        return -x.weight_P * (4 / tau) * gate * advantage, stats


@register_objective("sppo")
@dataclass(frozen=True)
class SPPO:
    """l_t = -A log(clip(rho, 1 / (1 + epsilon), 1 + epsilon)), rho = exp(log pi - log pi_proximal).

    Source: Vaswani et al. 2021, "A general class of surrogate functions for stable and efficient
    reinforcement learning" (softmax PPO), with the symmetric clip of Trinity-RFT (2025). Inside the bounds
    the gradient is that of -A log pi, whoever sampled the token; outside it is 0, whichever way A pushes.
    """

    epsilon: Positive = 0.3
    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, advantage = proximal_log_ratio(x, "sppo")
        bound = math.log1p(self.epsilon)
        near = log_ratio.clamp(-bound, bound)
        ratio = log_ratio.detach().exp()
        stats = {"ratio": ratio.sum(), "clipped": (near != log_ratio).sum(), **mismatch_stats(x)}
        return -x.weight_P * advantage * near, stats


@register_objective("rec")
@dataclass(frozen=True)
class REC:
    """l_t = -M v A log pi(t), M and v without gradient: group-relative REINFORCE with a clip as regulariser.

    M = 1 where rho = exp(log pi - log pi_proximal) lies in the zone of `mode`, else 0: none: everywhere;
    one_side: rho <= 1 + high where A >= 0, rho >= 1 - low where A <= 0; two_side: both; ring: inside both,
    and beyond `outer` again where A pulls back (rho <= 1 - outer low, A >= 0; rho >= 1 + outer high, A <=
    0). v is 1, rho (`weight: importance`) or exp(A / temperature) (`weight: advantage`, RED-Weight). `over`:
    row or rollout take rho as exp(mean log ratio) of the unit, as GSPO does.

    Source: Yao et al. 2025, "Group-relative REINFORCE is secretly an off-policy algorithm": the
    defaults are REC-OneSide-NoIS; {weight: importance} is GRPO.
    """

    mode: Literal["none", "one_side", "two_side", "ring"] = "one_side"
    weight: Literal["none", "importance", "advantage"] = "none"
    clip: Clip = (0.2, 0.2)
    outer: Clip = (0.6, 2.0)
    temperature: Positive = 1.0
    over: Literal["token", "row", "rollout"] = "token"
    advantage: ClassVar[bool] = True
    ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_clip(self.outer)
        if self.mode == "ring" and (self.outer[0] < self.clip[0] or self.outer[1] < self.clip[1]):
            raise ValueError(f"outer {self.outer} must lie around clip {self.clip}")

    @property
    def level(self) -> Level:
        return "token" if self.over == "token" else "unit"

    @property
    def unit(self) -> UnitKind:
        if self.over == "token":
            raise AttributeError("unit")  # a token's loss has none
        return self.over

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        log_ratio, advantage = proximal_log_ratio(x, "rec")
        log_ratio = log_ratio.detach()
        if self.over != "token":
            log_ratio = unit_mean(x, log_ratio)[x.unit_P]
        ratio = torch.exp(log_ratio)
        kept = self._zone(ratio, advantage)
        factor = torch.ones_like(ratio)
        if self.weight == "importance":
            factor = ratio
        elif self.weight == "advantage":
            factor = torch.exp((advantage / self.temperature).clamp(-20, 20))
        factor = torch.where(kept, factor, torch.zeros_like(factor))
        stats = {"ratio": ratio.sum(), "clipped": (~kept).sum(), **mismatch_stats(x)}
        return -x.weight_P * factor * advantage * x.logp_P, stats

    def _zone(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """bool_P: where a token teaches."""
        import torch

        above, below = ratio > 1 + self.clip[1], ratio < 1 - self.clip[0]
        good, bad = advantage >= 0, advantage <= 0
        if self.mode == "none":
            return torch.ones_like(good)
        if self.mode == "one_side":
            return (good & ~above) | (bad & ~below)
        kept = ~above & ~below
        if self.mode == "ring":
            kept |= (good & (ratio <= 1 - self.outer[0])) | (bad & (ratio >= 1 + self.outer[1]))
        return kept
