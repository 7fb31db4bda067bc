"""Group relative policy optimisation: rollouts of one prompt are compared with each other."""

from __future__ import annotations

from typing import Literal

from trivet.algorithms.base import Algorithm, StreamSpec
from trivet.algorithms.registry import PartSpec, make_part, make_parts, register_algorithm

Bounds = tuple[float, float]


@register_algorithm("grpo")
def grpo(
    *,
    credit: PartSpec = "group_normalised",
    aggregation: PartSpec = "sequence_mean",
    clip: float | Bounds | None = 0.2,
    proximal: Literal["recompute", "behaviour"] = "recompute",
    tis: Bounds | Literal["auto"] | None = "auto",
    corrections: list[PartSpec] | tuple[()] = (),
    masks: list[PartSpec] | tuple[()] = (),
) -> Algorithm:
    """loss = sum over t of w_t f_t * -min(rho_t A_i, clip(rho_t) A_i). Shao et al. 2024, "DeepSeekMath".

    `credit`: how A_i comes from a group's rewards (mean_only: Dr. GRPO's). `aggregation`: w_t. `clip`: one
    number for both sides, [low, high], or null. `proximal`: rho's denominator: the policy an update starts
    from (recompute) or the sampler (behaviour). `tis`: bounds of f_t = pi_proximal / mu; null: f_t = 1; auto:
    [0.5, 2.0] where proximal is recomputed. `corrections`, `masks`: further parts ("truncated": cut-off
    rollouts are compared but not trained).
    """
    if tis == "auto":
        tis = (0.5, 2.0) if proximal == "recompute" else None
    first: list[PartSpec] = [] if tis is None else [{"kind": "token_tis", "bounds": tis}]
    stream = StreamSpec(
        name="pg",
        objective=make_part("objective", {"kind": "ppo_clip", "clip": _pair(clip)}),
        aggregation=make_part("aggregation", aggregation),
        corrections=make_parts("correction", [*first, *corrections]),
    )
    return Algorithm(
        kind="grpo",
        streams=(stream,),
        credit=make_part("credit", credit),
        masks=make_parts("mask", masks),
        proximal=proximal,
    )


def _pair(clip: float | Bounds | None) -> Bounds | None:
    return (clip, clip) if isinstance(clip, int | float) else clip
