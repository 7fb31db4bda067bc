"""The frame of all algorithms that learn from rewards: parts by role, each replaceable from a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trivet.algorithms.base import Algorithm, StreamSpec
from trivet.algorithms.registry import PartSpec, make_part, make_parts, register_algorithm

Bounds = tuple[float, float]


@register_algorithm("policy_gradient")
def policy_gradient(
    *,
    credit: PartSpec = "group_normalised",
    objective: PartSpec = "ppo_clip",
    aggregation: PartSpec = "sequence_mean",
    shaping: list[PartSpec] | tuple[()] = (),
    masks: list[PartSpec] | tuple[()] = (),
    corrections: list[PartSpec] | tuple[()] = (),
    proximal: Literal["recompute", "behaviour"] | None = "recompute",
    tis: Bounds | Literal["auto"] | None = "auto",
    kl: PartSpec | None = None,
    kl_weight: float = 0.0,
    kl_control: PartSpec | None = None,
    entropy_weight: float = 0.0,
    entropy_control: PartSpec | None = None,
) -> Algorithm:
    """loss = sum over t of w_t f_t l_t(A_t) + kl_weight * KL(pi, reference) - entropy_weight * H.

    `shaping`: changes of the rewards before credit. `credit`: A from rewards. `objective`: l_t.
    `aggregation`: w_t, for all terms. `masks`: what may be trained. `proximal`: where the ratio starts: the
    policy an update starts from (recompute) or the sampler (behaviour). `tis`: bounds of f_t = pi_proximal /
    mu, token by token; null: none; auto: [0.5, 2.0] where proximal is recomputed. `corrections`: further
    factors. `kl`: an estimator (k3 unless named) of the distance to the reference, with `kl_weight` above 0;
    `kl_control`, `entropy_control` move the weights.
    """
    if tis == "auto":
        tis = (0.5, 2.0) if proximal == "recompute" else None
    first: list[PartSpec] = [] if tis is None else [{"kind": "token_tis", "bounds": tis}]
    weights = make_part("aggregation", aggregation)
    factors = make_parts("correction", [*first, *corrections])
    streams = [StreamSpec("pg", make_part("objective", objective), weights, factors)]
    if kl is not None or kl_weight:
        control = None if kl_control is None else make_part("control", kl_control)
        estimator = make_part("objective", _of("kl", kl or "k3"))
        streams.append(StreamSpec("kl", estimator, weights, scale=kl_weight, control=control))
    if entropy_weight or entropy_control:
        control = None if entropy_control is None else make_part("control", entropy_control)
        bonus = make_part("objective", "entropy_bonus")
        streams.append(StreamSpec("entropy", bonus, weights, scale=entropy_weight, control=control))
    return Algorithm(
        kind="policy_gradient",
        streams=tuple(streams),
        credit=make_part("credit", credit),
        shaping=make_parts("shaping", shaping),
        masks=make_parts("mask", masks),
        proximal=proximal,
    )


def _of(kind: str, spec: PartSpec) -> PartSpec:
    """`k3` -> {kind: kl, estimator: k3}; a spec with a kind of its own stays."""
    return {"kind": kind, "estimator": spec} if isinstance(spec, str) and ":" not in spec else spec


def preset(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> Algorithm:
    """`policy_gradient` with an algorithm's own choices, where the recipe did not choose.

    A recipe may give a part's options without its name: {objective: {clip: 0.1}} keeps the chosen objective.
    """
    options = dict(chosen)
    for name, value in given.items():
        default = options.get(name)
        if isinstance(value, Mapping) and "kind" not in value and default is not None:
            base = {"kind": default} if isinstance(default, str) else dict(default)
            value = {**base, **value}
        options[name] = value
    return policy_gradient(**options)
