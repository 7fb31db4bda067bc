"""Geometric-mean policy optimisation: an answer's ratio is the geometric mean of its tokens' clipped ones."""

from __future__ import annotations

from typing import Any, Literal

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("gmpo", extends=policy_gradient)
def gmpo(
    *,
    clip: float | Bounds = 0.4,
    unit: Literal["row", "rollout"] = "row",
    **parts: Any,
) -> Algorithm:
    """loss = 1/N sum over i of -A_i (product over t of clipped rho_t)^(1 / n_i).

    Source: Zhao et al. 2025, "Geometric-mean policy optimization". Between GRPO, whose arithmetic mean one
    token's ratio can dominate, and GSPO, which clips an answer as a whole: clipping stays per token, wider,
    the mean is robust. `clip`: bounds of a token's log ratio, 0.4 for e^-0.4 to e^0.4.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    return preset({"objective": {"kind": "gmpo", "clip": pair, "unit": unit}}, parts)
