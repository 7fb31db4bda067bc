"""On-policy distillation: a teacher judges every token of the policy's own answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from trivet.algorithms.base import Algorithm
from trivet.algorithms.kinds.policy_gradient import policy_gradient, preset
from trivet.algorithms.registry import PartSpec, register_algorithm


@register_algorithm("on_policy_distillation", extends=policy_gradient)
def on_policy_distillation(
    *, task: PartSpec | None = None, task_weight: float = 1.0, **parts: Any
) -> Algorithm:
    """loss = token mean of -f_t A_t log pi(t) in effect, A_t = log teacher(t) - log mu(t) (credit
    `reverse_kl`).

    The teacher is `models: teacher: {model: ...}`, with the policy's vocabulary. Denser than a reward at the
    end: every token is told apart. No verifier is needed, nor a group: `batch.group: 1` is enough. `task`: a
    credit whose advantages are added. Source: Agarwal et al. 2024, "On-policy distillation of language
    models".
    """
    credit = {"kind": "reverse_kl", "task": task, "task_weight": task_weight}
    chosen = {"credit": credit, "objective": {"kind": "ppo_clip", "clip": None}, "aggregation": "token_mean"}
    return preset(chosen, parts)


@register_algorithm("jsd", extends=policy_gradient)
def jsd(
    *,
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5,
    task: PartSpec | None = None,
    task_weight: float = 1.0,
    **parts: Any,
) -> Algorithm:
    """As on_policy_distillation with the generalised Jensen-Shannon divergence (credit `jsd`): bounded where
    the teacher finds a token impossible. `beta` near 0 covers the teacher, near 1 seeks its mode.
    """
    credit = {"kind": "jsd", "beta": beta, "task": task, "task_weight": task_weight}
    chosen = {"credit": credit, "objective": {"kind": "ppo_clip", "clip": None}, "aggregation": "token_mean"}
    return preset(chosen, parts)
