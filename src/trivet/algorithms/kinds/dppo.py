"""Divergence PPO: a trust region of probabilities in place of one of ratios."""

from __future__ import annotations

from typing import Any, Literal

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("dppo", extends=policy_gradient)
def dppo(*, divergence: Literal["tv", "kl"] = "tv", bounds: Bounds | None = None, **parts: Any) -> Algorithm:
    """loss = token mean of -M_t sg(rho_t) A_i log pi(t), rho_t = pi / mu, M_t = 0 beyond the trust region.

    Source: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning". Take it where a
    ratio's clip fits badly: large vocabularies, mixture-of-experts policies, low-precision samplers. The
    region lies around the sampler (`proximal: behaviour`), so no `tis` is needed. `divergence`, `bounds`:
    see the objective `dppo`.
    """
    chosen = {
        "aggregation": "token_mean",
        "objective": {"kind": "dppo", "divergence": divergence, "bounds": bounds},
        "proximal": "behaviour",
    }
    return preset(chosen, parts)
