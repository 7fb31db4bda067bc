"""Losses of preferred and rejected answers. A unit is a pair (KTO: an answer); a unit's weight is the sum of
its tokens' weights: `weighted_sequence_mean` gives every pair 1 / pairs, or its weight's share.

With h(y) = sum over the answer's tokens of log pi(t) - log pi_ref(t).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from trivet.algorithms.base import PAIR_MARGIN, AlgorithmError, Batch, Level, ObjectiveInputs, UnitKind
from trivet.algorithms.registry import register_credit, register_objective

if TYPE_CHECKING:
    from torch import Tensor

Positive = Annotated[float, Field(gt=0)]


def unit_sum(x: ObjectiveInputs, values_P: Tensor) -> Tensor:
    """(_U,) the sum of a value over each unit's positions."""
    return values_P.new_zeros(x.units).index_add(0, x.unit_P, values_P)


def _sides(x: ObjectiveInputs) -> tuple[Tensor, Tensor]:
    """1.0 at the chosen and at the rejected answer's tokens. Raises AlgorithmError where one is missing."""
    if x.preference_P is None:
        raise AlgorithmError("a preference loss reads preference_P, which is missing")
    chosen, rejected = (x.preference_P == 1).to(x.logp_P.dtype), (x.preference_P == -1).to(x.logp_P.dtype)
    if not bool(((unit_sum(x, chosen) > 0) & (unit_sum(x, rejected) > 0)).all()):
        raise AlgorithmError("a pair came without one of its answers: trained pairs must be whole")
    return chosen, rejected


def pair_margin(x: ObjectiveInputs) -> Tensor:
    """(_U,) the margin recorded for each pair; 0 where there is none."""
    import torch

    if PAIR_MARGIN not in x.columns:
        return x.weight_P.new_zeros(x.units)
    return unit_sum(x, x.columns[PAIR_MARGIN]) / unit_sum(x, torch.ones_like(x.weight_P))


def _no_margin(x: ObjectiveInputs, name: str) -> None:
    """Raises AlgorithmError for pairs whose margins would be passed over in silence."""
    if PAIR_MARGIN in x.columns and bool((x.columns[PAIR_MARGIN] != 0).any()):
        raise AlgorithmError(
            f"pairs of the batch have a margin, which {name} does not read; take dpo, cdpo or reward_model, "
            "or map no column to payload.margin"
        )


def _pair_stats(chosen_U: Tensor, rejected_U: Tensor, loss_U: Tensor) -> dict[str, Tensor]:
    """Of implicit rewards: their means, the margin, and how often the chosen one's is larger."""
    gap = (chosen_U - rejected_U).detach()
    return {
        "unit/chosen": chosen_U.detach().sum(),
        "unit/rejected": rejected_U.detach().sum(),
        "unit/margin": gap.sum(),
        "unit/accuracy": (gap > 0).sum().to(gap.dtype),
        "unit/pair_loss": loss_U.detach().sum(),
    }


@register_objective("dpo")
@dataclass(frozen=True)
class DPO:
    """l = -(1 - s) log sigmoid(z) - s log sigmoid(-z), z = beta (h_c - h_r) - m, s = `label_smoothing`, m the
    pair's own margin (0 unless the data has one).

    Source: Rafailov et al. 2023, "Direct preference optimization", equation 7; with s > 0 the conservative
    form (cDPO) of Mitchell 2023 for labels that are wrong with probability s; m: Amini et al.
    2024, "Direct preference optimization with an offset". beta h is the implicit reward.
    """

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    level: ClassVar[Level] = "unit"
    unit: ClassVar[UnitKind] = "group"
    needs: ClassVar[frozenset[str]] = frozenset({"ref_logp"})

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.ref_P is None:
            raise AlgorithmError("dpo reads ref_P, which is missing")
        c, r = _sides(x)
        h = x.logp_P - x.ref_P
        chosen, rejected = self.beta * unit_sum(x, c * h), self.beta * unit_sum(x, r * h)
        z, s = chosen - rejected - pair_margin(x), self.label_smoothing
        log_sigmoid = torch.nn.functional.logsigmoid
        loss = -(1 - s) * log_sigmoid(z) - s * log_sigmoid(-z)
        return unit_sum(x, x.weight_P) * loss, _pair_stats(chosen, rejected, loss)


@register_objective("ipo")
@dataclass(frozen=True)
class IPO:
    """l = (g - 1 / (2 beta))^2, g = h_c - h_r; with `length_normalised` (default) h is the mean over tokens.

    Source: Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences",
    equation 17 (tau is beta; plain sums). The mean over tokens, which the authors recommend in practice,
    keeps long answers from meeting the target by their length alone. Unlike DPO's, the margin has a target:
    no pair is ever pushed without end.
    """

    beta: Positive = 0.1
    length_normalised: bool = True
    level: ClassVar[Level] = "unit"
    unit: ClassVar[UnitKind] = "group"
    needs: ClassVar[frozenset[str]] = frozenset({"ref_logp"})

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if x.ref_P is None:
            raise AlgorithmError("ipo reads ref_P, which is missing")
        _no_margin(x, "ipo")
        c, r = _sides(x)
        h = x.logp_P - x.ref_P
        chosen, rejected = unit_sum(x, c * h), unit_sum(x, r * h)
        if self.length_normalised:
            chosen, rejected = chosen / unit_sum(x, c), rejected / unit_sum(x, r)
        loss = (chosen - rejected - 1 / (2 * self.beta)).square()
        return unit_sum(x, x.weight_P) * loss, _pair_stats(chosen, rejected, loss)


@register_objective("orpo")
@dataclass(frozen=True)
class ORPO:
    """l = -m_c - beta log sigmoid(log odds_c - log odds_r), m the mean log pi of an answer's tokens,
    log odds = m - log(1 - exp m). No reference.

    Source: Hong et al. 2024, "ORPO: monolithic preference optimization without reference model", equations 6
    and 7 (lambda is beta). The first term imitates the chosen answer.
    """

    beta: Positive = 0.1
    level: ClassVar[Level] = "unit"
    unit: ClassVar[UnitKind] = "group"

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        _no_margin(x, "orpo")
        c, r = _sides(x)
        chosen = unit_sum(x, c * x.logp_P) / unit_sum(x, c)
        rejected = unit_sum(x, r * x.logp_P) / unit_sum(x, r)
        odds = [m - torch.log(-torch.expm1(m.clamp_max(-1e-6))) for m in (chosen, rejected)]
        preferred = -torch.nn.functional.logsigmoid(odds[0] - odds[1])
        loss = -chosen + self.beta * preferred
        stats = _pair_stats(self.beta * chosen, self.beta * rejected, loss)
        stats |= {"unit/nll": -chosen.detach().sum(), "unit/odds_loss": preferred.detach().sum()}
        return unit_sum(x, x.weight_P) * loss, stats


@register_credit("kto_reference", needs={"ref_logp", "proximal_logp"}, columns=("reference_kl",))
def kto_reference(batch: Batch, *, clamp: Literal["zero", "none"] = "zero") -> dict[str, np.ndarray]:
    """advantage +1 for chosen and -1 for rejected answers; reference_kl: z0, one number for the batch.

    z0 = max(0, mean over the batch's answers of h(y)), from the policy before the update: what the policy
    has moved from the reference on this data as a whole. Ethayarajh et al. 2024 (and TRL's KTO trainer) pair
    each prompt with another prompt's answer of the same micro-batch and take the mean of h there, which costs
    a further forward pass of both models; here it is the answers' own h, over the whole batch of the step. A
    rollout that is neither has no advantage.
    """
    h_T = batch.annotations["proximal_logp"] - batch.annotations["ref_logp"]
    trained_T = np.isfinite(h_T) & (batch.train_T > 0)
    h_N = np.bincount(batch.rollout_T[trained_T], h_T[trained_T], minlength=batch.rollouts)
    judged_N = batch.preference_N != 0
    z0 = float(h_N[judged_N].mean()) if judged_N.any() else 0.0
    z0 = max(0.0, z0) if clamp == "zero" else z0
    advantage_N = np.where(judged_N, batch.preference_N.astype(np.float64), np.nan)
    return {"advantage": advantage_N, "reference_kl": np.full(batch.rollouts, z0)}


@register_objective("kto", advantage=True)
@dataclass(frozen=True)
class KTO:
    """l = lambda (1 - sigmoid(+-beta (h - z0))): + and lambda `desirable` for chosen, - and `undesirable` for
    rejected answers; z0 from the credit `kto_reference`.

    Source: Ethayarajh et al. 2024, "KTO: model alignment as prospect theoretic optimization", equation 8. An
    answer is judged alone; pairs are not needed. Keep `desirable` times the chosen ones about equal to
    `undesirable` times the rejected ones.
    """

    beta: Positive = 0.1
    desirable: Positive = 1.0
    undesirable: Positive = 1.0
    level: ClassVar[Level] = "unit"
    unit: ClassVar[UnitKind] = "rollout"
    column: ClassVar[str] = "reference_kl"
    needs: ClassVar[frozenset[str]] = frozenset({"ref_logp"})

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.ref_P is None or x.advantage_P is None or "reference_kl" not in x.columns:
            raise AlgorithmError("kto reads ref_P and what the credit kto_reference gives")
        _no_margin(x, "kto")
        tokens = unit_sum(x, torch.ones_like(x.logp_P))
        h = unit_sum(x, x.logp_P - x.ref_P)
        sign = unit_sum(x, x.advantage_P) / tokens
        z0 = unit_sum(x, x.columns["reference_kl"]) / tokens
        scale = torch.where(sign > 0, self.desirable, self.undesirable)
        loss = scale * (1 - torch.sigmoid(sign * self.beta * (h - z0)))
        good = (sign > 0).to(h.dtype)
        stats = {
            "unit/reward": (self.beta * h).detach().sum(),
            "unit/desirable": good.sum(),
            "unit/desirable_reward": (good * self.beta * h).detach().sum(),
            "unit/reference_kl": z0.sum(),
        }
        return unit_sum(x, x.weight_P) * loss, stats
