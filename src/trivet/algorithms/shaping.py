"""Shaping: what is rewarded beyond what the verifier said. Runs before credit, in the recipe's order.

Every part gives `reward_N` anew and leaves unscored rollouts NaN. Whether a rollout is correct is read from
the verifier's own reward (`raw_reward_N`), so no order of parts changes it. Lengths are a rollout's trained
tokens over all its rows; limits are numbers of tokens. Groups are (group, player).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from trivet.algorithms.base import AlgorithmError, Batch
from trivet.algorithms.credit import group_key, shortness_N
from trivet.algorithms.registry import lookup, register_shaping

Tokens = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]

_RESIDUE = 1e-12
"""What rounding leaves of 1 - cosine between equal texts; normalised credit would make a signal of it."""


# -- length --------------------------------------------------------------------------------------


@register_shaping("relative_length")
@dataclass(frozen=True)
class RelativeLength:
    """r' = r - cap * clip((n - s) / (limit - s), 0, 1), s the tokens of the group's shortest correct rollout.

    Source: Rufus-Air (2026), reasoning stage; related: Kimi k1.5 (2025). Zero at or below s, `cap` at
    `limit`. A group without a correct rollout (raw reward >= `correct`) is left as it is: there is nothing
    that would show how short an answer can be.
    """

    limit: Tokens
    cap: Weight = 0.5
    correct: float = 1.0

    def __call__(self, batch: Batch) -> np.ndarray:
        correct_N = batch.compared_N & (batch.raw_reward_N >= self.correct)
        key_N = group_key(batch)
        shortest = np.full(int(key_N.max(initial=-1)) + 1, np.inf)
        np.minimum.at(shortest, key_N[correct_N], batch.length_N[correct_N])
        shortest_N = shortest[key_N]  # infinite where none is correct: no length is above that
        room_N = np.maximum(self.limit - shortest_N, 1.0)
        share_N = np.clip((batch.length_N - shortest_N) / room_N, 0.0, 1.0)
        return batch.reward_N - self.cap * share_N


@register_shaping("overlength")
@dataclass(frozen=True)
class Overlength:
    """r' = r (1 - cap * clip((n - start) / (limit - start), 0, 1)) for r > 0; others unchanged.

    Source: Rufus-Air (2026), preference stage: a linear penalty for rewards of no fixed scale. A negative
    reward is not touched: taking from it would punish length where the answer is bad for other reasons, and
    scaling it would reward length.
    """

    start: Annotated[int, Field(ge=0)]
    limit: Tokens
    cap: Share = 1.0

    def __post_init__(self) -> None:
        if self.limit <= self.start:
            raise ValueError(f"limit {self.limit} must lie above start {self.start}")

    def __call__(self, batch: Batch) -> np.ndarray:
        share_N = np.clip((batch.length_N - self.start) / (self.limit - self.start), 0.0, 1.0)
        return _scaled(batch, 1.0 - self.cap * share_N)


@register_shaping("soft_overlong")
@dataclass(frozen=True)
class SoftOverlong:
    """r' = r + weight * p; p = 0 for n <= max_length - buffer, (max_length - buffer - n) / buffer up to
    max_length, -1 beyond. Source: DAPO (Yu et al. 2025), equation 13.

    `max_length`: tokens an answer may have; `buffer`: the last of them, over which the penalty grows.
    """

    max_length: Tokens
    buffer: Tokens
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer {self.buffer} is longer than max_length {self.max_length}")

    def __call__(self, batch: Batch) -> np.ndarray:
        free = self.max_length - self.buffer
        penalty_N = np.clip((free - batch.length_N) / self.buffer, -1.0, 0.0)
        return batch.reward_N + self.weight * penalty_N


@register_shaping("length_bonus")
@dataclass(frozen=True)
class LengthBonus:
    """r' = r + bonus (1 - n / longest solve) for a solve in a group with at least two, else r.

    Source: FireFlash (2026). A solve has a raw reward >= `solved`.
    """

    bonus: Weight = 0.2
    solved: float = 1.0

    def __call__(self, batch: Batch) -> np.ndarray:
        solved_N = batch.compared_N & (batch.raw_reward_N >= self.solved)
        return batch.reward_N + self.bonus * shortness_N(batch, solved_N)


# -- behaviour, from counters --------------------------------------------------------------------


@register_shaping("malformed_calls")
@dataclass(frozen=True)
class MalformedCalls:
    """r' = r (1 - (1 - floor) * malformed / calls) for r > 0: down to `floor` when all are malformed.

    Source: Rufus-Air (2026), search stage. `malformed` and `calls` name counters, the second of all calls,
    malformed ones among them. A rollout without calls keeps its reward; so does a negative one, which
    scaling would improve.
    """

    malformed: str = "malformed_calls"
    calls: str = "tool_calls"
    floor: Share = 0.5

    def __call__(self, batch: Batch) -> np.ndarray:
        malformed_N = np.nan_to_num(_number(batch, self.malformed, "malformed_calls"))
        calls_N = np.nan_to_num(_number(batch, self.calls, "malformed_calls"))
        share_N = np.clip(malformed_N / np.maximum(calls_N, 1.0), 0.0, 1.0)
        return _scaled(batch, 1.0 - (1.0 - self.floor) * share_N)


@register_shaping("tool_gate")
@dataclass(frozen=True)
class ToolGate:
    """r' = min(r, 0) under `minimum` successful calls, else r: an answer without the work is worth nothing.

    Source: Rufus-Air (2026), search stage (at least 2). `successes` names the counter; a rollout that has
    none of that name made no call, and where no rollout of a batch has it that is an error: tools were never
    offered.
    """

    minimum: Annotated[int, Field(gt=0)] = 2
    successes: str = "successful_calls"

    def __call__(self, batch: Batch) -> np.ndarray:
        successes_N = np.nan_to_num(_number(batch, self.successes, "tool_gate"))
        return np.where(successes_N < self.minimum, np.minimum(batch.reward_N, 0.0), batch.reward_N)


@register_shaping("no_answer")
@dataclass(frozen=True)
class NoAnswer:
    """r' = r + penalty where the number `flag` is above 0: the rollout spent its budget and answered nothing.

    Source: Rufus-Air (2026), search stage (-0.1). `flag` names a counter or a part of the reward.
    """

    flag: str = "no_answer"
    penalty: Annotated[float, Field(le=0)] = -0.1

    def __call__(self, batch: Batch) -> np.ndarray:
        silent_N = np.nan_to_num(_number(batch, self.flag, "no_answer")) > 0
        return batch.reward_N + np.where(silent_N, self.penalty, 0.0)


# -- bonuses that fade ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fading:
    """A weight that goes in a straight line from `weight` at step 1 to `final` at step `steps`, and stays."""

    weight: float = 0.5
    final: float = 0.3
    steps: Annotated[int, Field(gt=0)] = 100

    def at(self, step: int) -> float:
        share = min(max(step - 1, 0) / max(self.steps - 1, 1), 1.0)
        return self.weight + (self.final - self.weight) * share


@register_shaping("quality_bonus")
@dataclass(frozen=True)
class QualityBonus(_Fading):
    """r' = r + w(step) * q, q the number named `part`: a part of the reward or a counter.

    Source: quality reward shaping of Trinity-RFT (2025). w goes in a straight line from `weight` at step 1 to
    `final` at step `steps`. A rollout without that part keeps its reward.
    """

    part: str = "quality"

    def __call__(self, batch: Batch) -> np.ndarray:
        quality_N = np.nan_to_num(_number(batch, self.part, "quality_bonus"))
        return batch.reward_N + self.at(batch.step) * quality_N


@register_shaping("diversity_bonus")
@dataclass(frozen=True)
class DiversityBonus(_Fading):
    """r' = r + w(step) * (1 - cos(e_i, mean of the group's e)), e of length 1.

    Source: diversity reward shaping of Trinity-RFT (2025), weight 0.5 to 0.3; it opposes a policy that says
    the same thing `G` times. w as of quality_bonus. `embed`: `module:function` or `file.py:function`, from
    the batch to (_N, D) numbers; default: counts of runs of 1 to `ngram` trained tokens, hashed into
    `dims` numbers. A group of one, and a rollout without an embedding (all 0), get no bonus.

    Raises AlgorithmError for embeddings of another shape or that are not finite.
    """

    embed: str | None = None
    ngram: Annotated[int, Field(gt=0)] = 2
    dims: Annotated[int, Field(gt=1)] = 512

    def __post_init__(self) -> None:
        if self.embed is not None:
            if ":" not in self.embed:
                raise ValueError(f"embed {self.embed!r}: write module:function or path/to/file.py:function")
            lookup("shaping", self.embed)  # a wrong name is found before anything runs

    def __call__(self, batch: Batch) -> np.ndarray:
        embedding_ND = self._embeddings(batch)
        norm_N = np.linalg.norm(embedding_ND, axis=1)
        known_N = batch.compared_N & (norm_N > 0)
        unit_ND = embedding_ND / np.where(norm_N > 0, norm_N, 1.0)[:, None]
        key_N = np.unique(group_key(batch), return_inverse=True)[1].reshape(-1)
        total_GD = np.zeros((int(key_N.max(initial=-1)) + 1, unit_ND.shape[1]))
        np.add.at(total_GD, key_N[known_N], unit_ND[known_N])  # the sum points where the mean does
        length_G = np.linalg.norm(total_GD, axis=1)
        dot_N = np.einsum("nd,nd->n", unit_ND, total_GD[key_N])
        cosine_N = dot_N / np.where(length_G > 0, length_G, 1.0)[key_N]
        apart_N = 1.0 - np.clip(cosine_N, -1.0, 1.0)
        bonus_N = np.where(known_N & (apart_N > _RESIDUE), apart_N, 0.0)
        return batch.reward_N + self.at(batch.step) * bonus_N

    def _embeddings(self, batch: Batch) -> np.ndarray:
        if self.embed is None:
            return hashed_ngrams(batch, self.ngram, self.dims)
        found = np.asarray(lookup("shaping", self.embed)[0](batch), np.float64)
        if found.ndim != 2 or len(found) != batch.rollouts or not np.isfinite(found).all():
            raise AlgorithmError(
                f"shaping 'diversity_bonus': {self.embed} must give finite numbers of shape (rollouts, D) = "
                f"({batch.rollouts}, D), not {found.shape}"
            )
        return found


def hashed_ngrams(batch: Batch, ngram: int, dims: int) -> np.ndarray:
    """(_N, dims) counts of runs of 1 to `ngram` trained tokens of one row, hashed into `dims` cells."""
    index = np.flatnonzero(batch.train_T > 0)
    code_K, row_K = batch.ids_T[index].astype(np.uint64), batch.row_T[index]
    rollout_K = batch.row_rollout_R[row_K]
    counts = np.zeros(batch.rollouts * dims)
    hash_K = np.zeros(len(index), np.uint64)
    for k in range(min(ngram, len(index))):
        stop = len(index) - k  # runs that begin at 0..stop-1 and end k further on
        hash_K = (hash_K[:stop] ^ (code_K[k:] + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        cell_K = ((hash_K >> np.uint64(32)) % np.uint64(dims)).astype(np.int64)
        whole = row_K[k:] == row_K[:stop]
        counts += np.bincount((rollout_K[:stop] * dims + cell_K)[whole], minlength=len(counts))
    return counts.reshape(batch.rollouts, dims)


# -- help ----------------------------------------------------------------------------------------


def _scaled(batch: Batch, factor_N: np.ndarray) -> np.ndarray:
    """Positive rewards times a factor; the others, and NaN, as they are."""
    return np.where(batch.reward_N > 0, batch.reward_N * factor_N, batch.reward_N)


def _number(batch: Batch, name: str, part: str) -> np.ndarray:
    """(_N,) the counter or part of the reward of that name. Raises AlgorithmError naming those there are."""
    for table in (batch.counters, batch.parts):
        if name in table:
            return table[name]
    raise AlgorithmError(
        f"shaping {part!r} reads {name!r}, which no rollout of the batch has; counters: "
        f"{', '.join(sorted(batch.counters)) or 'none'}; parts of the reward: "
        f"{', '.join(sorted(batch.parts)) or 'none'}. Name one of them, or let the environment count it"
    )
