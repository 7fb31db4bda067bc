"""REINFORCE++: the reward to go, normalised over the whole batch; and its variant with a group baseline."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import Bounds, policy_gradient, preset
from trivet.algorithms.registry import register_algorithm


@register_algorithm("reinforce_plus_plus", extends=policy_gradient)
def reinforce_plus_plus(
    *,
    reward_kl: Annotated[float, Field(ge=0)] = 0.0,
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0,
    clip: float | Bounds | None = 0.2,
    **parts: Any,
) -> Algorithm:
    """loss = token mean of f_t * -min(rho_t A_t, clip(rho_t) A_t), A_t = (G_t - mean G) / std G.

    G_t is the reward to go of token t, `reward_kl` times the distance to the reference (k1) taken off token
    by token; mean and std are over all trained tokens of the batch. Source: Hu et al. 2025, "REINFORCE++".
    Needs no groups, so every prompt may be played once; rewards of all prompts must share one scale.
    `gamma`: discount per trained token.
    """
    chosen = {
        "credit": {"kind": "returns", "gamma": gamma, "kl": reward_kl, "whiten": True},
        **_clipped(clip),
    }
    return preset(chosen, parts)


@register_algorithm("reinforce_plus_plus_baseline", extends=policy_gradient)
def reinforce_plus_plus_baseline(*, clip: float | Bounds | None = 0.2, **parts: Any) -> Algorithm:
    """loss = token mean of f_t * -min(rho_t A_t, clip(rho_t) A_t), A_t = (a_i - mean a) / std a with
    a_i = r_i - mean of its group.

    Source: Hu et al. 2025, "REINFORCE++", the variant for several rollouts per prompt. The group sets the
    baseline, the batch the scale: take it where prompts differ in difficulty and GRPO's std per group blows
    up nearly solved ones. The paper's distance to the reference is a loss: `kl: k2` with `kl_weight`.
    """
    return preset({"credit": "reinforce_plus_plus_baseline", **_clipped(clip)}, parts)


def _clipped(clip: float | Bounds | None) -> dict[str, Any]:
    pair = (clip, clip) if isinstance(clip, int | float) else clip
    return {"aggregation": "token_mean", "objective": {"kind": "ppo_clip", "clip": pair}}
