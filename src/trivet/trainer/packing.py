"""Which rows are computed together, and what they share: the grid of micro-batches, planned once, in numpy.

Rows are concatenated, never padded. Rows that begin with the same tokens at the same positions share the
computation of that beginning: a micro-batch is a forest of segments, a segment continues its parent, and a
row is a path from a root. What a segment computes depends on its ancestors only, so the loss and its gradient
are those of separate rows; a position that several rows train is simply read several times. A row is fed up
to the token before its last trained one: what follows predicts nothing that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MIN_SHARED = 4
"""Tokens a shared segment must have: a shorter one saves less than another piece of attention costs."""


class PlanError(ValueError):
    """The batch cannot be cut as the budget asks; says which unit, how large, and what to change."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass over packed tokens (_P), segments (_S) in an order in which parents come first.

    `token_P`: the batch's token each packed one stands for (the first row's, where rows share it).
    `start_S`, `length_S`: a segment's packed range; `parent_S`: -1 for a root. `row_R`: the batch's rows.
    Trained positions (_N), row after row: `target_N` the batch's token that is predicted, `source_N` the
    packed token whose hidden state predicts it.
    """

    token_P: np.ndarray
    start_S: np.ndarray
    length_S: np.ndarray
    parent_S: np.ndarray
    row_R: np.ndarray
    target_N: np.ndarray
    source_N: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.token_P)

    def paths(self) -> list[list[int]]:
        """For each segment its ancestors, root first, and itself."""
        out: list[list[int]] = []
        for segment, parent in enumerate(self.parent_S.tolist()):
            out.append([*out[parent], segment] if parent >= 0 else [segment])
        return out


@dataclass(frozen=True, slots=True)
class Plan:
    """All micro-batches of one update. `saved`: tokens that sharing spared the forward passes."""

    micro: tuple[MicroBatch, ...]
    forwarded: int
    saved: int
    trained: int


@dataclass(slots=True)
class _Node:
    """A run of tokens of the forest: `start` is where it lies in the batch's flat columns."""

    parent: int
    start: int
    length: int
    children: dict[bytes, int] = field(default_factory=dict)


class _Forest:
    """Rows by common beginnings. A node's children differ in their first MIN_SHARED tokens or are shorter."""

    def __init__(self, key_T: np.ndarray) -> None:
        self.key_T = key_T
        self.nodes: list[_Node] = []
        self.roots: dict[bytes, int] = {}

    def insert(self, start: int, stop: int) -> int:
        """The node at which the row of tokens start..stop-1 ends."""
        parent, level = -1, self.roots
        while True:
            name = self.key_T[start : start + MIN_SHARED].tobytes()
            child = level.get(name) if stop - start >= MIN_SHARED else None
            if child is None:
                self.nodes.append(_Node(parent, start, stop - start))
                if stop - start >= MIN_SHARED:
                    level[name] = len(self.nodes) - 1
                return len(self.nodes) - 1
            node = self.nodes[child]
            n = min(node.length, stop - start)
            differ = self.key_T[node.start : node.start + n] != self.key_T[start : start + n]
            same = int(differ.argmax()) if differ.any() else n
            if same < node.length:
                child = self._split(child, same, level, name)
            start += same
            if start == stop:
                return child
            parent, level = child, self.nodes[child].children

    def _split(self, index: int, at: int, level: dict[bytes, int], name: bytes) -> int:
        """A new node, returned, takes the first `at` tokens of `index`, which keeps the rest and its rows."""
        node = self.nodes[index]
        upper, new = _Node(node.parent, node.start, at), len(self.nodes)
        self.nodes.append(upper)
        level[name] = new
        node.parent, node.start, node.length = new, node.start + at, node.length - at
        if node.length >= MIN_SHARED:
            upper.children[self.key_T[node.start : node.start + MIN_SHARED].tobytes()] = index
        return new

    def path(self, node: int) -> list[int]:
        out: list[int] = []
        while node != -1:
            out.append(node)
            node = self.nodes[node].parent
        return out[::-1]


def plan(
    *,
    ids_T: np.ndarray,
    position_T: np.ndarray,
    row_start_R: np.ndarray,
    row_length_R: np.ndarray,
    unit_R: np.ndarray,
    wanted_T: np.ndarray,
    micro_tokens: int,
    share_prefix: bool = True,
    ahead: int = 1,
) -> Plan:
    """Cut a batch into micro-batches of at most `micro_tokens` packed tokens.

    `wanted_T` (bool): tokens whose log-probability is asked for; a row without one is left out. Rows with the
    same `unit_R` stay in one micro-batch. Rows keep the batch's order, so the grid depends on the batch only.
    `ahead`: 1 reads the state that predicts a wanted token, 0 the state after it. Raises PlanError for a unit
    that does not fit and for a wanted token that nothing predicts.
    """
    last_R = _last_wanted(row_start_R, row_length_R, wanted_T)
    rows = np.flatnonzero(last_R >= 0)
    first = row_start_R[rows]
    if ahead and (orphan := wanted_T[first]).any():
        row = int(rows[int(orphan.argmax())])
        raise PlanError(f"row {row}: its first token is to be trained, but no token comes before it")
    feed_R = np.where(last_R >= 0, last_R - row_start_R + 1 - ahead, 0)  # tokens fed; the last target is not
    offset_T = position_T - (np.arange(len(ids_T)) - np.repeat(row_start_R, row_length_R))
    key_T = (offset_T.astype(np.int64) << 32) | ids_T.astype(np.int64)
    forest = _Forest(key_T)
    paths: dict[int, list[int]] = {}
    if share_prefix:
        ends = [forest.insert(int(row_start_R[r]), int(row_start_R[r] + feed_R[r])) for r in rows]
        paths = {int(r): forest.path(end) for r, end in zip(rows, ends, strict=True)}
    else:
        for i, r in enumerate(rows.tolist()):
            forest.nodes.append(_Node(-1, int(row_start_R[r]), int(feed_R[r])))
            paths[r] = [i]
    groups = _group_rows(rows, unit_R, forest, paths, micro_tokens)
    micro = tuple(_build(g, forest, paths, row_start_R, feed_R, wanted_T, ahead) for g in groups)
    forwarded = sum(m.tokens for m in micro)
    trained = sum(len(m.target_N) for m in micro)
    return Plan(micro, forwarded, int(feed_R.sum()) - forwarded, trained)


def _last_wanted(row_start_R: np.ndarray, row_length_R: np.ndarray, wanted_T: np.ndarray) -> np.ndarray:
    """Index of each row's last wanted token, -1 for rows that want none. int64 (_R,)."""
    out = np.full(len(row_start_R), -1, np.int64)
    hits = np.flatnonzero(wanted_T)
    row = np.searchsorted(row_start_R, hits, side="right") - 1
    if len(hits) and (hits >= row_start_R[row] + row_length_R[row]).any():
        raise PlanError("a wanted token lies outside all rows: the batch's row columns do not fit its tokens")
    np.maximum.at(out, row, hits)
    return out


def _group_rows(
    rows: np.ndarray, unit_R: np.ndarray, forest: _Forest, paths: dict[int, list[int]], budget: int
) -> list[list[int]]:
    """Rows per micro-batch: units in order of first appearance, each added where it still fits."""
    units: dict[int, list[int]] = {}
    for row in rows.tolist():
        units.setdefault(int(unit_R[row]), []).append(row)
    out: list[list[int]] = []
    placed: set[int] = set()
    used = 0
    for unit, members in units.items():
        needed = {node for row in members for node in paths[row]}
        new = needed - placed
        cost = sum(forest.nodes[node].length for node in new)
        if not out or used + cost > budget:
            placed, used, new = set(), 0, needed
            cost = sum(forest.nodes[node].length for node in new)
            if cost > budget:
                raise PlanError(
                    f"unit {unit} ({len(members)} row(s), first row {members[0]}) needs {cost} tokens in one "
                    f"forward pass, the budget is {budget}: raise batch.micro_tokens to at least {cost}, or "
                    f"shorten the rows"
                )
            out.append([])
        placed |= new
        used += cost
        out[-1] += members
    return out


def _build(
    rows: Sequence[int],
    forest: _Forest,
    paths: dict[int, list[int]],
    row_start_R: np.ndarray,
    feed_R: np.ndarray,
    wanted_T: np.ndarray,
    ahead: int,
) -> MicroBatch:
    """Lay the segments of these rows out one after the other, a row's new ones right after each other."""
    index: dict[int, int] = {}
    start, size = [], 0
    for row in rows:
        for node in paths[row]:
            if node not in index:
                index[node] = len(start)
                start.append(size)
                size += forest.nodes[node].length
    nodes = [forest.nodes[n] for n in index]
    length_S = np.asarray([n.length for n in nodes], np.int64)
    start_S = np.asarray(start, np.int64)
    parent_S = np.asarray([index.get(n.parent, -1) for n in nodes], np.int64)
    token_P = _ranges(np.asarray([n.start for n in nodes], np.int64), length_S)
    # Each row's fed tokens, in order, as packed indices; then where its wanted tokens are predicted.
    walk = np.asarray([index[node] for row in rows for node in paths[row]], np.int64)
    packed_W = _ranges(start_S[walk], length_S[walk])
    rows_R = np.asarray(rows, np.int64)
    target_W = _ranges(row_start_R[rows_R] + ahead, feed_R[rows_R])  # what each fed token predicts
    keep = wanted_T[target_W]
    return MicroBatch(token_P, start_S, length_S, parent_S, rows_R, target_W[keep], packed_W[keep])


def _ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """start[0] .. start[0]+length[0]-1, start[1] .. : concatenated. int64."""
    total = int(length.sum())
    begin = np.cumsum(length) - length
    return np.repeat(start - begin, length) + np.arange(total)
