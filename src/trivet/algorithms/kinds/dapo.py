"""DAPO: a wider clip upwards, and all tokens of a batch weigh alike."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("dapo", extends=policy_gradient)
def dapo(*, clip: float | Bounds | None = (0.2, 0.28), **parts: Any) -> Algorithm:
    """loss = token mean of f_t * -min(rho_t A_i, clip(rho_t, 0.8, 1.28) A_i).

    Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale". The higher
    upper bound leaves rare tokens room to grow, which keeps the entropy up; the token mean lets long answers
    count by their length. Its two other parts are chosen beside it: groups of equal rewards, which teach
    nothing, are left out and refilled (dynamic sampling); overlong answers pay by the shaping
    `soft_overlong`, or are not trained by `masks: [truncated]`.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    chosen = {"aggregation": "token_mean", "objective": {"kind": "ppo_clip", "clip": pair}}
    return preset(chosen, parts)
