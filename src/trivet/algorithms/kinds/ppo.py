"""Proximal policy optimisation with a critic: credit token by token, from learned values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trivet.algorithms.base import Algorithm, AlgorithmError, StreamSpec
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import PartSpec, make_part, register_algorithm


@register_algorithm("ppo", extends=policy_gradient)
def ppo(*, clip: float | Bounds | None = 0.2, value: PartSpec = "value", **parts: Any) -> Algorithm:
    """loss = sum over t of w_t f_t * -min(rho_t A_t, clip(rho_t) A_t); the critic's is
    sum of w_t * 1/2 (v_t - R_t)^2, clipped.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms"; for language models Ouyang et al.
    2022. A_t: generalised advantage estimation (`credit`: gae with gamma 1, lam 0.95, whitened over the
    batch; `credit: {lam: 1, kl: 0.05}` sets its options). `value`: the critic's loss, `value: {clip: null}`
    its option. The critic is a body of its own with its own optimiser (trainer.critic_lr), started from the
    stage's first model unless `models.critic` names another. Tokens weigh alike (token_mean). `clip`: one
    number for both sides, [low, high], or null. When to use it: long or multi-turn answers, where one
    advantage for all of an answer's tokens says too little, or one answer per prompt (batch.group 1); it
    costs a second model. Several updates per batch (batch.updates_per_batch) are usual.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    chosen = {
        "credit": {"kind": "gae"},
        "objective": {"kind": "ppo_clip", "clip": pair},
        "aggregation": "token_mean",
    }
    algorithm = preset(chosen, parts)
    if isinstance(value, dict):
        value = {"kind": "value", **value}
    loss = make_part("objective", value)
    if loss.traits.get("model") != "critic" or "column" not in loss.traits:
        raise AlgorithmError(
            f"value: {loss.name!r} is no loss of a critic's values against the credit's column 'return'; "
            "take value, or let yours say model='critic', column='return'"
        )
    critic = StreamSpec("value", loss, algorithm.streams[0].aggregation)
    return replace(algorithm, streams=(*algorithm.streams, critic))
