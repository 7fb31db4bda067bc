"""Checkpoints, rewinds, replays, collection, fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trivet.buffer import AttachmentStore, Ledger, LedgerError, StageLedger, State
from trivet.types import Group, IssueKey, Scored

Make = Callable[..., Group]
Fill = Callable[..., list[IssueKey]]


def _train(stage: StageLedger, n: int, step: int) -> tuple[IssueKey, ...]:
    lease = stage.take(n, step=step)
    assert not lease.short
    stage.ack(lease, step)
    return lease.keys


def test_acknowledgements_become_final_with_a_checkpoint(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 8)
    _train(stage, 2, 1)
    stage.checkpoint(1, {"cursor": 1, "rng": [1, 2]})
    two, three = _train(stage, 2, 2), _train(stage, 3, 3)
    assert (stage.checkpoints(), stage.state(1)) == ([1], {"cursor": 1, "rng": [1, 2]})
    done = stage.rewind(1)
    assert (done.step, done.undone, done.pinned) == (1, {State.TRAINED: 5}, [(2, 2), (3, 3)])
    assert str(done) == (
        "rewound to step 1: undone 5 trained; returned 0 claims and 0 leased groups; "
        "to replay: step 2 (2 groups), step 3 (3 groups)"
    )
    assert stage.counts()[State.TRAINED] == 2
    lease = stage.take(2)  # the earliest recorded step, without being asked for
    assert (lease.keys, lease.replay, lease.short) == (two, 2, 0)
    stage.ack(lease, 2)
    assert stage.pinned() == [(3, 3)]
    lease = stage.take(8, step=3)
    assert (lease.keys, lease.short) == (three, 5)
    stage.ack(lease, 3)
    assert stage.take(1, step=4).replay is None


def test_steps_are_replayed_in_turn_and_whole(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 9)
    for step in (1, 2, 3):
        _train(stage, 3, step)
    stage.rewind(1)
    with pytest.raises(LedgerError, match=r"recorded steps \[2, 3\] wait .*acknowledge step 2 first"):
        stage.take(3, step=3)
    with pytest.raises(LedgerError, match="the recorded step has 3 groups, 2 were asked for"):
        stage.take(2, step=2)
    lease = stage.take(3, step=2)
    with pytest.raises(LedgerError, match="ack of step 4: lease 4 replays recorded step 2"):
        stage.ack(lease, 4)
    ahead = stage.take(3, step=3)  # reading ahead while step 2 is being trained
    stage.release(lease)
    assert stage.pinned() == [(2, 3)]
    again = stage.take(3, step=2)
    assert again.keys == lease.keys
    for call in (lambda: stage.ack(ahead, 3), lambda: stage.checkpoint(2)):
        with pytest.raises(LedgerError, match="recorded step 2 has not been replayed"):
            call()
    stage.ack(again, 2)
    stage.ack(ahead, 3)
    assert stage.pinned() == []


def test_order_of_delivery_is_replayed_not_the_order_of_issue(stage: StageLedger, make_group: Make) -> None:
    a, b, c = stage.issue(list("abc"), 1)
    stage.claim(3)
    for key, version in ((a, 1), (b, 3), (c, 2)):
        stage.put(make_group(key, version=version))
    lease = stage.take(3, "freshest", step=1)
    assert lease.keys == (b, c, a)
    stage.ack(lease, 1)
    stage.rewind(0)
    assert stage.take(3, "fifo", step=1).keys == (b, c, a)


def test_fresh_groups_wait_while_recorded_ones_are_replayed(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 2)
    _train(stage, 2, 1)
    filled(stage, 2, epoch=2)
    stage.rewind(0)
    assert {k.epoch for k in stage.take(4, step=1).keys} == {1}


def test_rewards_of_a_recorded_step_are_frozen(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 1)
    _train(stage, 1, 1)
    stage.rewind(0)
    with pytest.raises(
        LedgerError, match="is ready and pinned to step 1, which is replayed as it was recorded"
    ):
        stage.reward("rl/t0@1.0/0", Scored(7.0))


def test_other_decisions_are_undone_and_made_again(stage: StageLedger, make_group: Make) -> None:
    keys = stage.issue(list("abcdefg"), 1)
    a, b, c, d, e, f, g = keys
    stage.claim(7)
    stage.filtered(a, "equal", make_group(a), step=1)
    stage.checkpoint(1)
    stage.filtered(b, "equal", make_group(b), step=2)
    stage.fail(c, "sandbox", 3, step=2)
    for key in (d, e, f):
        stage.put(make_group(key))
    stage.stale(d, 4)  # no step: the one after the last acknowledged
    stage.surplus(g, step=3)
    stage.ack(stage.take(1, step=2), 2)  # e
    done = stage.rewind(1)
    assert done.undone == {
        State.FILTERED: 1,
        State.FAILED: 1,
        State.STALE: 1,
        State.TRAINED: 1,
        State.SURPLUS: 1,
    }
    assert [(x.key, x.state, x.cause, x.gap, x.tries) for x in stage.decided(2)] == [
        (b, State.FILTERED, "equal", None, None),
        (c, State.FAILED, "sandbox", None, 3),
        (d, State.STALE, None, 4, None),
    ]
    assert [x.key for x in stage.decided(3)] == [g]
    assert [x.issue for x in stage.groups([b, c])] == [b]  # a filter can judge again
    assert stage.claim(9) == []  # c and g are not played again
    with pytest.raises(LedgerError, match="pinned: step 2 decided filtered before the rewind, now surplus"):
        stage.surplus(b)
    with pytest.raises(LedgerError, match="now at step 3 filtered"):
        stage.filtered(b, "equal", step=3)
    stage.filtered(b, "equal", step=2)  # made again by the caller ...
    stage.ack(stage.take(1, step=2), 2)  # ... the others with the acknowledgement
    assert stage.decided(2) == []
    counts = stage.counts()
    assert [counts[s] for s in (State.FILTERED, State.FAILED, State.STALE, State.TRAINED)] == [2, 1, 1, 1]
    assert (counts[State.ISSUED], counts[State.READY]) == (1, 1)  # g waits for step 3, f was never used
    stage.ack(stage.take(1, step=3), 3)
    assert stage.epoch_done(1)


def test_a_replayed_group_cannot_be_decided_otherwise(stage: StageLedger, filled: Fill) -> None:
    (key,) = filled(stage, 1)
    _train(stage, 1, 1)
    stage.rewind(0)
    for _ in range(2):
        with pytest.raises(LedgerError, match="step 1 decided trained before the rewind, now stale"):
            stage.stale(key, 3)
        stage.take(1, step=1)


def test_unpin_gives_the_recorded_order_up(stage: StageLedger, make_group: Make) -> None:
    a, b, c = stage.issue(list("abc"), 1)
    stage.claim(3)
    stage.put(make_group(a))
    _train(stage, 1, 1)
    stage.filtered(b, "equal", make_group(b), step=1)
    stage.surplus(c, step=1)
    again = stage.requeue(c)
    stage.rewind(0)
    assert stage.unpin() == 2
    assert (stage.pinned(), stage.decided(1)) == ([], [])
    assert stage.take(9, step=1).keys == (a, b)
    assert stage.claim(9) == [again]  # c keeps its decision: its next round is there to be played


def test_resample_plays_a_broken_step_again_as_a_whole(stage: StageLedger, make_group: Make) -> None:
    keys = stage.issue(list("abcdef"), 1)
    a, b, c, d, e, f = stage.claim(6)
    stage.put(make_group(a))
    stage.filtered(b, "equal", make_group(b), step=1)
    _train(stage, 1, 1)
    stage.put(make_group(c))  # step 2 breaks off here
    stage.filtered(d, "equal", make_group(d), step=2)
    stage.surplus(e, make_group(e), step=2)
    stage.requeue(e)
    stage.abandon([f])
    stage.rewind(0)
    assert stage.resample() == 3
    assert stage.pinned() == [(1, 1)]
    assert [x.key for x in stage.decided(1)] == [b]
    assert stage.claim(9) == keys[2:]
    assert stage.put(make_group(c)) == ["rl/c@1.0/0", "rl/c@1.0/1"]  # old ids are free again


def test_checkpoints_do_not_go_back_by_themselves(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 2)
    _train(stage, 2, 4)
    stage.checkpoint(4, "first")
    stage.checkpoint(4, "again")
    assert stage.state(4) == "again"
    with pytest.raises(
        LedgerError, match=r"checkpoint of step 3 .* there is one of step 4; rewind\(3\) first"
    ):
        stage.checkpoint(3)
    assert stage.rewind(3).checkpoints == [4]
    assert stage.checkpoints() == []


def test_a_checkpoint_the_ledger_never_heard_of(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 2)
    _train(stage, 2, 1)
    with pytest.raises(LedgerError, match="to step 2: this ledger knows steps up to 1"):
        stage.rewind(2)


# -- owners that died ----------------------------------------------------------------------------


def test_rewind_returns_what_dead_owners_held(
    open_ledger: Callable[..., Ledger], make_group: Make, filled: Fill
) -> None:
    first = open_ledger("trainer")
    stage = first.stage("rl")
    filled(stage, 4)
    stage.issue(list("xyz"), 1)
    stage.claim(2)
    stage.take(3)
    other = open_ledger("explorer").stage("rl")
    other.claim(1)
    again = open_ledger("trainer").stage("rl")  # the same name: the first is gone
    done = again.rewind(0)
    assert (done.recovered.claims, done.recovered.groups, done.recovered.alive) == (2, 3, 1)
    assert (again.counts()[State.ISSUED], again.counts()[State.READY]) == (2, 4)
    assert again.recover(dead=["explorer"]).claims == 1
    with pytest.raises(LedgerError, match="is issued"):
        other.put(make_group(IssueKey("z", 1)))


def test_closed_owners_are_dead(open_ledger: Callable[..., Ledger]) -> None:
    one = open_ledger("one")
    one.stage("rl").issue(["a"], 1)
    one.stage("rl").claim(1)
    two = open_ledger("two").stage("rl")
    assert two.recover().claims == 0
    one.close()
    assert two.recover().claims == 1


def test_a_process_that_is_gone_is_dead(open_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    script = (
        "import os, sys; from trivet.buffer import Ledger\n"
        "s = Ledger(sys.argv[1], owner='child').stage('rl'); s.issue(['a'], 1); s.claim(1); os._exit(9)"
    )
    path = tmp_path / "ledger.sqlite"
    done = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60, check=False)
    assert done.returncode == 9
    assert open_ledger("parent").stage("rl").recover().claims == 1


def test_claims_of_other_machines_run_out(
    open_ledger: Callable[..., Ledger], clock: Any, tmp_path: Path
) -> None:
    import sqlite3

    far = open_ledger("far")
    far.stage("rl").issue(["a"], 1)
    far.stage("rl").claim(1)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as raw:  # as another machine would have written it
        raw.execute("UPDATE sessions SET machine = 'elsewhere', pid = 4194304")
    near = open_ledger("near").stage("rl")
    assert (near.recover().claims, near.recover().alive) == (0, 1)
    clock.now += 61
    assert near.recover().claims == 1


# -- collection ----------------------------------------------------------------------------------


def test_collection_waits_for_the_oldest_kept_checkpoint(stage: StageLedger, filled: Fill) -> None:
    filled(stage, 6)
    with pytest.raises(LedgerError, match=r"collect up to step 1 .* checkpoints exist none"):
        stage.collect(1)
    one = _train(stage, 2, 1)
    stage.checkpoint(1)
    two = _train(stage, 2, 2)
    with pytest.raises(LedgerError, match="up to step 1; only what a durable checkpoint covers"):
        stage.collect(2)
    assert stage.collect(0) == stage.collect(0)
    freed = stage.collect(1)
    assert (freed.rollouts, freed.attachments) == (4, ())
    assert freed.bytes > 0
    assert stage.collect(1).rollouts == 0
    with pytest.raises(LedgerError, match=r"rollout rl/t0@1.0/0: its tokens were collected"):
        stage.groups(one)
    assert len(stage.groups(two)) == 2
    stage.checkpoint(2)
    stage.collect(2)
    assert stage.checkpoints() == [2]
    with pytest.raises(LedgerError, match=r"data up to step 2 was collected; the earliest step .* is 2"):
        stage.rewind(1)


def _attached(make_group: Make, key: IssueKey, store: AttachmentStore, array: np.ndarray) -> Group:
    group = make_group(key, 2)
    for rollout in group.rollouts:
        rollout.trace.attach(1, store.put(array, "top", 0, 3))
    return group


def test_collection_frees_attachments_nobody_needs(
    stage: StageLedger, make_group: Make, tmp_path: Path
) -> None:
    store = AttachmentStore(tmp_path / "heavy")
    arrays = [np.arange(5, dtype=np.float32) + i for i in range(3)]
    a, b, c, d = stage.issue(list("abcd"), 1)
    stage.claim(4)
    for key, array in ((a, arrays[0]), (b, arrays[1]), (c, arrays[1]), (d, arrays[2])):
        stage.put(_attached(make_group, key, store, array))
    names = [store.put(array, "top", 0, 3).name for array in arrays]
    files = [store.path(name) for name in names]
    for file in files:
        os.utime(file, (1.0, 1.0))  # written long before the rollouts
    _train(stage, 2, 1)
    stage.checkpoint(1)
    _train(stage, 2, 2)
    assert stage.collect(1, store).attachments == (names[0],)
    assert [f.exists() for f in files] == [False, True, True]  # c still refers to the second
    stage.checkpoint(2)
    assert set(stage.collect(2).attachments) == set(names[1:])  # without a store: remembered
    assert [f.exists() for f in files] == [False, True, True]
    store.put(arrays[2], "top", 0, 3)  # about to be used again
    assert stage.collect(2, store).attachments == ()
    assert [f.exists() for f in files] == [False, False, True]


# -- fingerprints --------------------------------------------------------------------------------


def test_other_data_is_refused_unless_adopted(open_ledger: Callable[..., Ledger]) -> None:
    old = {"tasks": "aaa", "template": "t1"}
    ledger = open_ledger(fingerprint=old)
    ledger.stage("rl").issue(["a", "b"], 1)
    ledger.stage("sft", fingerprint="other")
    ledger.close()
    again = open_ledger(fingerprint={**old, "tasks": "bbb"})
    with pytest.raises(LedgerError) as caught:
        again.stage("rl")
    text = str(caught.value)
    assert "stage 'rl'" in text and "2 issues of other data (tasks: stored 'aaa', now 'bbb')" in text
    assert "adopt" in text and "new run folder" in text
    assert again.stage("rl", fingerprint="").counts()[State.ISSUED] == 2  # a reader claims nothing
    assert again.stage("rl", adopt=True).counts()[State.ISSUED] == 2
    again.stage("rl")
    with pytest.raises(LedgerError, match=r"data: stored 'other', now 'third'"):
        again.stage("sft", fingerprint="third")


def test_the_first_fingerprint_tags_an_untagged_stage(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    ledger.stage("rl")
    ledger.stage("rl", fingerprint="a")
    with pytest.raises(LedgerError, match="stored 'a', now 'b'"):
        ledger.stage("rl", fingerprint="b")
