"""GRPO without its two biases: no division by the group's spread, none by the answer's length."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("dr_grpo", extends=policy_gradient)
def dr_grpo(
    *, length: Annotated[int, Field(gt=0)] = 1024, clip: float | Bounds | None = 0.2, **parts: Any
) -> Algorithm:
    """loss = 1/(N L) * sum over all tokens of f_t * -min(rho_t A_i, clip(rho_t) A_i), A_i = r_i - mean(r).

    Source: Liu et al. 2025, "Understanding R1-Zero-like training: a critical perspective". Take it where
    rewards have grades (the gap matters) or where wrong answers of GRPO grow ever longer. `length`: L, a
    constant; the answer budget is the usual choice. It only scales the step.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    chosen = {
        "credit": "mean_only",
        "aggregation": {"kind": "fixed", "length": length},
        "objective": {"kind": "ppo_clip", "clip": pair},
    }
    return preset(chosen, parts)
