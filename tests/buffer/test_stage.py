"""Issues from state to state: what is allowed, what is refused and with which words."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.buffer import Ledger, LedgerError, StageLedger, State
from trivet.types import (
    Group,
    IssueKey,
    Message,
    Pending,
    Reward,
    Rollout,
    Scored,
    Task,
    Termination,
    Trace,
    Unscored,
)

Make = Callable[..., Group]
Fill = Callable[..., list[IssueKey]]


def test_issue_is_idempotent_and_claims_follow_its_order(stage: StageLedger) -> None:
    keys = stage.issue(["c", "a", "b"], 1)
    assert keys == [("c", 1, 0), ("a", 1, 0), ("b", 1, 0)]
    assert stage.issue(["b", "d", "c"], 1) == [("b", 1, 0), ("d", 1, 0), ("c", 1, 0)]
    assert stage.counts(1)[State.ISSUED] == 4
    assert [k.task_id for k in stage.claim(3)] == ["c", "a", "b"]
    assert [k.task_id for k in stage.claim(3)] == ["d"]
    assert stage.order(keys[0]) < stage.order(keys[1]) < stage.order(keys[2])


def test_a_task_may_not_come_twice_in_an_epoch(stage: StageLedger) -> None:
    with pytest.raises(LedgerError, match="'a' comes twice in epoch 1"):
        stage.issue(["a", "b", "a"], 1)
    assert sum(stage.counts().values()) == 0


def test_stages_do_not_see_each_other(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    one, two = ledger.stage("one"), ledger.stage("two")
    one.issue(["a"], 1)
    assert two.claim(5) == []
    assert sum(two.counts().values()) == 0
    assert ledger.stages() == ["one", "two"]


def test_what_is_put_comes_back_equal(stage: StageLedger, make_group: Make) -> None:
    (key,) = stage.issue(["t"], 3)
    stage.claim(1)
    group = make_group(key, 3, version=7)
    group.rollouts[1].counters = {"turns": 2, "np": np.float32(0.5)}  # type: ignore[dict-item]
    group.rollouts[2].reward = Unscored("judge_down", "503")
    ids = stage.put(group)
    assert ids == ["rl/t@3.0/0", "rl/t@3.0/1", "rl/t@3.0/2"]
    lease = stage.take(1)
    (back,) = lease.groups()
    assert (back.id, back.issue, back.kind) == (group.id, key, "rollout")
    for ours, theirs in zip(group.rollouts, back.rollouts, strict=True):
        assert ours.header() == theirs.header()
        assert ours.trace.to_bytes() == theirs.trace.to_bytes()
    assert lease.tasks() == [group.task]


def test_columns_can_be_queried_without_the_token_blob(
    open_ledger: Callable[..., Ledger], make_group: Make, tmp_path: Path
) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    (key,) = stage.issue(["äöü 中文"], 1)
    stage.claim(1)
    group = make_group(key, 2, version=4)
    group.rollouts[1].reward = Unscored("judge_down")
    stage.put(group)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as raw:
        rows = raw.execute(
            "SELECT task_id, attempt, player, role, source, termination, reward_kind, reward_value, "
            "reward_cause, sampled_tokens, min_version, max_version, created FROM rollouts "
            "WHERE messages LIKE '%中文%' ORDER BY attempt"
        ).fetchall()
    common = ("policy", "train", "policy", "finished")
    assert rows == [
        ("äöü 中文", 0, *common, "scored", 0.0, None, 3, 4, 4, 1000.0),
        ("äöü 中文", 1, *common, "unscored", None, "judge_down", 3, 4, 4, 1000.0),
    ]


texts = st.text(alphabet=st.characters(), max_size=20)  # lone surrogates and NUL included


@settings(max_examples=20)
@given(texts, texts, st.dictionaries(texts, st.floats(), max_size=3))
def test_any_text_survives(content: str, cause: str, counters: dict[str, float]) -> None:
    task = Task("math", (Message("user", content),), {"text": content}, "t")
    trace = Trace()
    trace.add(-1, [1])
    rollout = Rollout(task, trace, Unscored(cause), Termination.ERROR, messages=[Message("tool", content)])
    rollout.counters = counters
    with Ledger(":memory:", owner="me") as ledger:
        stage = ledger.stage("s")
        stage.put_examples([Group("", IssueKey("t", 0), [rollout])], 1)
        (back,) = stage.take(1).groups()
    assert repr(back.rollouts[0].header()) == repr(rollout.header())  # NaN included


def test_bad_groups_are_refused_and_nothing_is_stored(stage: StageLedger, make_group: Make) -> None:
    key, other = stage.issue(["t", "u"], 1)
    stage.claim(2)
    with pytest.raises(LedgerError, match=r"t@1.0: its group holds no rollout"):
        stage.put(Group("", key, []))
    with pytest.raises(LedgerError, match=r"t@1.0: its group holds a rollout of task 'u'"):
        stage.put(Group("", key, make_group(other).rollouts))
    double = make_group(key)
    double.rollouts[0].id = double.rollouts[1].id = "x"
    with pytest.raises(LedgerError, match=r"\['x'\] are used more than once"):
        stage.put(double)
    strange = make_group(key)
    strange.rollouts[0].counters = {"x": object()}  # type: ignore[dict-item]
    with pytest.raises(LedgerError, match="cannot be stored: object is not JSON"):
        stage.put(strange)
    assert stage.counts()[State.IN_FLIGHT] == 2
    taken = make_group(key)
    taken.rollouts[0].id = "x"
    stage.put(taken)
    again = make_group(other)
    again.rollouts[0].id = "x"
    with pytest.raises(LedgerError, match=r"\['x'\] are already stored"):
        stage.put(again)
    assert stage.counts()[State.IN_FLIGHT] == 1


def test_names_must_be_text_and_causes_are_made_so(stage: StageLedger, make_group: Make) -> None:
    with pytest.raises(LedgerError, match=r"task id '\\udc80' holds a lone surrogate"):
        stage.issue(["a", "\udc80"], 1)
    (key,) = stage.issue(["a"], 1)
    stage.claim(1)
    group = make_group(key)
    group.rollouts[0].player = "\ud800"
    with pytest.raises(LedgerError, match=r"issue a@1.0: the name '\\ud800' holds a lone surrogate"):
        stage.put(group)
    stage.filtered(key, "bad \ud800", step=1)
    stage.rewind(0)
    assert stage.decided(1)[0].cause == "bad \\ud800"


def test_put_needs_a_claim_and_happens_once(stage: StageLedger, make_group: Make) -> None:
    (key,) = stage.issue(["t"], 1)
    with pytest.raises(
        LedgerError, match=r"t@1.0 of stage 'rl' is issued; it cannot become ready: it was not claimed"
    ):
        stage.put(make_group(key))
    with pytest.raises(LedgerError, match=r"x@1.0 does not exist in stage 'rl'"):
        stage.put(make_group(IssueKey("x", 1)))
    stage.claim(1)
    stage.put(make_group(key))
    with pytest.raises(LedgerError, match=r"t@1.0 of stage 'rl' is ready; .* already stored"):
        stage.put(make_group(key))
    assert len(stage.groups([key])[0].rollouts) == 2


def test_a_late_owner_is_refused(open_ledger: Callable[..., Ledger], make_group: Make, clock: Any) -> None:
    slow, fast = open_ledger("slow").stage("rl"), open_ledger("fast").stage("rl")
    (key,) = slow.issue(["t"], 1)
    slow.claim(1)
    with pytest.raises(LedgerError, match=r"played by 'slow' \(session 1, process \d+\), not by 'fast'"):
        fast.put(make_group(key))
    assert fast.claim(1) == []
    clock.now += 60
    assert fast.claim(1) == [key]
    with pytest.raises(LedgerError, match="played by 'fast'"):
        slow.put(make_group(key))
    fast.put(make_group(key))
    with pytest.raises(LedgerError, match="already stored"):
        slow.put(make_group(key))


def test_a_claim_that_ran_out_still_counts_while_nobody_else_has_it(
    stage: StageLedger, make_group: Make, clock: Any
) -> None:
    a, b = stage.issue(["a", "b"], 1)
    stage.claim(2)
    clock.now += 1000
    stage.put(make_group(a))  # work is not thrown away for being slow
    assert stage.counts()[State.ISSUED] == 1  # asking returned the other
    with pytest.raises(LedgerError, match="the claim ran out"):
        stage.put(make_group(b))


def test_abandon_gives_claims_back(stage: StageLedger, make_group: Make) -> None:
    a, b = stage.issue(["a", "b"], 1)
    stage.claim(2)
    stage.put(make_group(a))
    with pytest.raises(LedgerError, match=r"a@1.0 .* is ready; it cannot become issued"):
        stage.abandon([b, a])
    assert stage.counts()[State.IN_FLIGHT] == 1  # all or none
    stage.abandon([b])
    stage.abandon([b])  # not held any more: nothing to give back
    assert stage.claim(2) == [b]


def _reach(stage: StageLedger, make_group: Make, key: IssueKey, state: State) -> None:
    """Bring a new issue into `state`."""
    stage.issue([key.task_id], key.epoch)
    if state is State.ISSUED:
        return
    assert stage.claim(1) == [key]
    if state in (State.FILTERED, State.FAILED, State.SURPLUS):
        DECISIONS[state](stage, key)
    if state in (State.READY, State.LEASED, State.TRAINED, State.STALE):
        stage.put(make_group(key))
    if state is State.STALE:
        stage.stale(key, 4)
    if state in (State.LEASED, State.TRAINED):
        lease = stage.take(1)
        if state is State.TRAINED:
            stage.ack(lease, 1)


DECISIONS: dict[State, Callable[[StageLedger, IssueKey], None]] = {
    State.FILTERED: lambda stage, key: stage.filtered(key, "equal"),
    State.FAILED: lambda stage, key: stage.fail(key, "sandbox", 3),
    State.SURPLUS: lambda stage, key: stage.surplus(key),
    State.STALE: lambda stage, key: stage.stale(key, 4),
}
ALLOWED = {
    State.IN_FLIGHT: {State.FILTERED, State.FAILED, State.SURPLUS},
    State.READY: set(DECISIONS),
    State.LEASED: set(DECISIONS),
}


@pytest.mark.parametrize("state", list(State))
def test_every_decision_from_every_state(make_group: Make, state: State) -> None:
    with Ledger(":memory:", owner="me") as ledger:
        for wanted, decide in DECISIONS.items():
            stage = ledger.stage(wanted.value)
            key = IssueKey("t", 1)
            _reach(stage, make_group, key, state)
            assert stage.counts()[state] == 1
            if wanted in ALLOWED.get(state, set()):
                decide(stage, key)
                assert stage.counts()[wanted] == 1
            else:
                text = f"t@1.0 of stage '{wanted}' is {state}; it cannot become {wanted}"
                with pytest.raises(LedgerError, match=text):
                    decide(stage, key)
                assert stage.counts()[state] == 1


def test_terminal_decisions_keep_the_group_they_are_given(stage: StageLedger, make_group: Make) -> None:
    keys = stage.issue(["a", "b", "c", "d"], 1)
    stage.claim(4)
    stage.filtered(keys[0], "equal", make_group(keys[0]))
    stage.fail(keys[1], "aborted", 3, make_group(keys[1]))
    stage.surplus(keys[2], make_group(keys[2]))
    stage.fail(keys[3], "sandbox", 3)
    assert [g.issue for g in stage.groups(keys)] == keys[:3]
    assert stage.epoch_done(1)
    with pytest.raises(LedgerError, match="is filtered; it cannot become filtered"):
        stage.filtered(keys[0], "equal", make_group(keys[0]))


def test_requeue_opens_the_next_round_at_the_end_of_the_order(stage: StageLedger, make_group: Make) -> None:
    a, b = stage.issue(["a", "b"], 1)
    with pytest.raises(LedgerError, match=r"a@1.0 .* is issued; it cannot become requeued"):
        stage.requeue(a)
    stage.claim(1)
    stage.surplus(a)
    again = stage.requeue(a)
    assert again == ("a", 1, 1) == stage.requeue(a)
    assert not stage.epoch_done(1)
    assert stage.claim(9) == [b, again]
    stage.put(make_group(again))
    stage.ack(stage.take(1), 1)
    with pytest.raises(LedgerError, match="trained; it cannot become requeued"):
        stage.requeue(again)


def test_an_epoch_without_issues_is_not_done(stage: StageLedger) -> None:
    assert not stage.epoch_done(1)
    assert stage.counts(1) == dict.fromkeys(State, 0)


# -- rewards that come later ---------------------------------------------------------------------


def _waiting(stage: StageLedger, make_group: Make, until: float) -> tuple[IssueKey, list[str]]:
    (key,) = stage.issue(["t"], 1)
    stage.claim(1)
    return key, stage.put(make_group(key, 2, reward=lambda i: Pending(until)))


def test_pending_groups_wait_for_all_their_rewards(stage: StageLedger, make_group: Make, clock: Any) -> None:
    _, ids = _waiting(stage, make_group, until=5000.0)
    assert stage.take(1).short == 1
    clock.now += 100  # longer than a claim: stored work is never given to another
    assert stage.claim(1) == []
    stage.reward(ids[0], Scored(1.0, {"exact": 1.0}))
    assert stage.counts()[State.IN_FLIGHT] == 1
    stage.reward(ids[1], Unscored("refused"))
    (group,) = stage.take(1).groups()
    assert [r.reward for r in group.rollouts] == [Scored(1.0, {"exact": 1.0}), Unscored("refused")]


def test_expired_feedback_becomes_unscored(stage: StageLedger, make_group: Make, clock: Any) -> None:
    _, ids = _waiting(stage, make_group, until=1500.0)
    stage.reward(ids[0], Scored(1.0))
    clock.now = 1499.9
    assert stage.counts()[State.READY] == 0
    clock.now = 1500.0
    assert stage.counts()[State.READY] == 1
    reward = stage.reward_of(ids[1])
    assert isinstance(reward, Unscored) and reward.cause == "feedback_timeout"
    with pytest.raises(LedgerError, match="a known reward cannot become pending again"):
        stage.reward(ids[1], Pending(9999.0))
    stage.reward(ids[1], Scored(0.5))  # later than promised, still in time
    assert stage.reward_of(ids[1]) == Scored(0.5)


def test_rewards_are_refused_once_the_batch_was_read_or_the_issue_is_terminal(
    stage: StageLedger, filled: Fill
) -> None:
    filled(stage, 2)
    lease = stage.take(2)
    stage.reward("rl/t0@1.0/0", Scored(9.0))
    assert lease.groups()[0].rollouts[0].reward == Scored(9.0)
    with pytest.raises(LedgerError, match=r"t0@1.0 is leased and its batch has been read"):
        stage.reward("rl/t0@1.0/0", Scored(8.0))
    stage.ack(lease, 1)
    with pytest.raises(LedgerError, match=r"t0@1.0 is trained; the reward came too late \(kept: .*9.0"):
        stage.reward("rl/t0@1.0/0", Scored(8.0))
    with pytest.raises(LedgerError, match="rollout 'nobody' does not exist in stage 'rl'"):
        stage.reward("nobody", Scored(1.0))


@pytest.mark.parametrize("given", [[Scored(1.0), Scored(2.0)], [Unscored("x"), Scored(0.0)]])
def test_a_scored_reward_may_be_corrected_while_ready(
    stage: StageLedger, filled: Fill, given: list[Reward]
) -> None:
    filled(stage, 1)
    for reward in given:
        stage.reward("rl/t0@1.0/1", reward)
        assert stage.reward_of("rl/t0@1.0/1") == reward
    assert stage.counts()[State.READY] == 1


# -- other kinds ---------------------------------------------------------------------------------


def test_examples_of_all_kinds_share_the_path(stage: StageLedger, make_group: Make) -> None:
    sft = [make_group(IssueKey(f"s{i}", 0), 1, kind="sft") for i in range(300)]
    new = stage.put_examples(iter(sft), 2)
    assert new == [(f"s{i}", 2, 0) for i in range(300)]
    assert stage.put_examples(sft[:10], 2) == []  # a restarted loader repeats itself
    lease = stage.take(100)
    assert lease.keys == tuple(new[:100])
    assert {g.kind for g in lease.groups()} == {"sft"}
    stage.ack(lease, 1)
    assert stage.put_examples(sft, 2) == []
    with pytest.raises(LedgerError, match="comes twice"):
        stage.put_examples([sft[0], sft[0]], 3)


def test_bare_tasks(stage: StageLedger) -> None:
    tasks = [Task("math", (Message("user", f"{i}"),)) for i in range(3)]
    stage.put_tasks(tasks, 1)
    lease = stage.take(3)
    assert lease.tasks() == tasks
    with pytest.raises(LedgerError, match="holds a bare task"):
        lease.groups()
    stage.ack(lease, 1)
    assert stage.epoch_done(1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.claim(-1), "claim: n is -1"),
        (lambda s: s.take(0), "take: n is 0"),
        (lambda s: s.issue(["a"], -1), "epoch is -1"),
        (lambda s: s.issue(["a"], 1.5), "epoch is 1.5"),
        (lambda s: s.checkpoint(True), "step is True"),
        (lambda s: s.checkpoint(1, {1, 2}), "state must be JSON"),
        (lambda s: s.take(1, "newest"), r"'newest' is not known; known are \['fifo', 'freshest'\]"),
        (lambda s: s.state(3), r"no checkpoint of step 3; there are \[\]"),
    ],
)
def test_bad_arguments(stage: StageLedger, call: Callable[[Any], object], text: str) -> None:
    with pytest.raises(LedgerError, match=text):
        call(stage)
