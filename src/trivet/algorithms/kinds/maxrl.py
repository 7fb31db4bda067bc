"""Maximum likelihood reinforcement learning: the logarithm of the pass rate instead of the pass rate."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("maxrl", extends=policy_gradient)
def maxrl(**parts: Any) -> Algorithm:
    """loss = 1/N sum over i of -A_i sum over t of rho_t f_t, A_i = (r_i - mean(r)) / mean(r).

    Source: Tajwar et al. 2026, "Maximum likelihood reinforcement learning". For rewards of 0 and 1 and large
    groups: hard prompts weigh by 1 / pass rate, and the larger the group the closer to maximum likelihood.
    Rewards must not be negative.
    """
    chosen = {
        "credit": "maxrl",
        "aggregation": "sequence_sum",
        "objective": {"kind": "ppo_clip", "clip": None},
    }
    return preset(chosen, parts)
