"""From groups to flat columns (`collate`), and from one prepared batch to several updates (`split`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from trivet.algorithms.base import (
    KINDS,
    PREFERENCES,
    ROLES,
    TERMINATIONS,
    AlgorithmError,
    Batch,
    PreparedBatch,
    TopColumn,
)
from trivet.algorithms.prepare import assemble
from trivet.types import Attachment, Group, Pending, Rollout, Row, Scored, Unscored
from trivet.types.trace import Origin

_TOKEN_COLUMNS: dict[str, Any] = {
    "ids_T": np.int32,
    "sampled_T": np.bool_,
    "train_T": np.float32,
    "logprob_T": np.float32,
    "version_T": np.int32,
    "temperature_T": np.float32,
    "turn_T": np.int32,
    "node_T": np.int32,
}


class HeavyColumns(Protocol):
    """Where attachments are read from; `trivet.buffer.AttachmentStore` is one."""

    def open(self, attachment: Attachment) -> np.ndarray: ...


def collate(
    groups: Sequence[Group],
    *,
    step: int = 0,
    needs: Collection[str] = (),
    attachments: HeavyColumns | None = None,
) -> Batch:
    """Rows of all rollouts side by side, in the order of groups, rollouts and leaves.

    Every rollout is kept, trained or not: its reward belongs to its group's baseline. Rows without a trained
    token are kept too; `prepare` marks them as not to be forwarded. `step`: the one it is trained at. With
    "top" in `needs` the sampler's most probable tokens are read from `attachments`, with "routes" experts.

    Raises AlgorithmError for a pending reward, a rollout of role eval, a trained token at position 0 of a
    row, and when something in `needs` was never stored.
    """
    rollouts = [(g, rollout) for g, group in enumerate(groups) for rollout in group.rollouts]
    for g, rollout in rollouts:
        _refuse(groups[g], rollout)
    rows_N = [rollout.trace.rows() for _, rollout in rollouts]
    rows = [row for rows in rows_N for row in rows]
    length_R = np.asarray([len(row) for row in rows], np.int64)
    row_rollout_R = np.repeat(np.arange(len(rollouts)), [len(rows) for rows in rows_N]).astype(np.int64)
    start_R = np.cumsum(length_R) - length_R
    tokens = {name: _concatenate(rows, name, dtype) for name, dtype in _TOKEN_COLUMNS.items()}
    row_T = np.repeat(np.arange(len(rows), dtype=np.int32), length_R)
    total = int(length_R.sum())
    rollout_T = np.repeat(row_rollout_R, length_R)
    owners = [rollouts[n][1] for n in row_rollout_R]
    batch = Batch(
        **tokens,
        position_T=(np.arange(total) - np.repeat(start_R, length_R)).astype(np.int32),
        row_T=row_T,
        row_start_R=start_R,
        row_length_R=length_R,
        row_rollout_R=row_rollout_R,
        length_N=np.bincount(rollout_T[tokens["train_T"] > 0], minlength=len(rollouts)).astype(np.int64),
        **_rollout_table(groups, rollouts),
        **_turn_table([rollout for _, rollout in rollouts]),
        step=step,
        top=_top_column(rows, owners, attachments) if "top" in needs else None,
        routes_T=_routes_column(rows, owners, attachments) if "routes" in needs else None,
    )
    refuse_first(batch)
    return batch


def _concatenate(rows: list[Row], name: str, dtype: Any) -> np.ndarray:
    parts = [getattr(row, name) for row in rows]
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _top_column(
    rows: Sequence[Row], rollouts: Sequence[Rollout], attachments: HeavyColumns | None
) -> TopColumn:
    """The stored entries of trained tokens; `rollouts`: each row's. The files are mapped, then copied."""
    count, ids, logprobs = [], [], []
    for row, rollout in zip(rows, rollouts, strict=True):
        count_T, start = np.zeros(len(row), np.int64), 0
        for index in rollout.trace.path(row.leaf):
            node = rollout.trace.nodes[index]
            stop = start + node.length
            stored = {a.kind: a for a in node.attachments}
            if "top.offset" in stored and attachments is not None and (row.train_T[start:stop] > 0).any():
                offset, own, logprob = (
                    attachments.open(stored[f"top.{k}"]) for k in ("offset", "id", "logprob")
                )
                own_T, fits = np.diff(offset.astype(np.int64)), len(offset) == node.length + 1
                if not fits or own_T.min() < 0 or not own_T.sum() == len(own) == len(logprob):
                    raise AlgorithmError(
                        f"rollout {rollout.id or rollout.attempt!r}: the stored top entries of node "
                        f"{index} do not fit its {node.length} tokens; take its issue out with fail()"
                    )
                if not np.isfinite(logprob).all():
                    raise AlgorithmError(
                        f"rollout {rollout.id or rollout.attempt!r}: stored top log-probabilities of node "
                        f"{index} are not finite numbers; take its issue out with fail()"
                    )
                count_T[start:stop] = own_T
                ids.append(own.astype(np.int32))
                logprobs.append(logprob.astype(np.float32))
            start = stop
        count.append(count_T)
    if not ids and any((row.train_T > 0).any() for row in rows):
        raise AlgorithmError(
            "the algorithm reads the sampler's top log-probabilities, but no rollout of the batch has any: "
            "set engine.top (e.g. 32); rollouts that were sampled without it cannot be used"
        )
    total = np.concatenate([np.zeros(1, np.int64), *count])
    return TopColumn(np.cumsum(total), _joined(ids, np.int32), _joined(logprobs, np.float32))


def _routes_column(
    rows: Sequence[Row], rollouts: Sequence[Rollout], attachments: HeavyColumns | None
) -> np.ndarray:
    """int32 (_T, layers, _K): recorded experts, -1 elsewhere. Raises AlgorithmError on damaged routes."""
    parts: list[list[np.ndarray | int]] = []
    shape: tuple[int, ...] = ()
    for row, rollout in zip(rows, rollouts, strict=True):
        parts.append([])
        for index in rollout.trace.path(row.leaf):
            node = rollout.trace.nodes[index]
            stored = next((a for a in node.attachments if a.kind == "routes"), None)
            if stored is None or attachments is None:
                parts[-1].append(node.length)
                continue
            routes = _checked_routes(attachments.open(stored), node.length, shape, rollout, index)
            shape = routes.shape[1:]
            parts[-1].append(routes)
    if not shape:
        raise AlgorithmError(
            "trainer.replay_routes: no rollout of the batch has recorded routes; set engine.routes: true"
        )
    flat = [
        p if isinstance(p, np.ndarray) else np.full((p, *shape), -1, np.int32) for one in parts for p in one
    ]
    return np.concatenate(flat)


def _checked_routes(
    stored: np.ndarray, length: int, shape: tuple[int, ...], rollout: Rollout, node: int
) -> np.ndarray:
    where = f"rollout {rollout.id or rollout.attempt!r}, node {node}: its routes"
    if stored.dtype not in (np.uint8, np.uint16) or stored.ndim != 3:
        raise AlgorithmError(f"{where} are {stored.dtype} {stored.shape}, not small numbers (_T, layers, _K)")
    if len(stored) != length or (shape and stored.shape[1:] != shape):
        raise AlgorithmError(f"{where} have shape {stored.shape}; its tokens are {length}, others' {shape}")
    none = np.iinfo(stored.dtype).max
    routes = np.where(stored == none, -1, stored.astype(np.int32))
    ordered = np.sort(routes, -1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any() or ((routes < 0).any((-1, -2)) != (routes < 0).all((-1, -2))).any():
        raise AlgorithmError(f"{where} name an expert twice for a token, or only some of its experts")
    return routes


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _rollout_table(groups: Sequence[Group], rollouts: list[tuple[int, Rollout]]) -> dict[str, Any]:
    played = [rollout for _, rollout in rollouts]
    players = tuple(dict.fromkeys(r.player for r in played))
    sources = tuple(dict.fromkeys(r.source for r in played))
    reward_N = np.asarray([np.nan if r.score is None else r.score for r in played], np.float64)
    scored = [r.reward.parts if isinstance(r.reward, Scored) else {} for r in played]
    return {
        "reward_N": reward_N,
        "raw_reward_N": reward_N,
        "parts": _named(scored),
        "counters": _named([r.counters for r in played]),
        "group_N": np.asarray([g for g, _ in rollouts], np.int64),
        "player_N": np.asarray([players.index(r.player) for r in played], np.int64),
        "attempt_N": np.asarray([r.attempt for r in played], np.int64),
        "termination_N": np.asarray([TERMINATIONS.index(r.termination) for r in played], np.int8),
        "source_N": np.asarray([sources.index(r.source) for r in played], np.int64),
        "role_N": np.asarray([ROLES.index(r.role) for r in played], np.int8),
        "preference_N": np.asarray([PREFERENCES[r.preference] for r in played], np.int8),
        "kind_G": np.asarray([KINDS.index(group.kind) for group in groups], np.int8),
        "group_ids": tuple(group.id for group in groups),
        "issues": tuple(group.issue for group in groups),
        "rollout_ids": tuple(r.id or f"{groups[g].id}#{r.attempt}" for g, r in rollouts),
        "players": players,
        "sources": sources,
        "causes": tuple(r.reward.cause if isinstance(r.reward, Unscored) else "" for r in played),
    }


def _named(rows: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Numbers by name (_N,) float64, NaN where a row has none of that name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.asarray([row.get(name, np.nan) for row in rows], np.float64) for name in names}


def _turn_table(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    turns = [
        (n, node.reward, node.state)
        for n, rollout in enumerate(rollouts)
        for node in rollout.trace.nodes
        if node.origin is Origin.SAMPLED
    ]
    states: dict[str | None, int] = {None: -1}
    for _, _, state in turns:
        states.setdefault(state, len(states) - 1)
    return {
        "turn_rollout_W": np.asarray([n for n, _, _ in turns], np.int64),
        "turn_reward_W": np.asarray([np.nan if r is None else r for _, r, _ in turns], np.float64),
        "turn_state_W": np.asarray([states[state] for _, _, state in turns], np.int64),
        "states": tuple(state for state in states if state is not None),
    }


def _refuse(group: Group, rollout: Rollout) -> None:
    where = f"group {group.id!r}, rollout {rollout.id or rollout.attempt!r}"
    if isinstance(rollout.reward, Pending):
        raise AlgorithmError(f"{where}: its reward is still pending; only ready groups are trained")
    if rollout.role not in ROLES:
        raise AlgorithmError(
            f"{where}: role {rollout.role!r} is never trained; such rollouts stay out of batches"
        )


def refuse_first(batch: Batch) -> None:
    """The first token of a row is predicted from nothing. Raises AlgorithmError where it would be trained."""
    bad = np.flatnonzero((batch.position_T == 0) & (batch.train_T > 0))
    if len(bad):
        n = int(batch.rollout_T[bad[0]])
        raise AlgorithmError(
            f"group {batch.group_ids[batch.group_N[n]]!r}, rollout {batch.rollout_ids[n]!r}: the first token "
            "of a row is to be trained, but nothing predicts it; begin the row with a token that is not "
            "trained (a system or user message, or the model's begin-of-text token)"
        )


def split(prepared: PreparedBatch, n: int) -> list[PreparedBatch]:
    """`n` disjoint updates of whole groups, in order and as even as they go; each has its own denominators.

    Credit and masks are those of the whole batch, annotations made on it are carried over. Fewer groups
    than `n` give one update per group. An update in which nothing would change is `empty`: the trainer
    skips it.
    """
    if n < 1:
        raise AlgorithmError(f"cannot split a batch into {n} updates")
    batch = prepared.batch
    if n == 1 or batch.groups <= 1:
        return [prepared]
    edges = [int(part[0]) for part in np.array_split(np.arange(batch.groups), min(n, batch.groups))]
    edges.append(batch.groups)
    group_T = batch.group_N[batch.rollout_T]
    out: list[PreparedBatch] = []
    for update, (start, stop) in enumerate(pairwise(edges)):
        t = slice(*np.searchsorted(group_T, [start, stop]).tolist())
        part = assemble(
            batch.slice_groups(start, stop),
            prepared.algorithm,
            prepared.mask_T[t],
            {name: column[t] for name, column in prepared.columns.items()},
            {},
            update=update,
            updates=len(edges) - 1,
            scales=prepared.scales,
        )
        part.age_T = None if prepared.age_T is None else prepared.age_T[t]
        out.append(part)
    return out
