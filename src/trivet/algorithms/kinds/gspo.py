"""Group sequence policy optimisation: one ratio and one clip for a whole answer."""

from __future__ import annotations

from typing import Any, Literal

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("gspo", extends=policy_gradient)
def gspo(
    *,
    clip: float | Bounds = (3e-4, 4e-4),
    unit: Literal["row", "rollout"] = "row",
    **parts: Any,
) -> Algorithm:
    """loss = 1/N sum over i of -min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_proximal(y_i))^(1 / n_i).

    Source: Zheng et al. 2025, "Group sequence policy optimization". The ratio belongs to what is rewarded,
    the answer, which steadies mixture-of-experts policies (single tokens' ratios jump when the routing does)
    and long answers. It differs from GRPO only where the policy moves within a batch: several updates per
    batch, or `proximal: behaviour`. `clip`: bounds of a mean, hence small. `unit`: one ratio per row, or per
    rollout over all its rows.
    """
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    return preset({"objective": {"kind": "gspo", "clip": pair, "unit": unit}}, parts)
