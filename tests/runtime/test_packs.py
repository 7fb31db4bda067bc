"""The order of packs: every epoch takes each once, and a step's packs follow from its number alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.packed_support import examples, packs_of, write_packs

from trivet.data.shards import PackedData, ShardError
from trivet.runtime.packs import PackOrder, PackReader, pack_lengths

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def greedy(order: PackOrder, tokens: int, epochs: int) -> list[list[int]]:
    """The steps by the rule as it reads: one pack after the other while they fit."""
    steps: list[list[int]] = []
    room = 0
    for epoch in range(1, epochs + 1):
        for pack in np.random.default_rng([order.seed, epoch]).permutation(len(order.tokens_P)).tolist():
            size = int(order.tokens_P[pack])
            if not steps or size > room:
                steps.append([])
                room = tokens
            steps[-1].append(pack)
            room -= size
    return steps


@given(COUNTS, st.integers(1, 70), st.integers(1, 3), st.integers(0, 5))
def test_steps_by_tokens(counts: list[int], tokens: int, epochs: int, seed: int) -> None:
    order = PackOrder(np.asarray(counts), packs=None, tokens=tokens, epochs=epochs, seed=seed)
    wanted = greedy(order, tokens, epochs)
    assert order.steps == len(wanted)
    assert [[p.pack for p in order.taken(s + 1)] for s in range(len(wanted))] == wanted
    assert order.taken(len(wanted) + 1) == []


@given(COUNTS, st.integers(1, 12), st.integers(1, 3), st.integers(0, 5))
def test_steps_by_packs(counts: list[int], packs: int, epochs: int, seed: int) -> None:
    order = PackOrder(np.asarray(counts), packs=packs, tokens=None, epochs=epochs, seed=seed)
    assert order.steps is not None
    steps = [order.taken(s + 1) for s in range(order.steps)]
    assert all(len(step) == packs for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= packs
    assert order.taken(order.steps + 1) == []
    for epoch in range(1, epochs + 1):
        mine = [place.pack for step in steps for place in step if place.epoch == epoch]
        assert sorted(mine) == list(range(len(counts)))


@given(COUNTS, st.integers(1, 70), st.integers(1, 9))
def test_a_step_is_the_same_whoever_asks(counts: list[int], tokens: int, step: int) -> None:
    """Also without an end, and by an order that has seen nothing before."""
    lengths = np.asarray(counts)
    used = PackOrder(lengths, packs=None, tokens=tokens, epochs=None, seed=3)
    before = [used.taken(s) for s in range(1, step + 1)]
    anew = PackOrder(lengths, packs=None, tokens=tokens, epochs=None, seed=3)
    assert anew.taken(step) == before[-1]
    assert anew.cursor(step) == used.taken(step + 1)[0]._asdict()
    assert used.steps is None


def test_epochs_differ_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        whole = PackOrder(np.ones(50), packs=50, tokens=None, epochs=None, seed=seed)
        return [place.pack for place in whole.taken(epoch)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


def test_the_cursor_ends_with_the_last_epoch() -> None:
    order = PackOrder(np.ones(5), packs=2, tokens=None, epochs=1, seed=0)
    assert order.cursor(2) == {"epoch": 1, "row": 4, "pack": order.place(4).pack}
    assert order.cursor(3) is None


def test_lengths_are_read_without_tokens(tmp_path: Path) -> None:
    packs = packs_of(examples(50))
    data = PackedData(write_packs(tmp_path, packs, files=3, group_rows=2))
    lengths = pack_lengths(data)
    assert lengths.tokens_P.tolist() == [len(pack.ids_T) for pack in packs]
    assert lengths.documents == 50
    assert lengths.longest == max(int(pack.lengths_D.max()) for pack in packs)


def test_the_reader_reads_each_step_and_the_next(tmp_path: Path) -> None:
    packs = packs_of(examples(50))
    data = PackedData(write_packs(tmp_path, packs))
    order = PackOrder(pack_lengths(data).tokens_P, packs=3, tokens=None, epochs=1, seed=1)
    reader = PackReader(data, order)
    for step in (1, 2, 3, 2):  # in order, and once out of it
        read = reader.read(step)
        wanted = [packs[place.pack] for place in order.taken(step)]
        assert [pack.examples for pack in read] == [pack.examples for pack in wanted]
        assert all(np.array_equal(a.ids_T, b.ids_T) for a, b in zip(read, wanted, strict=True))
    reader.close()


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    data = PackedData(write_packs(tmp_path, packs_of(examples(50))))
    path = tmp_path / data.files[0]["name"]
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ShardError, match="cannot be read"):
        pack_lengths(data)
    with pytest.raises(ShardError, match="cannot be read"):
        PackReader(data, PackOrder(np.ones(len(data)), packs=1, tokens=None, epochs=1, seed=0)).read(1)


def test_no_packs_are_refused() -> None:
    with pytest.raises(ShardError, match="no packs"):
        PackOrder(np.zeros(0), packs=1, tokens=None, epochs=1, seed=0)
