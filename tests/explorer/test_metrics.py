"""Metrics of rewards, groups and rollouts: by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.explorer import reward_metrics, rollout_metrics
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace, Unscored

TASK = Task("math", (Message("user", "?"),))


def played(score, tokens=1, parts=None, termination=Termination.FINISHED, role="train"):
    trace = Trace()
    trace.add_sampled(trace.add(-1, [1, 2]), [3] * tokens, [-1.0] * tokens, 0)
    reward = Unscored("judge_down") if score is None else Scored(score, parts or {})
    return Rollout(TASK, trace, reward, termination, role=role)


def group(*rollouts):
    return Group("g", IssueKey(TASK.id, 1), list(rollouts))


def test_rewards_by_hand():
    """1, 0.9, 0 and 0.1: mean 0.5, deviation sqrt((0.25 + 0.16 + 0.25 + 0.16) / 4), half of them solved."""
    out = reward_metrics([group(played(1.0), played(0.9)), group(played(0.0), played(0.1), played(None))])
    assert out["reward/mean"] == pytest.approx(0.5)
    assert out["reward/std"] == pytest.approx(math.sqrt(0.82 / 4))
    assert out["reward/solved"] == 0.5
    assert out["reward/unscored"] == pytest.approx(1 / 5)
    assert out["reward/unscored/judge_down"] == pytest.approx(1 / 5)
    assert out["group/all_solved"] == out["group/none_solved"] == 0.5
    assert out["group/all_equal"] == 0


def test_parts_are_means_over_those_that_have_them():
    out = reward_metrics(
        [group(played(1.0, parts={"right": 1.0, "form": 0.5}), played(0.0, parts={"right": 0.0}))]
    )
    assert out["reward/part/right"] == 0.5
    assert out["reward/part/form"] == 0.5


def test_greedy_attempts_are_no_attempts():
    out = reward_metrics([group(played(0.0), played(0.0), played(1.0, role="baseline"))])
    assert out["reward/mean"] == out["reward/solved"] == 0
    assert out["group/none_solved"] == out["group/all_equal"] == 1


def test_rollouts_by_hand():
    """Lengths 1, 2, 3, 4, 10: mean 4, p50 3, p90 4 + 0.6 (10 - 4) = 7.6, two solves in 20 tokens."""
    rollouts = [
        played(1.0, 1),
        played(0.0, 2),
        played(0.89, 3),
        played(None, 4, termination=Termination.ABORTED),
        played(0.9, 10, termination=Termination.LENGTH),
    ]
    out = rollout_metrics(rollouts)
    assert out["rollout/count"] == 5
    assert out["rollout/tokens"] == 20
    assert out["rollout/length_mean"] == 4
    assert out["rollout/length_p50"] == 3
    assert out["rollout/length_p90"] == pytest.approx(7.6)
    assert out["rollout/length_max"] == 10
    assert out["rollout/tokens_per_solve"] == 10
    assert out["rollout/truncated"] == pytest.approx(0.2)
    assert out["rollout/ended/finished"] == pytest.approx(0.6)
    assert out["rollout/ended/aborted"] == out["rollout/ended/length"] == pytest.approx(0.2)


def test_nothing_solved_has_no_price():
    assert "rollout/tokens_per_solve" not in rollout_metrics([played(0.0), played(None)])


@given(st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=1, max_size=12), st.randoms())
def test_order_does_not_matter_and_all_is_finite(scores, random):
    rollouts = [played(s, i + 1) for i, s in enumerate(scores)]
    shuffled = random.sample(rollouts, len(rollouts))
    one = reward_metrics([group(*rollouts)]) | rollout_metrics(rollouts)
    two = reward_metrics([group(*shuffled)]) | rollout_metrics(shuffled)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert math.isfinite(value)
        assert two[name] == pytest.approx(value, abs=1e-12)
    assert sum(value for name, value in one.items() if "rollout/ended/" in name) == pytest.approx(1)
