"""The frame of all algorithms that learn from rewards: parts by role, each replaceable from a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trivet.algorithms.base import Algorithm, AlgorithmError, Part, StreamSpec
from trivet.algorithms.registry import PartSpec, make_part, make_parts, register_algorithm

Bounds = tuple[float, float]

_FRAME = {"credit": "group_normalised", "objective": "ppo_clip", "aggregation": "sequence_mean"}
"""The frame's own choices: options without a kind go to them."""


@register_algorithm("policy_gradient")
def policy_gradient(
    *,
    credit: PartSpec = _FRAME["credit"],
    objective: PartSpec = _FRAME["objective"],
    aggregation: PartSpec = _FRAME["aggregation"],
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
    policy an update starts from (recompute: with `tis` this is decoupled PPO) or the sampler (behaviour).
    `tis`: bounds of f_t = pi_proximal / mu, token by token; null: none; auto: [0.5, 2.0] where proximal is
    recomputed and no other part weighs by that ratio. `corrections`: further factors. `kl`: an
    estimator (k3 unless named) of the distance to the reference, with `kl_weight` above 0; H: the policy's
    entropy. `kl_control`, `entropy_control` move the weights from step to step.
    """
    credit, objective, aggregation = (
        {"kind": _FRAME[role], **spec} if isinstance(spec, Mapping) and "kind" not in spec else spec
        for role, spec in (("credit", credit), ("objective", objective), ("aggregation", aggregation))
    )
    loss, further = make_part("objective", objective), make_parts("correction", corrections)
    weighing = [part.name for part in (loss, *further) if getattr(part.call, "weigh", False)]
    if tis == "auto":
        tis = (0.5, 2.0) if proximal == "recompute" and not weighing else None
    if len(weighing) + (tis is not None) > 1:
        names = [*(["token_tis"] if tis is not None else []), *weighing]
        raise AlgorithmError(
            f"{names} each weigh by the ratio to the sampler, which would weigh twice; keep one "
            "(tis: null drops token_tis, weigh: false makes a mask of one that has the option)"
        )
    first = () if tis is None else (make_part("correction", {"kind": "token_tis", "bounds": tis}),)
    weights = make_part("aggregation", aggregation)
    streams = [StreamSpec("pg", loss, weights, (*first, *further))]
    if kl is not None or kl_weight or kl_control is not None:
        streams.append(_kl(weights, kl, kl_weight, kl_control))
    if entropy_weight or entropy_control is not None:
        bonus = make_part("objective", "entropy_bonus")
        control = _control("entropy", entropy_control, entropy_weight)
        streams.append(StreamSpec("entropy", bonus, weights, scale=entropy_weight, control=control))
    return Algorithm(
        kind="policy_gradient",
        streams=tuple(streams),
        credit=make_part("credit", credit),
        shaping=make_parts("shaping", shaping),
        masks=make_parts("mask", masks),
        proximal=proximal,
    )


def _kl(weights: Part, kl: PartSpec | None, weight: float, control: PartSpec | None) -> StreamSpec:
    """The stream of the distance to the reference. AlgorithmError for one that could never pull."""
    if kl is None and not weight:
        raise AlgorithmError("kl_control has no distance to move; name one (kl: k3) and set kl_weight")
    if not weight and control is None:
        raise AlgorithmError(
            f"kl {kl!r} has weight 0 and no kl_control, so it would cost a reference and change nothing; set "
            "kl_weight above 0 or drop kl"
        )
    if weight < 0:
        raise AlgorithmError(f"kl_weight {weight} would drive the policy from its reference; set it above 0")
    spec = "k3" if kl is None else kl
    if isinstance(spec, str) and ":" not in spec:
        spec = {"kind": "kl", "estimator": spec}
    elif isinstance(spec, Mapping) and "kind" not in spec:
        spec = {"kind": "kl", **spec}
    moved = _control("kl", control, weight)
    return StreamSpec("kl", make_part("objective", spec), weights, scale=weight, control=moved)


def _control(stream: str, spec: PartSpec | None, weight: float) -> Part | None:
    """AlgorithmError for a control that multiplies a weight of 0."""
    part = None if spec is None else make_part("control", spec)
    if part is not None and part.name == "adaptive_kl" and not weight:
        raise AlgorithmError(
            f"{stream}_control adaptive_kl multiplies the weight, and {stream}_weight is 0; set it above 0"
        )
    return part


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
