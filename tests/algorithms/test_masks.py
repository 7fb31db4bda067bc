"""Masks by hand: who may teach, and that credit has seen the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms.conftest import batch_of, make_group, make_rollout

from trivet.algorithms import AlgorithmError, resolve
from trivet.algorithms.prepare import prepare
from trivet.algorithms.registry import make_part
from trivet.trainer.batch import collate
from trivet.types import Termination


def kept(spec, batch):
    keep_N = make_part("mask", spec)(batch)
    assert keep_N.dtype == np.bool_
    return keep_N.tolist()


def test_truncated():
    rollouts = [make_rollout(1.0, termination=t, attempt=i) for i, t in enumerate(Termination)]
    expected = [not t.truncated for t in Termination]
    assert kept("truncated", collate([make_group("g", rollouts)])) == expected
    assert True in expected
    assert False in expected


def test_max_length_counts_all_rows_of_a_rollout():
    """2, 5 and 3 + 3 = 6 trained tokens; 5 is not over 5."""
    rollouts = [make_rollout(1.0, lengths, attempt=i) for i, lengths in enumerate([(2,), (5,), (3, 3)])]
    batch = collate([make_group("g", rollouts)])
    assert kept({"kind": "max_length", "tokens": 5}, batch) == [True, True, False]


def test_source():
    rollouts = [make_rollout(1.0, attempt=0), make_rollout(1.0, attempt=1, source="expert")]
    batch = collate([make_group("g", rollouts)])
    assert kept({"kind": "source", "only": ["expert"]}, batch) == [False, True]
    assert kept({"kind": "source", "only": ["policy", "expert"]}, batch) == [True, True]
    assert kept({"kind": "source", "only": ["nobody"]}, batch) == [False, False]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"above": 0.5}, [False, False, True, True]),  # the lower bound does not belong to the range
        ({"upto": 0.5}, [True, True, False, True]),  # the upper one does
        ({"above": 0.0, "upto": 0.9}, [False, True, False, True]),
    ],
)
def test_reward(bounds, expected):
    """Rewards 0, 0.5, 1 and none; what has no reward stays."""
    assert kept({"kind": "reward", **bounds}, batch_of([0.0, 0.5, 1.0, None])) == expected


def test_reward_is_the_verifiers_own():
    """A length penalty that takes a solve below the bound does not make it a failure."""
    batch = batch_of([1.0, 0.0])
    batch.reward_N = batch.reward_N - 0.7
    assert kept({"kind": "reward", "above": 0.5}, batch) == [True, False]


def test_equal_rewards():
    """0.1 + 0.2 and 0.3 are one reward; one scored attempt is equal to nothing."""
    batch = batch_of([1.0, 1.0], [0.0, 1.0], [0.1 + 0.2, 0.3], [None, 1.0], [0.0])
    assert kept("equal_rewards", batch) == [False, False, True, True, False, False, True, True, True]


def test_equal_rewards_leave_aborted_attempts_out_of_the_comparison():
    rollouts = [make_rollout(r, attempt=i) for i, r in enumerate([1.0, 1.0, 0.0])]
    rollouts[2].termination = Termination.ABORTED
    batch = collate([make_group("g", rollouts)])
    assert kept("equal_rewards", batch) == [False, False, True]


@given(st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=5), min_size=1, max_size=5))
def test_equal_rewards_of_any_groups(groups):
    batch = batch_of(*([float(r) for r in group] for group in groups))
    expected = [max(group) > min(group) for group in groups for _ in group]
    assert kept("equal_rewards", batch) == expected


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "max_length"}, "tokens"),
        ({"kind": "max_length", "tokens": 0}, "greater than 0"),
        ({"kind": "source", "only": []}, "at least 1"),
        ("reward", "set above, upto or both"),
        ({"kind": "reward", "above": 1.0, "upto": 1.0}, "nothing would be kept"),
    ],
)
def test_wrong_options_are_named(spec, said):
    with pytest.raises(AlgorithmError, match=said):
        make_part("mask", spec)


def test_the_masked_stay_in_the_baseline():
    """Rewards 0 and 1: mean 0.5, sample deviation sqrt(0.5), so +0.7071 for the solve, masked failure or
    not. Of 4 tokens 2 are trained."""
    algorithm = resolve({"kind": "grpo", "masks": [{"kind": "reward", "above": 0.5}]})
    prepared = prepare(batch_of([0.0, 1.0]), algorithm)
    (stream,) = prepared.streams
    active_T = stream.weight_T != 0
    assert active_T.sum() == 2
    assert stream.columns["advantage"][active_T] == pytest.approx([0.5**0.5] * 2)
    assert prepared.counters["masked_rollouts/reward"] == 1
    assert prepared.counters["trained_share"] == 0.5


def test_equal_groups_leave_the_denominator():
    """Two groups of two answers of two tokens, one all solved: 8 tokens share the weight, then 4 do; in both
    cases one of two groups is without advantage."""
    for masks, tokens in (([], 8), (["equal_rewards"], 4)):
        prepared = prepare(
            batch_of([1.0, 1.0], [0.0, 1.0]),
            resolve({"kind": "grpo", "aggregation": "token_mean", "masks": masks}),
        )
        weight_T = prepared.streams[0].weight_T
        assert weight_T[weight_T != 0] == pytest.approx([1 / tokens] * tokens)
        assert prepared.counters["trained_share"] == tokens / 8
        assert prepared.counters["zero_advantage_share"] == 0.5
