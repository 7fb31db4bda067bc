"""Group-in-group policy optimisation: rollouts are compared, and turns that met the same state."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("gigpo", extends=policy_gradient)
def gigpo(
    *,
    omega: float = 1.0,
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.95,
    normalise: bool = False,
    clip: float | Bounds | None = 0.2,
    **parts: Any,
) -> Algorithm:
    """loss = token mean of f_t * -min(rho_t A_w, clip(rho_t) A_w), A_w = A_E + omega A_S in turn w.

    Source: Feng et al. 2025, "Group-in-group policy optimization for LLM agent training". For agents of many
    turns whose environment names its states (anchor states on the turns): it tells good turns from bad ones
    without a critic. Where no state is shared it is GRPO, mean only. Options: see the credit `gigpo`.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    chosen = {
        "credit": {"kind": "gigpo", "omega": omega, "gamma": gamma, "normalise": normalise},
        "aggregation": "token_mean",
        "objective": {"kind": "ppo_clip", "clip": pair},
    }
    return preset(chosen, parts)
