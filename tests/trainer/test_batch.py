"""Flat columns of groups, and several updates of one batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, prepare, resolve
from trivet.trainer.batch import collate, split
from trivet.types import (
    Group,
    IssueKey,
    Message,
    Pending,
    Rollout,
    Scored,
    Task,
    Termination,
    Trace,
    Unscored,
)

TASK = Task("test", (Message("user", "?"),))


def interleaved() -> Trace:
    trace = Trace()
    for prompt, out in (([1, 2], 3), ([9, 8], 7), ([1, 2, 3, 4], 5), ([9, 8, 7, 6], 5), ([1, 2, 4, 5, 6], 7)):
        trace.add_sampled(trace.branch(prompt), [out], [-out / 10], 4, temperature=0.7)
    return trace


def answer(n: int, reward: float | None, attempt: int = 0, **fields) -> Rollout:
    trace = Trace()
    trace.add_sampled(trace.add(-1, [1, 2]), np.arange(n) + 3, np.full(n, -0.5), 0)
    score = Unscored("timeout") if reward is None else Scored(reward)
    return Rollout(TASK, trace, score, fields.pop("termination", Termination.FINISHED), attempt, **fields)


def group(name: str, *rollouts: Rollout, kind="rollout") -> Group:
    return Group(name, IssueKey(name, 1), list(rollouts), kind)


def test_columns_of_interleaved_calls():
    batch = collate(
        [
            group("a", answer(1, 0.5, player="x")),
            group(
                "b", Rollout(TASK, interleaved(), Scored(1.0), Termination.TURNS, 3, id="r7"), answer(2, None)
            ),
        ]
    )
    assert (batch.tokens, batch.rows, batch.rollouts, batch.groups) == (3 + 5 + 5 + 6 + 4, 5, 3, 2)
    assert batch.row_start_R.tolist() == [0, 3, 8, 13, 19]
    assert batch.row_length_R.tolist() == [3, 5, 5, 6, 4]
    assert batch.row_rollout_R.tolist() == [0, 1, 1, 1, 2]
    rows = [
        batch.ids_T[s : s + n].tolist() for s, n in zip(batch.row_start_R, batch.row_length_R, strict=True)
    ]
    assert rows[1:4] == [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [1, 2, 4, 5, 6, 7]]
    trained = [np.flatnonzero(batch.train_T[batch.row_T == r]).tolist() for r in range(5)]
    assert trained == [[2], [2, 4], [2, 4], [5], [2, 3]]
    assert batch.position_T[batch.row_T == 3].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.length_N.tolist() == [1, 5, 2]
    assert batch.logprob_T[batch.row_T == 3][5] == pytest.approx(-0.7)
    assert np.isnan(batch.logprob_T[~batch.sampled_T]).all()
    assert batch.version_T[batch.sampled_T].tolist() == [0, 4, 4, 4, 4, 4, 0, 0]
    assert batch.temperature_T[batch.row_T == 1].tolist() == pytest.approx([1, 1, 0.7, 1, 0.7])
    assert np.isnan(batch.reward_N[2])
    assert batch.reward_N[:2].tolist() == [0.5, 1.0]
    assert batch.causes == ("", "", "timeout")
    assert batch.group_N.tolist() == [0, 1, 1]
    assert batch.players == ("x", "policy")
    assert batch.player_N.tolist() == [0, 1, 1]
    assert batch.attempt_N.tolist() == [0, 3, 0]
    assert batch.truncated_N.tolist() == [False, True, False]
    assert batch.rollout_ids == ("a#0", "r7", "b#0")
    assert batch.issues == (IssueKey("a", 1), IssueKey("b", 1))
    assert batch.unit_T("row").tolist() == batch.row_T.tolist()
    assert batch.unit_T("rollout").tolist() == [0] * 3 + [1] * 16 + [2] * 4
    assert batch.unit_T("group").tolist() == [0] * 3 + [1] * 20


def test_a_shared_prefix_is_trained_in_its_first_row_only():
    trace = Trace()
    first = trace.add_sampled(trace.add(-1, [1]), [2, 3], [-0.1, -0.1], 0)
    trace.add_sampled(first, [4], [-0.1], 0)
    trace.add_sampled(first, [5], [-0.1], 0)
    batch = collate([group("a", Rollout(TASK, trace, Scored(1.0), Termination.FINISHED))])
    assert batch.train_T.tolist() == [0, 1, 1, 1, 0, 0, 0, 1]
    assert batch.length_N.tolist() == [4]


def test_a_trained_first_token_is_refused():
    trace = Trace()
    trace.add(-1, [1, 2], train=1.0)
    example = Rollout(TASK, trace, Unscored("-"), Termination.FINISHED, id="r1")
    with pytest.raises(AlgorithmError, match=r"group 'a', rollout 'r1': the first token of a row"):
        collate([group("a", example, kind="sft")])


def test_pending_and_eval_are_refused():
    pending = answer(1, 0.0)
    pending.reward = Pending(9e9)
    with pytest.raises(AlgorithmError, match="still pending"):
        collate([group("a", pending)])
    with pytest.raises(AlgorithmError, match="role 'eval'"):
        collate([group("a", answer(1, 0.0, role="eval"))])


def test_empty_traces_and_empty_batches():
    nothing = Rollout(TASK, Trace(), Unscored("engine"), Termination.ABORTED)
    batch = collate([group("a", nothing, answer(2, 1.0, 1), answer(2, 0.0, 2))])
    assert batch.rows == 2
    assert batch.length_N.tolist() == [0, 2, 2]
    assert prepare(batch, resolve("grpo")).row_active_R.all()
    empty = collate([])
    assert (empty.tokens, empty.rows, empty.rollouts, empty.groups) == (0, 0, 0, 0)


def prepared_of(sizes, **options):
    groups = [
        group(f"g{i}", *(answer(1 + (i + a) % 3, float(a % 2), a) for a in range(n)))
        for i, n in enumerate(sizes)
    ]
    batch = collate(groups)
    batch.annotations["proximal_logp"] = np.arange(batch.tokens, dtype=np.float64)
    return prepare(batch, resolve({"kind": "grpo", **options}))


def test_split_gives_each_update_its_own_denominator():
    whole = prepared_of([2, 2, 2], aggregation="token_mean")
    parts = split(whole, 2)
    assert [p.batch.group_ids for p in parts] == [("g0", "g1"), ("g2",)]
    assert [(p.update, p.updates) for p in parts] == [(0, 2), (1, 2)]
    for part in parts:
        weight = part.streams[0].weight_T
        assert weight.sum() == pytest.approx(1.0)
        assert np.unique(weight[weight > 0]).size == 1
    assert split(whole, 1) == [whole]
    assert len(split(whole, 99)) == 3
    with pytest.raises(AlgorithmError, match="into 0 updates"):
        split(whole, 0)


def test_an_update_without_signal_is_empty():
    groups = [group("a", answer(1, 1.0), answer(1, 0.0, 1)), group("b", answer(1, 1.0), answer(1, 1.0, 1))]
    first, second = split(prepare(collate(groups), resolve("grpo")), 2)
    assert (first.empty, second.empty) == (False, True)
    assert second.counters["groups_zero_advantage"] == 1


@given(st.lists(st.integers(2, 5), min_size=1, max_size=7), st.integers(1, 8))
def test_split_cuts_every_column_at_the_same_places(sizes, n):
    whole = prepared_of(sizes)
    parts = split(whole, n)
    for name in ("ids_T", "position_T", "reward_N", "logprob_T", "row_length_R", "attempt_N", "kind_G"):
        joined = np.concatenate([getattr(p.batch, name) for p in parts])
        np.testing.assert_array_equal(joined, getattr(whole.batch, name))
    annotated = np.concatenate([p.batch.annotations["proximal_logp"] for p in parts])
    np.testing.assert_array_equal(annotated, whole.batch.annotations["proximal_logp"])
    advantage = np.concatenate([p.streams[0].columns["advantage"] for p in parts])
    np.testing.assert_allclose(advantage, whole.streams[0].columns["advantage"])
    for part in parts:
        again = collate([])  # the table's own invariants hold in each piece
        batch = part.batch
        assert batch.row_start_R.tolist() == (np.cumsum(batch.row_length_R) - batch.row_length_R).tolist()
        assert batch.row_T.tolist() == np.repeat(np.arange(batch.rows), batch.row_length_R).tolist()
        assert batch.rollout_ids == tuple(
            f"{batch.group_ids[g]}#{a}" for g, a in zip(batch.group_N, batch.attempt_N, strict=True)
        )
        assert again.tokens == 0
    assert sum((p.batch.group_ids for p in parts), ()) == whole.batch.group_ids
