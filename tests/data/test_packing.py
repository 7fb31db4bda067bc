"""Packing: each example once, no row too full, near the bound, the same however it is fed."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.packing import Packer, PackingError, PackingOptions, Plan, Rows, epoch_order, pack

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=120)


def options(**changes: object) -> PackingOptions:
    return PackingOptions(**{"capacity": CAPACITY, "window": 16, "long_from": None, **changes})  # type: ignore


def rows_of(plan: Plan) -> list[list[int]]:
    return [plan.row(b).tolist() for b in range(len(plan))]


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of each row, as defined: longest first, into the row with the least room that suffices."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else capacity) - length)
    return sorted(capacity - room for room in rooms)


def test_by_hand() -> None:
    # 10: [6, 4], [5, 5], [3, 3, 3]; sixes first, fours where six left room, threes last.
    plan = pack([5, 3, 6, 3, 4, 3, 5], PackingOptions(10, long_from=None))
    assert sorted(sorted(row) for row in rows_of(plan)) == [[0, 6], [1, 3, 5], [2, 4]]
    assert sorted(plan.tokens_B) == [9, 10, 10]
    assert plan.fill == pytest.approx(29 / 30)
    assert plan.bound == 3


@given(LENGTHS, st.integers(1, 40), st.integers(0, 3), st.sampled_from([None, 1, 8, 32]))
def test_each_once_and_no_row_above_the_capacity(
    lengths: list[int], window: int, seed: int, long_from: int | None
) -> None:
    given = options(window=window, seed=seed, long_from=long_from, quadratic_at=20.0)
    plan = pack(lengths, given)
    assert sorted(plan.index_N) == list(range(len(lengths)))
    assert plan.offset_B[0] == 0 and plan.offset_B[-1] == len(lengths)
    tokens = [sum(lengths[i] for i in row) for row in rows_of(plan)]
    assert plan.tokens_B.tolist() == tokens
    assert all(0 < t <= CAPACITY for t in tokens)
    assert len(plan) >= plan.bound
    costs = [sum(lengths[i] + lengths[i] ** 2 / 20 for i in row) for row in rows_of(plan)]
    assert plan.cost_B == pytest.approx(costs)
    if long_from is not None:
        limit = CAPACITY * (1 + long_from / 20)
        assert all(
            c <= limit * (1 + 1e-9) or len(row) == 1 for c, row in zip(costs, rows_of(plan), strict=True)
        )


@given(LENGTHS)
def test_one_window_is_best_fit_decreasing(lengths: list[int]) -> None:
    plan = pack(lengths, options(window=1000))
    assert sorted(plan.tokens_B.tolist()) == plain_best_fit(lengths, CAPACITY)


@given(st.lists(st.integers(1, CAPACITY), max_size=80), st.integers(0, 2))
def test_a_bound_that_nothing_reaches_changes_nothing(lengths: list[int], seed: int) -> None:
    free, bounded = (pack(lengths, options(seed=seed, long_from=f)) for f in (None, CAPACITY))
    assert free.index_N.tolist() == bounded.index_N.tolist()
    assert free.offset_B.tolist() == bounded.offset_B.tolist()


@given(LENGTHS, st.data(), st.sampled_from([None, 16]))
def test_a_stream_equals_the_whole(lengths: list[int], data: st.DataObject, long_from: int | None) -> None:
    given = options(long_from=long_from, seed=7)
    packer, parts, at = Packer(given), [], 0
    while at < len(lengths):
        step = data.draw(st.integers(1, 40))
        parts += packer.add(lengths[at : at + step])
        at += step
    parts.append(packer.finish())
    plan = pack(lengths, given)
    assert np.concatenate([p.index_N for p in parts]).tolist() == plan.index_N.tolist()
    assert np.concatenate([p.count_B for p in parts]).tolist() == np.diff(plan.offset_B).tolist()


def test_a_stream_gives_rows_before_its_end_and_holds_little() -> None:
    rng = np.random.default_rng(0)
    packer, given, written = Packer(options(window=100)), 0, 0
    for _ in range(20):
        parts = packer.add(rng.integers(1, 20, 100))
        given += 100
        written += sum(len(part.index_N) for part in parts)
        assert given - written <= 100
    assert isinstance(packer.finish(), Rows)


def test_a_seed_decides_ties_and_order_and_nothing_else() -> None:
    lengths = np.random.default_rng(0).integers(1, CAPACITY + 1, 500)
    one, again, other = (pack(lengths, options(seed=s, window=100)) for s in (1, 1, 2))
    assert one.index_N.tolist() == again.index_N.tolist()
    assert one.offset_B.tolist() == again.offset_B.tolist()
    assert one.index_N.tolist() != other.index_N.tolist()
    assert abs(len(one) - len(other)) <= 2


@pytest.mark.parametrize("name", ["chat", "short", "wide", "uniform", "two_sizes"])
def test_near_the_bound_for_usual_lengths(name: str) -> None:
    rng = np.random.default_rng(1)
    capacity, n = 8192, 30_000
    lengths = {
        "chat": rng.lognormal(6.0, 0.9, n),
        "short": rng.lognormal(4.0, 0.5, n),
        "wide": rng.lognormal(6.5, 1.3, n),
        "uniform": rng.integers(1, capacity + 1, n),
        "two_sizes": rng.choice([300, 5000], n, p=[0.9, 0.1]),
    }[name]
    plan = pack(np.clip(lengths, 8, capacity).astype(np.int64), PackingOptions(capacity, long_from=None))
    assert len(plan) <= plan.bound * 1.01 + 1
    if name not in ("uniform", "two_sizes"):  # which no packing could fill
        assert plan.fill >= 0.995


def test_long_examples_get_fewer_companions() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(10, 200, 2000), rng.integers(600, 1000, 100)])
    rng.shuffle(lengths)
    free, bounded = (
        pack(lengths, PackingOptions(1024, long_from=f, quadratic_at=256.0)) for f in (None, 256)
    )
    limit = 1024 * 2  # a full row of examples of 256 tokens: each costs twice its length
    assert free.cost_B.max() > bounded.cost_B.max()
    for b in range(len(bounded)):
        row = bounded.row(b)
        assert bounded.cost_B[b] <= limit or len(row) == 1
    assert bounded.spread()["cv"] < free.spread()["cv"]
    assert bounded.fill < free.fill


def test_open_rows_take_from_the_next_window() -> None:
    # Two windows of one half-full row each: alone each would need a row.
    plan = pack([30, 34], options(window=1))
    assert len(plan) == 1
    # One further window only: the first row is closed by the time the third could fill it.
    assert len(pack([30, CAPACITY, 34], options(window=1))) == 3


@pytest.mark.parametrize("lengths", [[1, 0], [1, -3], [1, CAPACITY + 1], [1, 2.5], [[1, 2]], ["a"]])
def test_what_cannot_be_packed_is_refused(lengths: list) -> None:
    with pytest.raises(PackingError, match=r"number 1 with|whole numbers"):
        pack(lengths, options())


def test_a_refusal_names_the_example_of_the_stream() -> None:
    packer = Packer(options(window=4))
    packer.add([1, 2, 3, 4, 5])
    with pytest.raises(PackingError, match="number 6 with 99"):
        packer.add([1, 99])


@pytest.mark.parametrize(
    "changes",
    [{"capacity": 0}, {"window": 0}, {"long_from": 0}, {"quadratic_at": float("nan")}, {"seed": -1}],
)
def test_options_that_make_no_sense_are_refused(changes: dict) -> None:
    with pytest.raises(PackingError, match=next(iter(changes))):
        options(**changes)


def test_nothing_to_pack() -> None:
    plan = pack([], options())
    assert len(plan) == 0 and plan.fill == 1.0 and plan.bound == 0
    assert plan.spread()["max_over_mean"] == 1.0
    assert len(epoch_order(plan, seed=0, epoch=0, together=4)) == 0


@given(st.integers(0, 60), st.integers(0, 3), st.integers(1, 9))
def test_an_epoch_takes_each_row_once_in_its_own_order(n: int, epoch: int, together: int) -> None:
    plan = pack(np.random.default_rng(n).integers(33, CAPACITY + 1, n), options())
    order = epoch_order(plan, seed=5, epoch=epoch, together=together)
    assert sorted(order) == list(range(len(plan)))
    assert order.tolist() == epoch_order(plan, seed=5, epoch=epoch, together=together).tolist()
    if len(plan) > 20:
        assert order.tolist() != epoch_order(plan, seed=5, epoch=epoch + 1, together=together).tolist()


def test_steps_of_similar_rows() -> None:
    plan = pack(np.arange(33, 65).repeat(2), options())
    order = epoch_order(plan, seed=0, epoch=0, together=8)
    cost = plan.cost_B[order].reshape(-1, 8)
    assert ((cost.max(1) - cost.min(1)) <= 5).all()
    assert not (np.diff(cost.mean(1)) > 0).all()  # the steps themselves are shuffled
    with pytest.raises(PackingError):
        epoch_order(plan, seed=0, epoch=0, together=0)
