"""Tapered off-policy REINFORCE: learn from all good answers, unlearn bad ones only while likely."""

from __future__ import annotations

from typing import Any, Literal

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("topr", extends=policy_gradient)
def topr(
    *,
    bounds: Bounds = (0.0, 1.0),
    unit: Literal["row", "rollout"] = "row",
    **parts: Any,
) -> Algorithm:
    """loss = 1/N sum over i of -a_i A_i log pi(y_i), a_i = 1 where A_i > 0, else clip(pi(y_i) / mu(y_i), 0,
    1).

    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE". For data of other or older policies, over
    many epochs, without a reference: the taper ends the push on an answer the policy has already left.
    Advantages are rewards less the group's mean (`credit: {kind: reinforce, baseline: 0}`: the rewards,
    which then must be negative for bad answers). There is no ratio to a proximal policy, so neither clip nor
    `tis` applies. `bounds`: of the ratio where A_i <= 0.
    """
    chosen = {
        "credit": "mean_only",
        "aggregation": "sequence_sum",
        "objective": {"kind": "topr", "bounds": bounds, "unit": unit},
        "proximal": None,
    }
    return preset(chosen, parts)
