"""GRPO for rollouts of many turns: all of them share the advantage of the whole."""

from __future__ import annotations

from typing import Any, Literal

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("multi_step_grpo", extends=policy_gradient)
def multi_step_grpo(
    *,
    std: Literal["group", "batch", "none"] = "group",
    per_turn: bool = False,
    clip: float | Bounds | None = 0.2,
    **parts: Any,
) -> Algorithm:
    """loss = token mean of f_t * -min(rho_t A_i, clip(rho_t) A_i), A_i = (R_i - mean R) / std R.

    Source: the multi-step GRPO of Trinity-RFT (2025), after rLLM. For agents whose reward comes at the
    end: all turns share A_i. `std`: over what the spread is taken. `per_turn`: A_i divided by the rollout's
    turns.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    chosen = {
        "credit": {"kind": "multi_step_grpo", "std": std, "per_turn": per_turn},
        "aggregation": "token_mean",
        "objective": {"kind": "ppo_clip", "clip": pair},
    }
    return preset(chosen, parts)
