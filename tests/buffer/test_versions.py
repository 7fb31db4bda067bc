"""Version numbers and distances along the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.buffer import Ledger, LedgerError


def test_numbers_grow_over_restarts_and_stages(open_ledger: Callable[..., Ledger]) -> None:
    first = open_ledger()
    assert first.version() is None
    assert first.line() == []
    with pytest.raises(LedgerError, match="no version was handed out yet"):
        first.staleness(1)
    got = [first.new_version(0, stage="sft"), first.new_version(1, 1, "sum", "run-1", stage="sft")]
    first.close()
    second = open_ledger()
    got.append(second.new_version(0, 2, stage="rl"))
    assert got == [1, 2, 3]
    newest = second.version()
    assert newest is not None and (newest.version, newest.stage, newest.parent) == (3, "rl", 2)
    row = second.version(2)
    assert row is not None
    assert (row.step, row.stage, row.parent, row.checksum, row.incarnation) == (1, "sft", 1, "sum", "run-1")


def test_staleness_counts_publications_along_the_line(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    ledger.new_version(0)
    for step in (1, 2, 3):
        ledger.new_version(step, parent=step)
    back = ledger.new_version(2, parent=2)  # rolled back to step 1, trained step 2 anew
    assert ledger.line() == [5, 2, 1]
    assert ledger.line(4) == [4, 3, 2, 1]
    assert ledger.gaps([1, 2, 3, 4, 5]) == {1: 2, 2: 1, 3: None, 4: None, 5: 0}
    assert ledger.staleness(1, of=4) == 3
    assert ledger.staleness(back, of=4) is None
    with pytest.raises(LedgerError, match="version 9 was never handed out by this ledger; the latest is 5"):
        ledger.staleness(9)
    with pytest.raises(LedgerError, match="its parent 77 does not exist"):
        ledger.new_version(1, parent=77)
    assert ledger.new_version(3, parent=5) > 5


def test_a_replayed_step_sees_the_staleness_it_was_recorded_with(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    old = []
    for step in range(5):
        old.append(ledger.new_version(step, parent=old[-1] if old else None, stage="rl"))
        ledger.seal(old[-1], f"weights-{step}")
    before = ledger.gaps(old)
    parent = old[2]  # resumed from step 2; steps 3 and 4 come out bit-identical
    for step in (3, 4):
        parent = ledger.new_version(step, parent, f"weights-{step}", stage="rl")
    assert ledger.gaps(old) == before
    other = ledger.new_version(4, old[2], "different", stage="rl")
    assert ledger.gaps(old, of=other)[old[4]] is None


def test_a_seal_is_put_on_once(open_ledger: Callable[..., Ledger]) -> None:
    one, two = open_ledger("one"), open_ledger("two")
    version = one.new_version(0)
    two.seal(version, "abc")
    two.seal(version, "abc")
    with pytest.raises(LedgerError, match="version 1 has checksum 'abc' already; 'xyz' is other weights"):
        one.seal(version, "xyz")


def test_weights_published_again_are_one_publication(open_ledger: Callable[..., Ledger]) -> None:
    """A run resumed at step 1 publishes step 1's weights a second time: versions 1, 2, (2 again), 3."""
    ledger = open_ledger()
    parent = None
    for step, checksum in ((0, "a"), (1, "b"), (1, "b"), (2, "c")):
        parent = ledger.new_version(step, parent, checksum, stage="rl")
    assert ledger.gaps([1, 2, 3, 4]) == {1: 2, 2: 1, 3: 1, 4: 0}


@settings(max_examples=20)
@given(st.lists(st.integers(0, 20), max_size=20))
def test_gaps_agree_with_a_walk(parents: list[int]) -> None:
    with Ledger(":memory:", owner="me") as ledger:
        tree: dict[int, int | None] = {}
        for step, choice in enumerate(parents):
            parent = None if not tree else choice % len(tree) + 1
            tree[ledger.new_version(step, parent)] = parent
        for of in tree:
            walk: list[int] = []
            at: int | None = of
            while at is not None:
                walk.append(at)
                at = tree[at]
            assert ledger.line(of) == walk
            expected = {v: walk.index(v) if v in walk else None for v in tree}
            assert ledger.gaps(tree, of) == expected


def test_two_processes_cannot_seal_one_version_differently(
    open_ledger: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = open_ledger("one"), open_ledger("two")
    version = one.new_version(1)
    two.version(version)
    one.seal(version, "aa")
    monkeypatch.setattr(two._versions, "refresh", lambda: None)  # two has read it before it was sealed
    with pytest.raises(LedgerError, match="has checksum 'aa' already"):
        two.seal(version, "bb")
    monkeypatch.undo()
    two.seal(version, "aa")
    sealed = one.version(version)
    assert sealed is not None and sealed.checksum == "aa"
