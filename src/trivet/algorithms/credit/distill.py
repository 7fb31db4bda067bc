"""Credit from a teacher: what it would rather have had said, token by token, on the policy's own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from trivet.algorithms.base import AlgorithmError, Batch
from trivet.algorithms.registry import PartSpec, make_part, register_credit

BOUND = 20.0
"""Log-ratios beyond it are accidents; they must not outweigh a whole batch."""

Share = Annotated[float, Field(gt=0, lt=1)]


def teacher_log_ratio(batch: Batch) -> np.ndarray:
    """log teacher(t) - log mu(t) float64 (_T,) at sampled tokens that are trained, NaN elsewhere."""
    if "teacher_logp" not in batch.annotations:
        raise AlgorithmError("distillation reads teacher_logp: name a teacher under models: teacher")
    ratio_T = np.asarray(batch.annotations["teacher_logp"], np.float64) - batch.logprob_T
    return np.where(batch.sampled_T, np.clip(ratio_T, -BOUND, BOUND), np.nan)


def _with_task(batch: Batch, own_T: np.ndarray, task: PartSpec | None, weight: float) -> np.ndarray:
    """The teacher's credit plus `weight` times the task's; unscored rollouts keep the teacher's alone."""
    if task is None:
        return own_T
    given = make_part("credit", task)(batch)
    advantage = np.asarray(given["advantage"] if isinstance(given, dict) else given, np.float64)
    if advantage.shape == (batch.rollouts,):
        advantage = advantage[batch.rollout_T]
    return own_T + weight * np.nan_to_num(advantage)


@dataclass(frozen=True)
class _Taught:
    """Credit of a teacher, with what the task's own credit asks for."""

    task: PartSpec | None = None
    task_weight: float = 1.0

    def __post_init__(self) -> None:
        """A wrong name or option is found when the recipe is read. Raises AlgorithmError."""
        if self.task is not None:
            make_part("credit", self.task)

    @property
    def needs(self) -> frozenset[str]:
        own = frozenset({"teacher_logp"})
        return own if self.task is None else own | make_part("credit", self.task).needs

    @property
    def group_min(self) -> int:
        return 1 if self.task is None else make_part("credit", self.task).traits.get("group_min", 1)

    @property
    def greedy(self) -> bool:
        return self.task is not None and make_part("credit", self.task).traits.get("greedy", False)


@register_credit("reverse_kl")
@dataclass(frozen=True)
class ReverseKL(_Taught):
    """A_t = log teacher(t) - log mu(t): the negative reverse KL's estimate at the sampled token.

    The policy gradient with it is that of -KL(pi || teacher) per token, up to a baseline of mean zero, on the
    policy's own answers. Source: on-policy distillation (Agarwal et al. 2024, "On-policy distillation of
    language models", with their reverse divergence; Gu et al. 2024, "MiniLLM"). No reward is needed; `task`,
    a credit of its own, adds what the verifier says, `task_weight` times. Needs `teacher_logp` and what
    `task` needs.
    """

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_T,); NaN where nothing was sampled. The teacher judges aborted rollouts too; masks drop them."""
        return _with_task(batch, teacher_log_ratio(batch), self.task, self.task_weight)


@register_credit("jsd")
@dataclass(frozen=True)
class JSD(_Taught):
    """A_t = (1 - beta) log(beta r_t + 1 - beta), r_t = teacher(t) / mu(t).

    The exact policy gradient of the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024),
    D = beta KL(teacher || m) + (1 - beta) KL(pi || m), m = beta teacher + (1 - beta) pi: with D = E_pi f(r),
    f(r) = beta r log(r / m') - (1 - beta) log m', m' = beta r + 1 - beta, the gradient is
    E_pi (f(r) - r f'(r)) grad log pi, and f - r f' = -(1 - beta) log m'. Small `beta` is close to the forward
    KL (covers the teacher), large to the reverse KL (seeks its mode); a token the teacher finds impossible
    costs at most (1 - beta) log(1 - beta), where the reverse KL's cost has no bound. `task`: see reverse_kl.
    Needs `teacher_logp` and what `task` needs.
    """

    beta: Share = 0.5

    def __call__(self, batch: Batch) -> np.ndarray:
        """(_T,); NaN where nothing was sampled."""
        ratio_T = np.exp(teacher_log_ratio(batch))
        own_T = (1 - self.beta) * np.log(self.beta * ratio_T + 1 - self.beta)
        return _with_task(batch, own_T, self.task, self.task_weight)
