"""REINFORCE on others' samples: each token weighed by how likely the policy finds it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("is_reinforce", extends=policy_gradient)
def is_reinforce(*, cap: Annotated[float, Field(ge=1)] | None = None, **parts: Any) -> Algorithm:
    """loss = 1/N sum over i of -A_i sum over t of sg(min(rho_t, cap)) log pi(t), rho_t = pi / mu.

    Source: Williams 1992 with per-token importance weights (Degris et al. 2012, "Off-policy actor-critic").
    The plain off-policy gradient, to measure others by: right per token up to `cap`, and noisy on stale
    samples. Advantages are rewards less the group's mean. The weight is to the sampler (`proximal:
    behaviour`), so no `tis` is needed.
    """
    chosen = {
        "credit": "mean_only",
        "aggregation": "sequence_sum",
        "objective": {"kind": "is_reinforce", "cap": cap},
        "proximal": "behaviour",
    }
    return preset(chosen, parts)
