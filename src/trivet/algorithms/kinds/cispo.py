"""CISPO: the importance weight is clipped, and no token loses its gradient."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("cispo", extends=policy_gradient)
def cispo(*, bounds: Bounds = (0.0, 5.0), **parts: Any) -> Algorithm:
    """loss = token mean of f_t * -sg(clip(rho_t, low, high)) A_i log pi(t), sg: no gradient.

    Source: MiniMax 2025, "MiniMax-M1". PPO's clip drops a token's gradient once it has moved far; rare tokens
    at which an answer turns ("However", "Wait") move furthest and would be dropped first. Take it for long
    reasoning and several updates per batch. `bounds`: of rho; only the upper one matters.
    """
    chosen = {"aggregation": "token_mean", "objective": {"kind": "cispo", "bounds": bounds}}
    return preset(chosen, parts)
