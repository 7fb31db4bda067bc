"""The REC family: group-relative REINFORCE, kept near its sampler by leaving tokens out."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from trivet.algorithms.base import Algorithm, AlgorithmError, StreamSpec
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import make_part, register_algorithm


@register_algorithm("rec", extends=policy_gradient)
def rec(
    *,
    mode: Literal["none", "one_side", "two_side", "ring"] = "one_side",
    weight: Literal["none", "importance", "advantage"] = "none",
    clip: float | Bounds = 0.2,
    outer: Bounds = (0.6, 2.0),
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    over: Literal["token", "row", "rollout"] = "token",
    regulariser: Literal["k2", "forward_kl"] | None = None,
    regulariser_weight: Annotated[float, Field(ge=0)] = 0.0,
    **parts: Any,
) -> Algorithm:
    """loss = mean over tokens of -M_t v_t A_i log pi(t) + regulariser_weight * R, rho_t = pi / mu.

    Source: Yao et al. 2025, "Group-relative REINFORCE is secretly an off-policy algorithm" (Trinity-RFT).
    Which tokens teach (`mode`, `clip`, `outer`) and by how much (`weight`, `temperature`): see the objective
    `rec`. By name: REC-OneSide-NoIS is the default; -IS `weight: importance`; REC-TwoSide `mode: two_side`;
    REC-Ring `mode: ring`; REC-GSPO `over: row, clip: [3e-4, 4e-4]`; RED-Weight `mode: none, weight:
    advantage`; plain REINFORCE `mode: none`. R of the REP variants: k2, (log pi - log mu)^2 / 2 (OPMD of
    Kimi Team 2025), or forward_kl, -log pi (AsymRE). Advantages are rewards less the group's mean. Take it
    to study off-policy training, or as a robust choice for stale samples.
    """
    if (regulariser is None) != (regulariser_weight == 0):
        raise AlgorithmError("rec: regulariser and regulariser_weight (above 0) belong together; set both")
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    objective = {"kind": "rec", "mode": mode, "weight": weight, "clip": pair, "outer": outer}
    chosen = {
        "credit": "mean_only",
        "aggregation": "token_mean" if over == "token" else "sequence_mean",
        "objective": {**objective, "temperature": temperature, "over": over},
        "proximal": "behaviour",
    }
    algorithm = preset(chosen, parts)
    if regulariser is None:
        return algorithm
    spec = {"kind": "kl", "estimator": "k2", "to": "proximal"} if regulariser == "k2" else "cross_entropy"
    weights = algorithm.streams[0].aggregation
    stream = StreamSpec("regulariser", make_part("objective", spec), weights, scale=regulariser_weight)
    return replace(algorithm, streams=(*algorithm.streams, stream))
