"""Which examples share a packed row: best-fit decreasing in bounded windows, as a pure function of lengths.

An example is never cut. A window of examples is sorted by length, longest first, and each goes where the
least room is left over; the emptiest rows stay open for one more window. The work is done by runs of equal
length: the row that fits the first of a run best also fits the next best for as long as there is room, so a
run costs one step per row and not one per example.

Attention costs the square of a length, so a row with a very long example takes longer than one of many short
ones, and every rank waits for the slowest. With `long_from` set, rows with longer examples get fewer
companions: no row costs more than a full row of examples of that length, or than one example alone. (Rows of
shorter examples never reach that, so only long ones feel it.)

A plan says which examples make up a row and in what order; where one ends and the next begins follows from
their lengths, and so do position ids and the masks that keep them apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KEEP_ROOM = 0.01
"""Share of a row that must be free for it to stay open for the next window."""
KEEP_ROWS = 0.05
"""Rows that may stay open, as a share of the window's examples: bounds memory."""


class PackingError(ValueError):
    """Lengths or options that cannot be packed; says which and what to do."""


@dataclass(frozen=True, slots=True)
class PackingOptions:
    """`capacity`: tokens of a row. `window`: examples sorted together, the most that are held at a time.
    `long_from`: length (tokens) from which an example has fewer companions; None leaves the cost unbounded.
    `quadratic_at`: the length at which attention costs as much as everything else, about 12 times the model's
    hidden size. `seed` decides which of equally long examples go where, and the order of a window's rows.
    """

    capacity: int
    window: int = 10_000
    long_from: int | None = 32_768
    quadratic_at: float = 49_152.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("capacity", "window", "long_from", "quadratic_at"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise PackingError(f"packing: {name} is {value!r}; it must be at least 1")
        if self.seed < 0:
            raise PackingError(f"packing: seed is {self.seed}; it must be 0 or more")

    def cost(self, length_N: np.ndarray) -> np.ndarray:
        """Compute of each example in tokens of the linear part: L + L^2 / quadratic_at. float64 (_N,)."""
        length_N = length_N.astype(np.float64)
        return length_N + length_N**2 / self.quadratic_at

    @property
    def cost_bound(self) -> float:
        """What a row of more than one example may cost."""
        if self.long_from is None:
            return math.inf
        return self.capacity * (1 + self.long_from / self.quadratic_at)

    def fewest_rows(self, length_N: np.ndarray) -> int:
        """A lower bound on the rows of any packing of these lengths."""
        cost_N, limit = self.cost(length_N), self.cost_bound
        alone_N = cost_N > limit
        bounds = [
            int(alone_N.sum()) - int(-length_N[~alone_N].sum() // self.capacity),
            int((2 * length_N > self.capacity).sum()),  # no two of these fit together
        ]
        if math.isfinite(limit):
            bounds.append(math.ceil(np.minimum(cost_N, limit).sum() / limit * (1 - 1e-12)))
        return max(bounds)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows (_B) of examples (_N). Row b holds the examples `index_N[offset_B[b] : offset_B[b + 1]]` in that
    order; `offset_B` has one entry more than there are rows. `tokens_B` and `cost_B` are each row's sums.
    `bound`: no packing of these lengths under these options has fewer rows.
    """

    index_N: np.ndarray
    offset_B: np.ndarray
    tokens_B: np.ndarray
    cost_B: np.ndarray
    capacity: int
    bound: int

    def __len__(self) -> int:
        return len(self.tokens_B)

    def row(self, b: int) -> np.ndarray:
        """Indices of the examples of row b."""
        return self.index_N[self.offset_B[b] : self.offset_B[b + 1]]

    @property
    def fill(self) -> float:
        """Share of all rows' capacity that holds tokens."""
        return float(self.tokens_B.sum()) / (len(self) * self.capacity) if len(self) else 1.0

    def spread(self) -> dict[str, float]:
        """Of the cost per row: mean, `max_over_mean`, `p95_over_p50`, and `cv`, deviation over mean."""
        if not len(self):
            return {"mean": 0.0, "max_over_mean": 1.0, "p95_over_p50": 1.0, "cv": 0.0}
        mean = float(self.cost_B.mean())
        p50, p95 = np.quantile(self.cost_B, [0.5, 0.95])
        return {
            "mean": mean,
            "max_over_mean": float(self.cost_B.max()) / mean,
            "p95_over_p50": float(p95 / p50),
            "cv": float(self.cost_B.std()) / mean,
        }


class Rows(NamedTuple):
    """Complete rows (_B): the examples of the first, then of the second, ...; and how many each has."""

    index_N: np.ndarray
    count_B: np.ndarray


class _Table:
    """Open rows by the length of the longest example that each can still take: its room."""

    def __init__(self, options: PackingOptions) -> None:
        self.options = options
        self.rows = 0  # opened so far
        self.old = 0  # rows below this number were opened before the window at hand
        self.by_room: dict[int, list[int]] = {}
        self.tracked = False  # from the first long example on: what each row has left of both
        self.tokens: dict[int, int] = {}
        self.cost: dict[int, float] = {}

    def place(self, length_N: np.ndarray) -> np.ndarray:
        """Best fit of lengths in descending order: the row of each. int64 (_N,)."""
        self.old = self.rows
        start_K = np.flatnonzero(np.diff(length_N, prepend=-1))  # runs (_K) of equal length
        count_K = np.diff(start_K, append=len(length_N))
        useful = max(1, int(KEEP_ROOM * self.options.capacity))
        if len(length_N):
            useful = min(useful, int(length_N[-1]))  # a row with less room than this is done
            self._track(int(length_N[0]))
        by_room, rooms = self.by_room, sorted(self.by_room)
        row_of: list[int] = []  # per step: the row, and how many examples of the run it takes
        taken: list[int] = []
        for length, count in zip(length_N[start_K].tolist(), count_K.tolist(), strict=True):
            while count:
                at = bisect_left(rooms, length)
                if at < len(rooms):
                    room = rooms[at]
                    rows = by_room[room]
                    row = rows.pop()
                    if not rows:
                        del by_room[room], rooms[at]
                else:
                    room, row = self.options.capacity, self.rows
                    self.rows += 1
                if self.tracked:
                    take, room = self._take(row, length, count)
                else:
                    take = min(count, room // length)
                    room -= take * length
                count -= take
                row_of.append(row)
                taken.append(take)
                if room >= useful:
                    if room in by_room:
                        by_room[room].append(row)
                    else:
                        by_room[room] = [row]
                        insort(rooms, room)
        return np.repeat(np.asarray(row_of, np.int64), np.asarray(taken, np.int64))

    def _track(self, longest: int) -> None:
        """Start keeping costs once an example could exceed the bound; what rows hold by then counts as if it
        were of the length at which examples begin to be long."""
        options = self.options
        if self.tracked or options.long_from is None or longest <= options.long_from:
            return
        self.tracked = True
        for room, rows in self.by_room.items():
            for row in rows:
                self.tokens[row] = room
                self.cost[row] = options.cost_bound * room / options.capacity

    def _take(self, row: int, length: int, count: int) -> tuple[int, int]:
        """(how many of `count` examples go into this row, which takes one at least; the room left)."""
        half = self.options.quadratic_at
        tokens = self.tokens.get(row, self.options.capacity)
        left = self.cost.get(row, self.options.cost_bound)
        cost = length + length * length / half
        take = max(1, min(count, tokens // length, int(left / cost)))
        tokens, left = tokens - take * length, left - take * cost
        self.tokens[row], self.cost[row] = tokens, left
        if left >= tokens + tokens * tokens / half:
            return take, tokens
        if left <= 0:
            return take, 0
        # The longest example that costs no more than what is left: x + x^2 / half = left.
        return take, int(half / 2 * (math.sqrt(1 + 4 * left / half) - 1))

    def keep(self, most: int) -> np.ndarray:
        """Forget all rows but those opened in this window with the most room, at most `most`: these."""
        useful = max(1, int(KEEP_ROOM * self.options.capacity))
        rows = [(-r, row) for r, rows in self.by_room.items() if r >= useful for row in rows]
        kept = sorted(pair for pair in rows if pair[1] >= self.old)[: max(1, most)]
        self.by_room = {}
        for room, row in kept:
            self.by_room.setdefault(-room, []).append(row)
        open_rows = [row for _, row in kept]
        self.tokens = {row: self.tokens[row] for row in open_rows if row in self.tokens}
        self.cost = {row: self.cost[row] for row in open_rows if row in self.cost}
        return np.asarray(open_rows, np.int64)


class Packer:
    """Packs a stream of lengths; examples are numbered from 0 in the order given. The same lengths and
    options give the same rows in the same order, however they are fed. Beside what `add` is given it holds at
    most a window of examples that wait and the examples of the rows that stay open."""

    def __init__(self, options: PackingOptions) -> None:
        self.options = options
        self._waiting: list[np.ndarray] = []  # lengths that do not fill a window yet
        self._count = 0  # of them
        self._first = 0  # number of the first example that waits
        self._windows = 0
        self._table = _Table(options)
        self._index_P = np.zeros(0, np.int64)  # examples placed in rows that are open, and the row of each
        self._row_P = np.zeros(0, np.int64)

    def add(self, lengths: Sequence[int] | np.ndarray) -> list[Rows]:
        """The rows that are complete once these lengths (tokens) have been seen. Raises PackingError for a
        length that is not a whole number from 1 to the capacity: nothing is cut or left out here."""
        length_N = np.asarray(lengths)
        self._check(length_N)
        self._waiting.append(length_N.astype(np.int64))
        self._count += len(length_N)
        window = self.options.window
        if self._count < window:
            return []
        length_N = np.concatenate(self._waiting)
        end = self._count - self._count % window
        self._waiting, self._count = [length_N[end:]], self._count - end
        return [self._pack(length_N[i : i + window], last=False) for i in range(0, end, window)]

    def finish(self) -> Rows:
        """All rows that are left."""
        length_N = np.concatenate([*self._waiting, np.zeros(0, np.int64)])
        self._waiting, self._count = [], 0
        return self._pack(length_N, last=True)

    def _check(self, length_N: np.ndarray) -> None:
        if length_N.ndim != 1 or (len(length_N) and length_N.dtype.kind not in "iu"):
            raise PackingError(f"lengths must be one list of whole numbers, not {length_N.dtype}")
        capacity = self.options.capacity
        bad = np.flatnonzero((length_N < 1) | (length_N > capacity))
        if len(bad):
            at = self._first + self._count + int(bad[0])
            raise PackingError(
                f"{len(bad)} example(s) do not fit a row, the first is number {at} with {length_N[bad[0]]} "
                f"tokens: a length must be from 1 to the capacity, {capacity}. Raise the capacity, or drop "
                "and count them before"
            )

    def _pack(self, length_N: np.ndarray, *, last: bool) -> Rows:
        """Place one window, close the rows that are full, old, or too many; with `last` all of them."""
        options = self.options
        rng = np.random.default_rng([options.seed, self._windows])
        order_N = rng.permutation(len(length_N))
        order_N = order_N[np.argsort(-length_N[order_N], kind="stable")]
        row_N = self._table.place(length_N[order_N])
        index_P = np.concatenate([self._index_P, self._first + order_N])
        row_P = np.concatenate([self._row_P, row_N])
        kept = np.zeros(0, np.int64) if last else self._table.keep(int(KEEP_ROWS * options.window))
        stays_P = np.isin(row_P, kept)
        self._index_P, self._row_P = index_P[stays_P], row_P[stays_P]
        self._first += len(length_N)
        self._windows += 1
        return _rows(index_P[~stays_P], row_P[~stays_P], rng)


def _rows(index_P: np.ndarray, row_P: np.ndarray, rng: np.random.Generator) -> Rows:
    """Examples by row, the rows shuffled, a row's examples in the order in which they were placed."""
    _, row_P = np.unique(row_P, return_inverse=True)
    count_B = np.bincount(row_P)
    place_B = rng.permutation(len(count_B))
    place_P = place_B[row_P]
    return Rows(index_P[np.argsort(place_P, kind="stable")], np.bincount(place_P, minlength=len(count_B)))


def pack(lengths: Sequence[int] | np.ndarray, options: PackingOptions) -> Plan:
    """The whole plan: a pure function of the lengths (tokens, in stream order) and the options, so that a
    run that resumes computes it again. Raises PackingError (see `Packer.add`)."""
    packer = Packer(options)
    parts = [*packer.add(lengths), packer.finish()]
    length_N = np.asarray(lengths).astype(np.int64)
    index_N = np.concatenate([part.index_N for part in parts])
    offset_B = np.concatenate([[0], np.cumsum(np.concatenate([part.count_B for part in parts]))])
    return Plan(
        index_N,
        offset_B.astype(np.int64),
        _sums(length_N[index_N], offset_B),
        _sums(options.cost(length_N)[index_N], offset_B),
        options.capacity,
        options.fewest_rows(length_N),
    )


def _sums(value_N: np.ndarray, offset_B: np.ndarray) -> np.ndarray:
    """Sum over each row (none is empty)."""
    return np.add.reduceat(value_N, offset_B[:-1]) if len(offset_B) > 1 else value_N[:0]


def epoch_order(plan: Plan, *, seed: int, epoch: int, together: int = 1) -> np.ndarray:
    """The order in which an epoch takes the rows: a permutation that only the plan and these numbers decide,
    so that a run which stopped after n rows goes on with the next. int64 (_B,).

    `together`: rows of one step. Above 1 each step takes rows of similar cost, so that ranks wait less for
    each other, and steps are shuffled; steps then differ in how long their examples are.
    """
    if together < 1:
        raise PackingError(f"together is {together}; it must be at least 1")
    rng = np.random.default_rng([seed, epoch])
    order_B = rng.permutation(len(plan))
    if together == 1:
        return order_B
    order_B = order_B[np.argsort(plan.cost_B[order_B], kind="stable")]
    step_B = np.arange(len(plan)) // together
    place_S = rng.permutation(len(plan) // together)  # an incomplete step stays the last
    place_S = np.append(place_S, len(place_S))
    return order_B[np.argsort(place_S[step_B], kind="stable")]
