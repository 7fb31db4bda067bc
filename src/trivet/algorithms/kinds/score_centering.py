"""Policy gradient from stale or low-precision samplers: truncated importance weights and centred scores."""

from __future__ import annotations

from typing import Any

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("score_centering", extends=policy_gradient)
def score_centering(**parts: Any) -> Algorithm:
    """loss = sum over t of w_t f_t * -A_t (log pi(t) - sum_k q_k log pi(k)).

    f_t = clip(pi_proximal / mu, 0.5, 2.0), detached; q: the sampler's stored top-K (`engine.top`),
    renormalised. For samplers that lag behind or compute in low precision: without the centring their error
    enters every token's gradient, whatever its reward. One update a batch is meant: there is no clip of the
    current policy's ratio. See the objective `centred_pg`.
    """
    return preset({"objective": "centred_pg", "aggregation": "token_mean", "tis": (0.5, 2.0)}, parts)
