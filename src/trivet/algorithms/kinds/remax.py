"""ReMax: the reward of the greedy answer is the baseline."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("remax", extends=policy_gradient)
def remax(**parts: Any) -> Algorithm:
    """loss = 1/N sum over i of -(r_i - r(greedy)) sum over t of rho_t f_t.

    Source: Li et al. 2023, "ReMax: a simple, effective, and efficient reinforcement learning method for
    aligning large language models". Two rollouts per prompt are enough: one sampled, one greedy, which the
    environment plays with role `baseline`. Groups without a scored baseline are not trained, and counted.
    """
    chosen = {
        "credit": "remax",
        "aggregation": "sequence_sum",
        "objective": {"kind": "ppo_clip", "clip": None},
    }
    return preset(chosen, parts)
