"""Learning from pairs without a reward: DPO, its conservative form, IPO, ORPO, KTO."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivet.algorithms.base import Algorithm, Part, StreamSpec
from trivet.algorithms.registry import PartSpec, make_part, register_algorithm

Positive = Annotated[float, Field(gt=0)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


def of_pairs(kind: str, objective: PartSpec, credit: Part | None = None) -> Algorithm:
    """An algorithm over preference pairs (mode train): every pair, or answer, weighs the same, or what
    `payload.weight` says."""
    weights = make_part("aggregation", "weighted_sequence_mean")
    stream = StreamSpec("preference", make_part("objective", objective), weights)
    return Algorithm(
        kind,
        (stream,),
        credit=credit,
        consumes=frozenset({"preference"}),
        modes=frozenset({"train"}),
        proximal="recompute" if credit is not None else None,
    )


@register_algorithm("dpo")
def dpo(*, beta: Positive = 0.1, label_smoothing: Smoothing = 0.0) -> Algorithm:
    """loss = mean over pairs of -log sigmoid(beta (h_c - h_r) - m), h = log pi(y) - log pi_ref(y).

    m is the pair's own margin (`fields: {payload.margin: COLUMN}`), else 0; `payload.weight` weighs a pair.

    Source: Rafailov et al. 2023, "Direct preference optimization". The reference is the model the stage
    started from, or `models: reference`. `beta`: small lets the policy go far from it. See the objective
    `dpo`.
    """
    return of_pairs("dpo", {"kind": "dpo", "beta": beta, "label_smoothing": label_smoothing})


@register_algorithm("cdpo")
def cdpo(*, beta: Positive = 0.1, label_smoothing: Smoothing = 0.1) -> Algorithm:
    """DPO for labels that are wrong with probability `label_smoothing` (Mitchell 2023): a pair is no longer
    pushed apart once its margin says so."""
    return of_pairs("cdpo", {"kind": "dpo", "beta": beta, "label_smoothing": label_smoothing})


@register_algorithm("ipo")
def ipo(*, beta: Positive = 0.1, length_normalised: bool = True) -> Algorithm:
    """loss = mean over pairs of (h_c - h_r - 1 / (2 beta))^2. Source: Azar et al. 2023. Take it where DPO
    drives margins without end; `beta` sets the margin that is enough."""
    return of_pairs("ipo", {"kind": "ipo", "beta": beta, "length_normalised": length_normalised})


@register_algorithm("orpo")
def orpo(*, beta: Positive = 0.1) -> Algorithm:
    """loss = mean over pairs of -m_c - beta log sigmoid(log odds_c - log odds_r). Source: Hong et al. 2024.
    Imitation and preference in one stage, without a reference model."""
    return of_pairs("orpo", {"kind": "orpo", "beta": beta})


@register_algorithm("kto")
def kto(*, beta: Positive = 0.1, desirable: Positive = 1.0, undesirable: Positive = 1.0) -> Algorithm:
    """loss = mean over answers of lambda (1 - sigmoid(+-beta (h - z0))). Source: Ethayarajh et al. 2024.
    Answers are judged one by one: of pairs, or of rows with one answer and a `label` of true or false. See
    the objective `kto` and the credit `kto_reference`."""
    objective = {"kind": "kto", "beta": beta, "desirable": desirable, "undesirable": undesirable}
    return of_pairs("kto", objective, make_part("credit", "kto_reference"))
