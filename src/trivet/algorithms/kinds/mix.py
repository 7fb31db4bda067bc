"""Learning from rewards and from an expert's answers in one update: MIX, CHORD; from one's own best: RAFT."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from trivet.algorithms.base import Algorithm, AlgorithmError, Part, StreamSpec
from trivet.algorithms.experts import OldSuccesses, Share, WithoutExperts, by_expert, by_policy
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import PartSpec, make_part, register_algorithm

Fraction = Annotated[float, Field(ge=0, le=1)]


def _mixed(
    frame: Algorithm, imitation: StreamSpec, reward_scale: float, reward_control: Part | None
) -> Algorithm:
    """A policy gradient on the policy's rollouts, compared with each other, beside a stream of imitation."""
    first, *others = frame.streams
    scaled = replace(first, scale=reward_scale, select=by_policy, control=reward_control)
    others = [replace(stream, select=by_policy) for stream in others]
    consumes = frame.consumes | ({"sft"} if imitation.select is by_expert else frozenset())
    credit = _own_credit(frame)
    return replace(frame, streams=(scaled, *others, imitation), consumes=frozenset(consumes), credit=credit)


def _own_credit(frame: Algorithm) -> Part | None:
    """The frame's credit, blind to an expert's rewards."""
    credit = frame.credit
    return None if credit is None else replace(credit, call=WithoutExperts(credit.call))


def _joined(frame: Algorithm) -> Algorithm:
    """A policy gradient on the policy's and an expert's rows, compared together, under one denominator.

    An expert's tokens have no sampler: corrections that read one are the policy's rows' alone.
    """
    if frame.proximal == "behaviour":
        raise AlgorithmError(
            "imitate: in_loss takes the ratio of an expert's tokens to the policy the update starts from; an "
            "expert's tokens have no sampler: set proximal: recompute"
        )
    first, *others = frame.streams
    if first.objective.traits.get("behaviour"):
        raise AlgorithmError(
            f"objective {first.objective.name!r} reads the sampler's log-probabilities, and an expert's "
            "tokens have none: with imitate: in_loss take another, e.g. ppo_clip"
        )
    weights = first.aggregation
    own, foreign = (replace(weights, call=Share(weights.call, who)) for who in (by_policy, by_expert))
    kept = tuple(part for part in first.corrections if not part.traits.get("behaviour"))
    expert = replace(first, name="expert", aggregation=foreign, corrections=kept)
    others = [replace(stream, select=by_policy) for stream in others]
    return replace(frame, streams=(replace(first, aggregation=own), *others, expert))


@register_algorithm("mix", extends=policy_gradient)
def mix(
    *,
    mu: Fraction = 0.1,
    schedule: Literal["fixed", "entropy", "alternate"] = "fixed",
    period: Annotated[int, Field(ge=2)] = 2,
    imitate: Literal["expert", "own", "in_loss"] = "expert",
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
    newest. `imitate: in_loss`: an expert's rollouts that the environment puts into a group (source expert,
    with a reward; `env_args: {demonstrate: true}` adds the task's worked answer) are compared with the
    policy's and trained by the same policy gradient, their ratio starting at 1 (Yan et al. 2025, "Learning to
    reason under off-policy guidance", LUFFY, without its shaping); there is no `expert:`, and mu is not used.
    The policy gradient is GRPO's unless its parts are changed.
    """
    frame = preset({}, parts)
    if imitate == "in_loss":
        if schedule != "fixed":
            raise AlgorithmError(
                f"schedule {schedule} moves mu, which imitate: in_loss does not use; drop it"
            )
        return _joined(frame)
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
    mu: Fraction = 0.9,
    end: Fraction = 0.05,
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
