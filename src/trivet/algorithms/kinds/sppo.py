"""Softmax PPO: the policy's log ratio as surrogate, cut off to both sides."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("sppo", extends=policy_gradient)
def sppo(*, epsilon: Annotated[float, Field(gt=0)] = 0.3, **parts: Any) -> Algorithm:
    """loss = token mean of -A_i log(clip(rho_t, 1 / (1 + epsilon), 1 + epsilon)), rho_t = pi / mu.

    Source: Vaswani et al. 2021, "A general class of surrogate functions for stable and efficient
    reinforcement learning"; this form: Trinity-RFT (2025). Stale samples are learnt without importance
    weights as long as the policy stays near their sampler; a token beyond the bounds is left out, whichever
    way A_i points. Advantages are rewards less the group's mean.
    """
    chosen = {
        "credit": "mean_only",
        "aggregation": "token_mean",
        "objective": {"kind": "sppo", "epsilon": epsilon},
        "proximal": "behaviour",
    }
    return preset(chosen, parts)
