"""Soft adaptive policy optimisation: a smooth gate in place of the clip."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("sapo", extends=policy_gradient)
def sapo(
    *,
    positive: Annotated[float, Field(gt=0)] = 1.0,
    negative: Annotated[float, Field(gt=0)] = 1.05,
    **parts: Any,
) -> Algorithm:
    """loss = 1/N sum over i of the token mean of f_t * -(4 / tau) sigmoid(tau (rho_t - 1)) A_i.

    Source: Gao et al. 2025, "Soft adaptive policy optimization". tau is `positive` where A_i > 0, else
    `negative`. A token's gradient fades as its ratio leaves 1 instead of ending at a bound: take it where a
    clip either cuts too much or holds too little, as with mixture-of-experts policies and several updates per
    batch.
    """
    return preset({"objective": {"kind": "sapo", "positive": positive, "negative": negative}}, parts)
