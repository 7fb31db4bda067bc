"""Online policy mirror descent: the sampler's answers as they come, whoever sampled them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("opmd", extends=policy_gradient)
def opmd(
    *,
    tau: Annotated[float, Field(gt=0)] = 1.0,
    baseline: Literal["mean", "logavgexp", "pairwise"] = "mean",
    **parts: Any,
) -> Algorithm:
    """loss = token mean of -(r_i - b) log pi(t), b the group's baseline.

    Source: Kimi Team 2025, "Kimi k1.5"; the form without a ratio to the sampler: Trinity-RFT (2025), whose
    constant 1 / (1 + tau) is left to the learning rate. A step of mirror descent towards the policy that is
    best at a distance to the present one, priced `tau`: also for samples of older policies, since nothing is
    weighed by their probability. `baseline`: see the credit `opmd`; `tau` shapes its `logavgexp`.
    """
    chosen = {
        "credit": {"kind": "opmd", "baseline": baseline, "tau": tau},
        "aggregation": "token_mean",
        "objective": {"kind": "rec", "mode": "none"},
        "proximal": "behaviour",
    }
    return preset(chosen, parts)
