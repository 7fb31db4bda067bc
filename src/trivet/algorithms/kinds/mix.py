"""Learning from rewards and from an expert's answers in one update: MIX, CHORD; from one's own best: RAFT."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from trivet.algorithms.base import Algorithm, Part, StreamSpec
from trivet.algorithms.experts import OldSuccesses, by_expert, by_policy
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import PartSpec, make_part, register_algorithm

Share = Annotated[float, Field(ge=0, le=1)]


def _mixed(
    frame: Algorithm, imitation: StreamSpec, reward_scale: float, reward_control: Part | None
) -> Algorithm:
    """A policy gradient on the policy's rollouts beside a stream of imitation."""
    first, *others = frame.streams
    scaled = replace(first, scale=reward_scale, select=by_policy, control=reward_control)
    others = [replace(stream, select=by_policy) for stream in others]
    consumes = frame.consumes | ({"sft"} if imitation.select is by_expert else frozenset())
    return replace(frame, streams=(scaled, *others, imitation), consumes=frozenset(consumes))


@register_algorithm("mix", extends=policy_gradient)
def mix(
    *,
    mu: Share = 0.1,
    schedule: Literal["fixed", "entropy", "alternate"] = "fixed",
    period: Annotated[int, Field(ge=2)] = 2,
    imitate: Literal["expert", "own"] = "expert",
    threshold: float = 1.0,
    older: bool = True,
    **parts: Any,
) -> Algorithm:
    """loss = (1 - mu) * policy gradient on the policy's rollouts + mu * cross-entropy on an expert's.

    Source: Trinity-RFT's MIX (2025). The examples are the stage's `expert:` section; each term has its own
    denominator, and an expert's answer enters no group's baseline. `schedule`: fixed; entropy: mu exp(-H)
    (see the control entropy_share); alternate: every `period`-th step imitates only, the others learn from
    rewards only, mu is not used. `imitate: own`: no expert; what is imitated are the policy's own rollouts
    with a reward of at least `threshold`, with `older` only those of earlier versions than the batch's
    newest. The policy gradient is GRPO's unless its parts are changed.
    """
    frame = preset({}, parts)
    scales, controls = {"imitate": mu, "reward": 1 - mu}, dict.fromkeys(("imitate", "reward"))
    if schedule == "alternate":
        scales = {"imitate": 0.0, "reward": 1.0}
        controls = {
            side: make_part("control", {"kind": "alternate", "side": side, "period": period})
            for side in scales
        }
    elif schedule == "entropy":
        controls = {
            side: make_part("control", {"kind": "entropy_share", "side": side, "mu": mu}) for side in scales
        }
    imitation = StreamSpec(
        "imitate",
        make_part("objective", "cross_entropy"),
        make_part("aggregation", "token_mean"),
        scale=scales["imitate"],
        select=by_expert if imitate == "expert" else OldSuccesses(threshold, older),
        control=controls["imitate"],
    )
    return _mixed(frame, imitation, scales["reward"], controls["reward"])


@register_algorithm("chord", extends=policy_gradient)
def chord(
    *,
    variant: Literal["mu", "phi"] = "mu",
    mu: Share = 0.9,
    end: Share = 0.05,
    steps: Annotated[int, Field(gt=0)] = 200,
    **parts: Any,
) -> Algorithm:
    """loss = (1 - mu) * policy gradient + mu * imitation, mu falling from `mu` to `end` over `steps` steps.

    Source: CHORD (Zhang et al. 2025, "On-policy RL meets off-policy experts"). `variant` mu: plain
    cross-entropy, as the source's CHORD-mu; phi: each expert token weighed by p (1 - p) (objective
    uncertain_cross_entropy), CHORD-phi, for which a small constant mu is meant: set `mu` and `end` to it,
    e.g. 0.1. Begins as supervised training and ends as reinforcement learning; examples come from `expert:`.
    """
    objective: PartSpec = "cross_entropy" if variant == "mu" else "uncertain_cross_entropy"
    falls, rises = (
        make_part("control", {"kind": "linear_decay", "steps": steps, "end": to}) for to in (end, 1 - end)
    )
    imitation = StreamSpec(
        "imitate",
        make_part("objective", objective),
        make_part("aggregation", "token_mean"),
        scale=mu,
        select=by_expert,
        control=falls,
    )
    return _mixed(preset({}, parts), imitation, 1 - mu, rises)


@register_algorithm("raft")
def raft(
    *, k: Annotated[int, Field(gt=0)] = 1, above: float = 0.0, aggregation: PartSpec = "sequence_mean"
) -> Algorithm:
    """loss = mean over the kept rollouts of their token means of -log pi(t): the `k` best of each group,
    where their reward is over `above`.

    Source: Dong et al. 2023, "RAFT: reward ranked fine-tuning". No advantage, no ratio, nothing to tune;
    failures teach nothing, and the policy sharpens.
    """
    stream = StreamSpec(
        "best", make_part("objective", "cross_entropy"), make_part("aggregation", aggregation)
    )
    mask = make_part("mask", {"kind": "best_of", "k": k, "above": above})
    return Algorithm("raft", (stream,), masks=(mask,), modes=frozenset({"both", "async"}))
