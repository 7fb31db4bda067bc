"""Which packs a step takes: a pure function of the data, the seed and the step.

So nothing about packs is written down while a run goes on: the plan is the record. A run that was cut goes on
with the row after its last checkpoint, and the checkpoint says which row that must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trivet.data.shards import Pack, PackedData, ShardError
from trivet.recipe import Recipe, Stage
from trivet.recipe.supervised import PackedNumbers


class Place(NamedTuple):
    """Row `row` (0, 1, ...) of epoch `epoch` (1, 2, ...) is pack number `pack`."""

    epoch: int
    row: int
    pack: int


class PackOrder:
    """The packs of every step, epoch after epoch, each epoch in an order of its own.

    `tokens_P`: tokens of each pack. A step takes `packs` of them, or as many (one at least) as hold together
    no more than `tokens`; it may span epochs, and the last one is as short as what is left. `epochs` None
    never ends.
    """

    def __init__(
        self, tokens_P: np.ndarray, *, packs: int | None, tokens: int | None, epochs: int | None, seed: int
    ) -> None:
        if not len(tokens_P):
            raise ShardError("there are no packs to train on: the build kept no example; look at its report")
        self.tokens_P, self.packs, self.tokens = tokens_P, packs, tokens
        self.epochs, self.seed = epochs, seed
        self._ends = [0]  # with `tokens`: where each step ends, in packs from the start
        self._open = 0  # tokens of the step that the next epoch goes on with
        self._cut_epochs = 0
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.tokens_P))

    @property
    def total(self) -> int | None:
        """Packs of all epochs."""
        return None if self.epochs is None else self.epochs * len(self.tokens_P)

    @property
    def steps(self) -> int | None:
        """Steps until the last epoch is used up; None where there is no last one."""
        if self.total is None or self.epochs is None:
            return None
        if self.packs is not None:
            return -(-self.total // self.packs)
        while self._cut_epochs < self.epochs:
            self._cut()
        return len(self._ends) - 1

    def taken(self, step: int) -> list[Place]:
        """What step 1, 2, ... trains on; nothing after the last one."""
        return [self.place(at) for at in range(self.end(step - 1), self.end(step))]

    def end(self, step: int) -> int:
        """Packs that steps 1 .. `step` take together."""
        if self.packs is not None:
            end = step * self.packs
            return end if self.total is None else min(end, self.total)
        while len(self._ends) <= step and (self.epochs is None or self._cut_epochs < self.epochs):
            self._cut()
        return self._ends[min(step, len(self._ends) - 1)]

    def place(self, at: int) -> Place:
        """The pack at position `at`, counted from the start."""
        epoch, row = divmod(at, len(self.tokens_P))
        return Place(epoch + 1, row, int(self._order(epoch + 1)[row]))

    def cursor(self, step: int) -> dict[str, int] | None:
        """What comes after `step`; None where nothing does."""
        at = self.end(step)
        return None if at == self.total else self.place(at)._asdict()

    def _cut(self) -> None:
        """Divide one more epoch into steps of at most `tokens` tokens."""
        assert self.tokens is not None
        base = self._cut_epochs * len(self.tokens_P)
        self._cut_epochs += 1
        sum_P1 = np.concatenate(
            [[0], np.cumsum(self.tokens_P[self._order(self._cut_epochs)], dtype=np.int64)]
        )
        last, at, used = len(self.tokens_P), 0, self._open
        while True:
            stop = int(np.searchsorted(sum_P1, sum_P1[at] + self.tokens - used, side="right")) - 1
            if stop >= last:
                break
            if stop <= at and not used:
                stop = at + 1  # larger than a step by itself
            self._ends.append(base + stop)
            at, used = stop, 0
        self._open = used + int(sum_P1[last] - sum_P1[at])
        if self._cut_epochs == self.epochs and self._open:
            self._ends.append(base + last)


class PackReader:
    """Reads a step's packs, and the next step's while this one is trained."""

    def __init__(self, data: PackedData, order: PackOrder) -> None:
        self.data, self.order = data, order
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="packs")
        self._ahead: dict[int, Future[list[Pack]]] = {}

    def read(self, step: int) -> list[Pack]:
        """The packs of `step`. Raises ShardError."""
        future = self._ahead.pop(step, None) or self._pool.submit(self._load, step)
        packs = future.result()  # the step's own deadline bounds it
        self._ahead = {step + 1: self._pool.submit(self._load, step + 1)}
        return packs

    def _load(self, step: int) -> list[Pack]:
        return load_packs(self.data, [place.pack for place in self.order.taken(step)])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def load_packs(data: PackedData, indices: Sequence[int]) -> list[Pack]:
    """Packs by number. Raises ShardError also where a file is not what its name says."""
    import pyarrow as pa

    try:
        return [data[i] for i in indices]
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"{data.folder}: a file of packs cannot be read ({error}); build again") from error


class PackLengths(NamedTuple):
    """`tokens_P` int64: tokens of each pack; documents of all packs and the longest one's tokens."""

    tokens_P: np.ndarray
    documents: int
    longest: int


def pack_lengths(data: PackedData) -> PackLengths:
    """From the shards' lengths alone, without their tokens. Raises ShardError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts, documents, longest = [np.zeros(0, np.int64)], 0, 0
    for entry in data.files:
        path = data.folder / entry["name"]
        try:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    column = file.read_row_group(group, columns=["lengths"]).column("lengths")
                    for chunk in column.chunks:
                        lengths_D = chunk.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
                        offset_P1 = chunk.offsets.to_numpy() - chunk.offsets[0].as_py()
                        sum_D1 = np.concatenate([[0], np.cumsum(lengths_D)])
                        parts.append(sum_D1[offset_P1[1:]] - sum_D1[offset_P1[:-1]])
                        documents += len(lengths_D)
                        longest = max(longest, int(lengths_D.max(initial=0)))
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ShardError(f"{path} cannot be read as packs ({error}); build again") from error
    tokens_P = np.concatenate(parts)
    if len(tokens_P) != len(data) or not (tokens_P > 0).all():
        raise ShardError(f"{data.folder}: its files do not hold the packs its manifest names; build again")
    return PackLengths(tokens_P, documents, longest)


def pack_order(stage: Stage, seed: int, tokens_P: np.ndarray) -> PackOrder:
    """The order of a stage's packs. Raises ShardError where there are none."""
    batch = stage.batch
    return PackOrder(tokens_P, packs=batch.packs, tokens=batch.tokens, epochs=stage.epochs, seed=seed)


def packed_numbers(recipe: Recipe) -> tuple[dict[str, PackedNumbers], list[str]]:
    """What the packed folders of a recipe's stages hold, by stage, and what stands against reading them."""
    found: dict[str, PackedNumbers] = {}
    problems: list[str] = []
    for stage in recipe.stages:
        if stage.packed is not None:
            try:
                found[stage.name] = _numbers(stage, recipe.seed)
            except ShardError as error:
                problems.append(f"stages.{stage.name}.packed: {error}")
        if stage.held_out is not None and stage.held_out.packed is not None:
            try:
                PackedData(stage.held_out.packed)
            except ShardError as error:
                problems.append(f"stages.{stage.name}.held_out.packed: {error}")
    return found, problems


def _numbers(stage: Stage, seed: int) -> PackedNumbers:
    assert stage.packed is not None
    data = PackedData(stage.packed)
    lengths = pack_lengths(data)
    once = (stage.batch.packs is None) != (stage.batch.tokens is None)  # else a problem of its own
    steps = pack_order(stage, seed, lengths.tokens_P).steps if once else None
    return PackedNumbers(
        packs=len(data),
        documents=lengths.documents,
        tokens=int(lengths.tokens_P.sum()),
        trained=data.trained,
        capacity=data.capacity,
        longest=lengths.longest,
        steps=steps,
    )
