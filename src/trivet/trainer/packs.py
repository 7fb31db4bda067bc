"""From packs to a batch: every document is a row of its own, whatever it was packed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet.algorithms.base import KINDS, ROLES, TERMINATIONS, Batch
from trivet.data.shards import Pack, ShardError
from trivet.trainer.batch import refuse_first
from trivet.trainer.labels import Labels
from trivet.types import IssueKey, Termination


def collate_packs(packs: Sequence[Pack], *, step: int = 0) -> tuple[Batch, Labels]:
    """The documents of `packs`, in order, as groups of one, and the source and category of each.

    As `trainer.collate` of the same examples: own positions, the stored loss weights, no sampler. Raises
    ShardError for a pack whose columns do not fit each other.
    """
    for pack in packs:
        _check(pack)
    length_R = np.concatenate([np.zeros(0, np.int64), *(pack.lengths_D for pack in packs)]).astype(np.int64)
    start_R, rows = np.cumsum(length_R) - length_R, len(length_R)
    ids_T = np.concatenate([np.zeros(0, np.int32), *(pack.ids_T for pack in packs)]).astype(np.int32)
    train_T = np.concatenate([np.zeros(0, np.float32), *(pack.train_T for pack in packs)]).astype(np.float32)
    row_T = np.repeat(np.arange(rows, dtype=np.int32), length_R)
    examples = [name for pack in packs for name in pack.examples]
    batch = Batch(
        ids_T=ids_T,
        position_T=(np.arange(len(ids_T)) - np.repeat(start_R, length_R)).astype(np.int32),
        row_T=row_T,
        train_T=train_T,
        row_start_R=start_R,
        row_length_R=length_R,
        length_N=np.bincount(row_T[train_T > 0], minlength=rows).astype(np.int64),
        step=step,
        **_unsampled(len(ids_T)),
        **_examples(examples),
    )
    refuse_first(batch)
    return batch, {
        "source": [name for pack in packs for name in pack.sources],
        "category": [name for pack in packs for name in pack.categories],
    }


def _check(pack: Pack) -> None:
    documents = len(pack.lengths_D)
    names = {len(column) for column in (pack.examples, pack.sources, pack.categories)}
    fits = len(pack.ids_T) == len(pack.train_T) == int(pack.lengths_D.sum()) and names == {documents}
    if not documents or not fits or int(pack.lengths_D.min()) < 1:
        raise ShardError(
            f"a pack of {documents} documents and {len(pack.ids_T)} tokens does not fit its columns: its "
            "file is damaged; build again"
        )
    if not np.isfinite(pack.train_T).all() or (pack.train_T < 0).any():
        raise ShardError("a pack's loss weights are not finite numbers of at least 0: build again")


def _unsampled(tokens: int) -> dict[str, np.ndarray]:
    """The columns of tokens that no policy wrote."""
    return {
        "sampled_T": np.zeros(tokens, bool),
        "logprob_T": np.full(tokens, np.nan, np.float32),
        "version_T": np.full(tokens, -1, np.int32),
        "temperature_T": np.ones(tokens, np.float32),
        "turn_T": np.full(tokens, -1, np.int32),
        "node_T": np.zeros(tokens, np.int32),
    }


def _examples(names: Sequence[str]) -> dict[str, Any]:
    """The tables of rollouts and groups of finished examples without a reward."""
    n = len(names)
    nowhere = np.zeros(0, np.int64)
    return {
        "row_rollout_R": np.arange(n, dtype=np.int64),
        "reward_N": np.full(n, np.nan),
        "raw_reward_N": np.full(n, np.nan),
        "group_N": np.arange(n, dtype=np.int64),
        "player_N": np.zeros(n, np.int64),
        "attempt_N": np.zeros(n, np.int64),
        "termination_N": np.full(n, TERMINATIONS.index(Termination.FINISHED), np.int8),
        "source_N": np.zeros(n, np.int64),
        "role_N": np.full(n, ROLES.index("train"), np.int8),
        "preference_N": np.zeros(n, np.int8),
        "turn_rollout_W": nowhere,
        "turn_reward_W": np.zeros(0, np.float64),
        "turn_state_W": nowhere,
        "kind_G": np.full(n, KINDS.index("sft"), np.int8),
        "group_ids": tuple(names),
        "issues": tuple(IssueKey(name, 0) for name in names),
        "rollout_ids": tuple(names),
        "players": ("policy",),
        "sources": ("expert",),
        "causes": ("supervised",) * n,
    }
