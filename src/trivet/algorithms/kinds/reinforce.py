"""The plain policy gradient."""

from __future__ import annotations

from typing import Any, Literal

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("reinforce", extends=policy_gradient)
def reinforce(*, baseline: float | Literal["batch"] = "batch", **parts: Any) -> Algorithm:
    """loss = 1/N sum over i of -(r_i - b) sum over t of rho_t f_t.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning". The reference to measure others by; needs no groups. `baseline`: b, a number (0: the plain
    reward) or `batch`, the batch's mean reward.
    """
    chosen = {
        "credit": {"kind": "reinforce", "baseline": baseline},
        "aggregation": "sequence_sum",
        "objective": {"kind": "ppo_clip", "clip": None},
    }
    return preset(chosen, parts)
