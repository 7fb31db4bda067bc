"""GRPO for long agent attempts: a solve stands out, shorter solves earn more, tiny attempts weigh little."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("success_offset", extends=policy_gradient)
def success_offset(
    *, floor: Annotated[int, Field(gt=0)] = 2048, clip: float | Bounds | None = None, **parts: Any
) -> Algorithm:
    """loss = 1/A sum over attempts of 1 / max(n_a, floor) * sum over t of f_t * -rho_t A_i.

    A_i = (R' - mean R') / std R' + (b - mean b) / 0.5: see the credit `success_offset`. f_t: the sampler's
    lag and low precision, truncated to [0.5, 2.0]. Source: the FireFlash recipe (2026). For attempts of
    thousands of tokens with partial credit, sampled from older or quantised weights, one update per batch (so
    no `clip`). Score centering (which needs the sampler's top candidates) goes with it in the source:
    `objective: centred_pg`.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    chosen = {
        "credit": "success_offset",
        "aggregation": {"kind": "attempt_mean", "floor": floor},
        "objective": {"kind": "ppo_clip", "clip": pair},
    }
    return preset(chosen, parts)
