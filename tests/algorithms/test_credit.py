"""Advantages against numbers worked by hand, and what must hold for any rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms.base import Batch
from trivet.algorithms.credit import GroupNormalised, GroupStack, LeaveOneOut, MeanOnly, lift
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace, Unscored


def table(reward_N, group_N=None, player_N=None) -> Batch:
    """A batch with rollouts but no tokens: all that credit over rewards looks at."""
    reward_N = np.asarray(reward_N, np.float64)
    n = len(reward_N)
    group_N = np.zeros(n, np.int64) if group_N is None else np.asarray(group_N)
    player_N = np.zeros(n, np.int64) if player_N is None else np.asarray(player_N)
    empty = collate([])
    return replace(
        empty,
        reward_N=reward_N,
        raw_reward_N=reward_N,
        group_N=group_N,
        player_N=player_N,
        termination_N=np.zeros(n, np.int8),
        role_N=np.zeros(n, np.int8),
        length_N=np.full(n, 10),
        players=tuple(f"p{i}" for i in range(int(player_N.max(initial=0)) + 1)),
        group_ids=tuple(f"g{i}" for i in range(int(group_N.max(initial=-1)) + 1)),
    )


def test_leave_one_out_with_std_gives_the_plain_difference_to_the_lone_member():
    got = LeaveOneOut(normalise=True)(table([0.35] * 7 + [0.0]))
    assert got[-1] == pytest.approx(-0.35, abs=1e-12)
    # The seven others: six 0.35 and one 0 have mean 0.3 and std (n - 1) 0.35 / sqrt(7).
    assert got[:7] == pytest.approx([0.05 / (0.35 / np.sqrt(7))] * 7, rel=1e-12)


def test_leave_one_out_in_float32_rewards_too():
    rewards = np.asarray([0.35] * 7 + [0.0], np.float32)
    assert LeaveOneOut(normalise=True)(table(rewards))[-1] == pytest.approx(-0.35, abs=1e-7)


def test_leave_one_out_by_hand():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert LeaveOneOut()(table([1, 2, 6])).tolist() == [-3.0, -1.5, 4.5]


@pytest.mark.parametrize("credit", [GroupNormalised(), GroupNormalised("population"), MeanOnly()])
@pytest.mark.parametrize("n", [2, 7, 12, 16, 100])
@pytest.mark.parametrize("value", [0.1, 0.2, 0.3, 1 / 3, 1e-30, -0.7])
def test_equal_rewards_are_exactly_zero(credit, n, value):
    assert credit(table([value] * n)).tolist() == [0.0] * n


@pytest.mark.parametrize(
    "credit",
    [GroupNormalised(), GroupNormalised("population"), LeaveOneOut(), LeaveOneOut(True), MeanOnly()],
)
def test_a_rounding_of_the_rewards_is_no_signal(credit):
    """0.1 + 0.2 and 0.3 differ in the last bit; divided by their spread that would be +-0.7."""
    assert 0.1 + 0.2 != 0.3
    assert credit(table([0.1 + 0.2, 0.3, 0.3])).tolist() == [0.0] * 3
    assert np.all(credit(table([0.3 + 1e-12, 0.3])) != 0)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("value", "n"), [(0.1, 7), (0.2, 7), (0.3, 12)])
def test_equal_rewards_are_exactly_zero_left_one_out(normalise, value, n):
    assert LeaveOneOut(normalise)(table([value] * n)).tolist() == [0.0] * n


@pytest.mark.parametrize("credit", [GroupNormalised(), MeanOnly(), LeaveOneOut(), LeaveOneOut(True)])
def test_unequal_groups_and_a_group_of_one(credit):
    got = credit(table([1, 1, 1, 0, 0, 5], [0, 0, 0, 1, 1, 2]))
    assert got.tolist() == [0.0] * 6


def test_lone_success_at_sixteen():
    for gap in (1.0, 0.01, 1e-12, 50.0, 1e-200, 1e200):
        got = GroupNormalised()(table([gap] + [0.0] * 15))
        assert got[0] == pytest.approx(3.75, rel=1e-9)
        assert got[1:] == pytest.approx([-0.25] * 15, rel=1e-9)
    assert GroupNormalised("population")(table([1.0] + [0.0] * 15))[0] == pytest.approx(np.sqrt(15))


@pytest.mark.parametrize("k", range(1, 16))
def test_k_successes_of_sixteen(k):
    got = GroupNormalised()(table([1.0] * k + [0.0] * (16 - k)))
    assert got[0] == pytest.approx(np.sqrt((16 - k) * 15 / (k * 16)))


@pytest.mark.parametrize("credit", [GroupNormalised(), MeanOnly(), LeaveOneOut(), LeaveOneOut(True)])
def test_unscored_leave_before_the_mean(credit):
    got = credit(table([np.nan, -1, -1, np.nan]))
    assert np.isnan(got[[0, 3]]).all()
    assert got[[1, 2]].tolist() == [0.0, 0.0]


def test_players_are_not_compared_with_each_other():
    got = MeanOnly()(table([0, 1, 10, 14], [0, 0, 0, 0], [0, 1, 0, 1]))
    assert got.tolist() == [-5.0, -6.5, 5.0, 6.5]


def test_aborted_leave_and_baseline_counts(make_rollout, make_group):
    rollouts = [
        make_rollout(1.0),
        make_rollout(0.0, role="baseline"),
        make_rollout(0.5, termination=Termination.ABORTED),
    ]
    got = MeanOnly()(collate([make_group("g", rollouts)]))
    assert got[:2].tolist() == [0.5, -0.5]
    assert np.isnan(got[2])


def test_lift_calls_once_for_all_groups():
    calls = []

    def rank(reward_GK, mask_GK):
        calls.append(reward_GK.shape)
        return np.where(mask_GK, reward_GK * 2, 0)

    got = lift(rank)(table([1, 2, 3], [0, 1, 1]))
    assert calls == [(2, 2)]
    assert got.tolist() == [2.0, 4.0, 6.0]


def test_stack_keeps_what_it_is_given_apart():
    stack = GroupStack.of(table([1, 2, 3, 4], [0, 1, 0, 1]))
    assert stack.index_GK.tolist() == [[0, 2], [1, 3]]


groups = st.lists(
    st.lists(st.one_of(st.none(), st.floats(-4, 4, width=16)), min_size=1, max_size=6), min_size=1, max_size=5
)


def _table(lists) -> Batch:
    reward = [np.nan if r is None else r for rewards in lists for r in rewards]
    return table(reward, np.repeat(np.arange(len(lists)), [len(x) for x in lists]))


@settings(max_examples=60, deadline=None)
@given(groups, st.floats(0.25, 8), st.floats(-8, 8))
def test_normalised_credit_ignores_shift_and_scale(lists, scale, shift):
    batch = _table(lists)
    moved = replace(batch, reward_N=batch.reward_N * scale + shift)
    for credit in (GroupNormalised(), GroupNormalised("population")):
        np.testing.assert_allclose(credit(batch), credit(moved), rtol=1e-6, atol=1e-9)
    shifted = replace(batch, reward_N=batch.reward_N + shift)
    for credit in (MeanOnly(), LeaveOneOut()):
        np.testing.assert_allclose(credit(batch), credit(shifted), atol=1e-9)
        np.testing.assert_allclose(credit(batch) * scale, credit(moved), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(groups, st.randoms(use_true_random=False))
def test_credit_does_not_depend_on_order(lists, random):
    batch = _table(lists)
    order = list(range(batch.rollouts))
    random.shuffle(order)
    mixed = replace(batch, reward_N=batch.reward_N[order], group_N=batch.group_N[order])
    for credit in (GroupNormalised(), MeanOnly(), LeaveOneOut(), LeaveOneOut(True)):
        np.testing.assert_allclose(credit(batch)[order], credit(mixed), rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_credit_against_a_loop(lists):
    """The definition, one group at a time."""
    got_mean, got_norm, got_loo = (c(_table(lists)) for c in (MeanOnly(), GroupNormalised(), LeaveOneOut()))
    at = 0
    for rewards in lists:
        scored = [r for r in rewards if r is not None]
        for reward in rewards:
            if reward is None:
                assert np.isnan([got_mean[at], got_norm[at], got_loo[at]]).all()
            elif len(scored) == 1 or max(scored) == min(scored):
                assert (got_mean[at], got_norm[at], got_loo[at]) == (0, 0, 0)
            else:
                mean, std = np.mean(scored), np.std(scored, ddof=1)
                assert got_mean[at] == pytest.approx(reward - mean, abs=1e-9)
                assert got_norm[at] == pytest.approx((reward - mean) / std, rel=1e-6, abs=1e-9)
                others = (sum(scored) - reward) / (len(scored) - 1)
                assert got_loo[at] == pytest.approx(reward - others, abs=1e-9)
            at += 1


def test_interleaved_calls_are_one_episode_in_the_baseline():
    """Three rows of one rollout: its reward enters the group's mean once."""
    trace = Trace()
    for prompt, out in (([1, 2], 3), ([9, 8], 7), ([1, 2, 3, 4], 5), ([9, 8, 7, 6], 5), ([1, 2, 4, 5, 6], 7)):
        trace.add_sampled(trace.branch(prompt), [out], [-0.5], 0)
    task = Task("test", (Message("user", "?"),))
    first = Rollout(task, trace, Scored(1.0), Termination.FINISHED)
    second = Trace()
    second.add_sampled(second.add(-1, [1]), [2], [-0.1], 0)
    other = Rollout(task, second, Scored(0.0), Termination.FINISHED, attempt=1)
    unscored = Rollout(task, second.copy(), Unscored("timeout"), Termination.FINISHED, attempt=2)
    batch = collate([Group("g", IssueKey("t", 0), [first, other, unscored])])
    assert batch.rows == 5
    assert MeanOnly()(batch)[:2].tolist() == [0.5, -0.5]
