"""Asymmetric REINFORCE: a baseline below the mean makes learning from others' samples stable."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("asymre", extends=policy_gradient)
def asymre(*, shift: float = -0.1, **parts: Any) -> Algorithm:
    """loss = token mean of -A_i log pi(t), A_i = r_i - (mean(r) + shift).

    Source: Arnal et al. 2025, "Asymmetric REINFORCE for off-policy reinforcement learning: balancing positive
    and negative rewards". Take it for stale samples: nothing is weighed by the sampler's probability.
    `shift` < 0 weighs what went well
    over what did not.
    """
    chosen = {
        "credit": {"kind": "asymre", "shift": shift},
        "aggregation": "token_mean",
        "objective": {"kind": "rec", "mode": "none"},
        "proximal": "behaviour",
    }
    return preset(chosen, parts)
