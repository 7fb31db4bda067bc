"""Taking, acknowledging, releasing; expiry; strategies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trivet.buffer import Candidates, Ledger, LedgerError, StageLedger, State, register_strategy
from trivet.types import Group, IssueKey

Make = Callable[..., Group]
Fill = Callable[..., list[IssueKey]]


def test_take_says_how_many_are_missing(stage: StageLedger, filled: Fill) -> None:
    keys = filled(stage, 5)
    lease = stage.take(3)
    assert (lease.keys, lease.short, len(lease), lease.replay) == (tuple(keys[:3]), 0, 3, None)
    rest = stage.take(3)
    assert (rest.keys, rest.short) == (tuple(keys[3:]), 1)
    none = stage.take(3)
    assert (len(none), none.short, none.id, none.groups(), none.tasks()) == (0, 3, None, [], [])


def test_fifo_is_the_order_of_issue_not_of_arrival(stage: StageLedger, make_group: Make) -> None:
    keys = stage.issue(list("abcd"), 1)
    stage.claim(4)
    for key in reversed(keys):
        stage.put(make_group(key))
    assert stage.take(4).keys == tuple(keys)


def test_freshest_goes_by_the_oldest_token(stage: StageLedger, make_group: Make) -> None:
    a, b, c, d = stage.issue(list("abcd"), 1)
    stage.claim(4)
    mixed = make_group(a, version=9)
    mixed.rollouts[1] = make_group(a, 2, version=3).rollouts[1]
    for group in (mixed, make_group(b, version=5), make_group(c, version=5), make_group(d, version=-1)):
        stage.put(group)
    assert stage.take(4, "freshest").keys == (b, c, a, d)


def test_a_strategy_of_ones_own(stage: StageLedger, filled: Fill) -> None:
    from trivet.buffer.schema import issues

    @register_strategy("last_first")
    def last_first(candidates: Candidates, n: int) -> list[int]:
        return candidates.first(n, issues.c.seq.desc())

    keys = filled(stage, 3)
    try:
        assert stage.take(2, "last_first").keys == (keys[2], keys[1])
        with pytest.raises(LedgerError, match="'last_first' is already registered"):
            register_strategy("last_first")(last_first)

        register_strategy("greedy")(lambda candidates, n: [1, 1])
        with pytest.raises(LedgerError, match="'greedy' picked a group twice, or one that is not ready"):
            stage.take(2, "greedy")
        assert stage.counts()["ready"] == 1
    finally:
        from trivet.buffer import strategies

        for name in ("last_first", "greedy"):
            strategies._REGISTRY.pop(name, None)


def test_ack_trains_in_the_order_of_delivery(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 4)
    one, two = stage.take(2), stage.take(2)
    stage.ack(two, 1)
    stage.ack(one, 1)  # a step of two leases
    assert stage.counts()[State.TRAINED] == 4
    stage.rewind(0)
    assert stage.take(4).keys == two.keys + one.keys
    with pytest.raises(LedgerError, match="lease 2 is undone"):
        stage.ack(two, 2)


def test_double_ack_is_refused(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 2)
    lease = stage.take(2)
    stage.ack(lease, 1)
    with pytest.raises(LedgerError, match="ack of step 2: lease 1 is acked"):
        stage.ack(lease, 2)


def test_ack_below_a_checkpoint_is_refused(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 2)
    stage.checkpoint(5)
    with pytest.raises(LedgerError, match=r"ack of step 5 .* checkpoint 5 already covers it"):
        stage.ack(stage.take(2), 5)


def test_release_returns_the_groups(stage: StageLedger, filled: Fill) -> None:
    keys = filled(stage, 2)
    lease = stage.take(2)
    stage.release(lease)
    assert stage.take(2).keys == tuple(keys)
    with pytest.raises(LedgerError, match="lease 1 is released"):
        stage.ack(lease, 1)
    with pytest.raises(LedgerError, match="lease 1 is released"):
        lease.groups()


def test_an_expired_lease_returns_and_its_late_ack_is_refused(
    stage: StageLedger, filled: Fill, clock: Any
) -> None:
    keys = filled(stage, 2)
    lease = stage.take(2)
    clock.now += 59
    stage.renew(lease)
    clock.now += 59
    assert stage.take(2).short == 2
    clock.now += 2.5
    with pytest.raises(LedgerError, match=r"lease 1 of 'me' ran out 1\.5 s ago"):
        stage.ack(lease, 1)
    with pytest.raises(LedgerError, match="ran out"):
        stage.renew(lease)
    second = stage.take(2)
    assert second.keys == tuple(keys)
    with pytest.raises(LedgerError, match="lease 1 is expired"):
        stage.ack(lease, 1)
    stage.ack(second, 1)
    assert stage.counts()[State.TRAINED] == 2


def test_a_lease_belongs_to_its_owner(open_ledger: Callable[..., Ledger], filled: Fill) -> None:
    mine, theirs = open_ledger("mine").stage("rl"), open_ledger("theirs").stage("rl")
    filled(mine, 2)
    lease = mine.take(1)
    assert len(theirs.take(2)) == 1
    for call in (lambda: theirs.ack(lease, 1), lambda: theirs.release(lease), lambda: theirs.renew(lease)):
        with pytest.raises(LedgerError, match="lease 1 belongs to 'mine'"):
            call()
    with pytest.raises(LedgerError, match="lease 1 belongs to 'mine'"):
        theirs.stale(lease.keys[0], 3)


def test_a_group_may_leave_its_lease(stage: StageLedger, filled: Fill) -> None:
    a, b, c = filled(stage, 3)
    lease = stage.take(3)
    stage.stale(b, 5, step=1)
    assert [g.issue for g in lease.groups()] == [a, c]
    stage.ack(lease, 1)
    counts = stage.counts()
    assert (counts[State.TRAINED], counts[State.STALE]) == (2, 1)


def test_groups_can_be_read_again_after_the_ack(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 2)
    lease = stage.take(2)
    before = [r.id for g in lease.groups() for r in g.rollouts]
    stage.ack(lease, 1)
    assert [r.id for g in lease.groups() for r in g.rollouts] == before


def test_an_empty_lease_can_be_acknowledged(stage: StageLedger) -> None:
    lease = stage.take(4, step=1)
    stage.ack(lease, 1)
    stage.release(lease)
    stage.renew(lease)
    assert stage.rewind(1).undone == {}


def test_many_threads_share_one_ledger(open_ledger: Callable[..., Ledger], make_group: Make) -> None:
    stage = open_ledger().stage("rl")
    stage.issue([f"t{i}" for i in range(96)], 1)

    def explorer(_: int) -> int:
        done = 0
        while keys := stage.claim(3):
            for key in keys:
                stage.put(make_group(key, 2))
                done += 1
        return done

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(explorer, range(8))) == 96
        leases = list(pool.map(lambda _: stage.take(12), range(8)))
        keys = [key for lease in leases for key in lease.keys]
        assert len(keys) == len(set(keys)) == 96
        list(pool.map(lambda item: stage.ack(item[1], item[0] + 1), enumerate(leases)))
    assert stage.counts()[State.TRAINED] == 96
    assert stage.epoch_done(1)
