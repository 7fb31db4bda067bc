"""Group relative policy optimisation: rollouts of one prompt are compared with each other."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("grpo", extends=policy_gradient)
def grpo(*, clip: float | Bounds | None = 0.2, **parts: Any) -> Algorithm:
    """loss = sum over t of w_t f_t * -min(rho_t A_i, clip(rho_t) A_i). Shao et al. 2024, "DeepSeekMath".

    A_i is the group-normalised reward, w_t gives every rollout the same weight. `clip`: one number for both
    sides, [low, high], or null.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    return preset({"objective": {"kind": "ppo_clip", "clip": pair}}, parts)
