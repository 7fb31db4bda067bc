"""Returns and generalised advantages over the trained tokens of a rollout: one step is one trained token.

What lies between them (tool results, later messages, tokens with train 0) takes no time: the last token
before a tool's answer is followed by the first one after it. The steps of a rollout are its trained tokens
over all its rows, in the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from trivet.algorithms.base import AlgorithmError, Batch
from trivet.algorithms.registry import register_credit

Rate = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Steps:
    """The trained tokens (_K) of compared rollouts, rollout after rollout.

    `token_K`: index into the batch's tokens; `first_N`, `count_N`: a rollout's range of them.
    """

    token_K: np.ndarray
    first_N: np.ndarray
    count_N: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> Steps:
        """Unscored and aborted rollouts have no steps: nothing is known of what they led to."""
        rollout_T = batch.rollout_T
        token_K = np.flatnonzero((batch.train_T > 0) & batch.compared_N[rollout_T])
        count_N = np.bincount(rollout_T[token_K], minlength=batch.rollouts)
        return cls(token_K, np.cumsum(count_N) - count_N, count_N)

    @property
    def last_N(self) -> np.ndarray:
        """Each rollout's last step; unspecified where it has none."""
        return self.first_N + self.count_N - 1

    def scatter(self, values_K: np.ndarray, tokens: int) -> np.ndarray:
        """(_K,) -> (_T,) float64, NaN elsewhere."""
        out_T = np.full(tokens, np.nan)
        out_T[self.token_K] = values_K
        return out_T

    def discounted(self, values_K: np.ndarray, decay: float, end_N: np.ndarray | None = None) -> np.ndarray:
        """y_k = x_k + decay y_{k+1} within each rollout; y after its last step is `end_N` (default 0).

        One pass from the ends, all rollouts at once: as many turns as the longest has steps.
        """
        order = np.argsort(-self.count_N, kind="stable")  # longest first: those still going are a prefix
        last, count = self.last_N[order], self.count_N[order]
        carry = np.zeros(len(order)) if end_N is None else end_N[order].astype(np.float64)
        out_K = np.asarray(values_K, np.float64).copy()
        live_L = np.searchsorted(-count, -np.arange(1, int(count.max(initial=0)) + 1), side="right")
        for back, live in enumerate(live_L):
            at = last[:live] - back
            carry[:live] = out_K[at] + decay * carry[:live]
            out_K[at] = carry[:live]
        return out_K


def rewards_of(batch: Batch, steps: Steps) -> np.ndarray:
    """r_k: a turn's own reward at its last trained token, the rollout's at the last of all; they add up.

    A turn of which nothing is trained gives its reward to the last step before it: the decisions that led
    there. Where there is none its reward is nobody's.
    """
    reward_K = np.zeros(len(steps.token_K))
    has = steps.count_N > 0
    reward_K[steps.last_N[has]] = batch.reward_N[has]
    given = np.flatnonzero(np.isfinite(batch.turn_reward_W) & has[batch.turn_rollout_W])
    if not len(given):
        return reward_K
    turn_T, turns = batch.turn_index_T, len(batch.turn_reward_W)
    last_W = np.full(turns, -1, np.int64)
    np.maximum.at(last_W, turn_T[steps.token_K], np.arange(len(steps.token_K)))
    begin_W = np.full(turns, batch.tokens, np.int64)
    sampled = np.flatnonzero(turn_T >= 0)
    np.minimum.at(begin_W, turn_T[sampled], sampled)
    before_W = np.searchsorted(steps.token_K, begin_W) - 1
    step_W = np.where(last_W >= 0, last_W, before_W)[given]
    mine = step_W >= steps.first_N[batch.turn_rollout_W[given]]
    np.add.at(reward_K, step_W[mine], batch.turn_reward_W[given][mine])
    return reward_K


def whitened(values_K: np.ndarray) -> np.ndarray:
    """(x - mean) / std over all steps of the batch (n - 1); one step, or equal ones, give 0."""
    if not len(values_K):
        return values_K
    delta = values_K - values_K.mean()
    scale = np.abs(delta).max()
    if scale <= 1e-12 * np.abs(values_K).max(initial=0.0):
        return np.zeros_like(values_K)
    delta = delta / scale
    return delta / np.sqrt((delta**2).sum() / max(len(delta) - 1, 1))


def _annotation(batch: Batch, steps: Steps, name: str) -> np.ndarray:
    """A column of the annotations at the steps, finite. Raises AlgorithmError."""
    values_K = batch.annotations[name][steps.token_K].astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(values_K))
    if len(wrong):
        n = int(batch.rollout_T[steps.token_K[wrong[0]]])
        raise AlgorithmError(
            f"{name} is not a finite number at {len(wrong)} trained tokens, the first in rollout "
            f"{batch.rollout_ids[n]!r}: every trained token needs one; was the batch annotated as a whole?"
        )
    return values_K


@dataclass(frozen=True)
class _Reward:
    """Options that say what a step earns, shared by `returns` and `gae`."""

    gamma: Rate = 1.0
    whiten: bool = True
    kl: Annotated[float, Field(ge=0)] = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"proximal_logp", "ref_logp"}) if self.kl else frozenset()

    def rewards(self, batch: Batch, steps: Steps) -> np.ndarray:
        reward_K = rewards_of(batch, steps)
        if self.kl:
            now, reference = (_annotation(batch, steps, name) for name in ("proximal_logp", "ref_logp"))
            reward_K -= self.kl * (now - reference)
        return reward_K

    def advantage(self, values_K: np.ndarray) -> np.ndarray:
        return whitened(values_K) if self.whiten else values_K


@register_credit("returns", columns=("return",))
@dataclass(frozen=True)
class Returns(_Reward):
    """A_t = G_t = r_t + gamma G_{t+1}, the discounted return from token t on, over trained tokens.

    Source: REINFORCE with the reward to go (Williams 1992; Sutton & Barto 2018, section 13.3). With rewards
    [0, 0, 1], the middle token not trained and gamma 0.5: [0.5, -, 1.0]. r_t holds the rollout's reward at
    its last trained token and rewards of turns at the turns' last ones. `kl`: beta of the KL penalty inside
    the reward, -beta (log pi_proximal - log pi_ref) at every token (Ouyang et al. 2022). `whiten`: mean 0 and
    standard deviation 1 over the batch's trained tokens. Columns: advantage, return (before whitening).
    """

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """(_T,) each; NaN where nothing is trained and for unscored and aborted rollouts."""
        steps = Steps.of(batch)
        return_K = steps.discounted(self.rewards(batch, steps), self.gamma)
        columns = {"advantage": self.advantage(return_K), "return": return_K}
        return {name: steps.scatter(values, batch.tokens) for name, values in columns.items()}


@register_credit("gae", columns=("return",))
@dataclass(frozen=True)
class GAE(_Reward):
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, over trained tokens.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", equation 16; per token as in Ouyang et al. 2022. V_t is the critic's estimate of the state
    before token t (annotation "value"); after a rollout's last step it is 0. `bootstrap`: after one that a
    budget cut off it is the last estimate there is, since the state did not end. The value's target is
    return_t = A_t + V_t, before whitening. `lam` 1: the return less the value; 0: one step. `kl`, `whiten`:
    see `returns`; the penalty is in the value's target too.
    """

    lam: Rate = 0.95
    bootstrap: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"value"}

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """(_T,) each; NaN where nothing is trained and for unscored and aborted rollouts."""
        steps = Steps.of(batch)
        value_K = _annotation(batch, steps, "value")
        next_K = np.append(value_K[1:], 0.0)[: len(value_K)]
        has = np.flatnonzero(steps.count_N > 0)
        last = steps.last_N[has]
        cut = batch.truncated_N[has] if self.bootstrap else np.zeros(len(has), bool)
        next_K[last] = np.where(cut, value_K[last], 0.0)
        delta_K = self.rewards(batch, steps) + self.gamma * next_K - value_K
        advantage_K = steps.discounted(delta_K, self.gamma * self.lam)
        columns = {"advantage": self.advantage(advantage_K), "return": advantage_K + value_K}
        return {name: steps.scatter(values, batch.tokens) for name, values in columns.items()}
