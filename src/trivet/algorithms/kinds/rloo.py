"""REINFORCE, leave one out: each rollout's baseline is the mean of the others of its prompt."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("rloo", extends=policy_gradient)
def rloo(*, normalise: bool = False, **parts: Any) -> Algorithm:
    """loss = 1/N sum over i of -A_i sum over t of rho_t f_t, A_i = r_i - mean of the others' rewards.

    Source: Ahmadian et al. 2024, "Back to basics: revisiting REINFORCE-style optimization". An unbiased
    baseline, and the whole answer as one action: no clip, no division by length. Take it for on-policy
    training with small groups. `normalise`: divide by the others' standard deviation.
    """
    chosen = {
        "credit": {"kind": "leave_one_out", "normalise": normalise},
        "aggregation": "sequence_sum",
        "objective": {"kind": "ppo_clip", "clip": None},
    }
    return preset(chosen, parts)
