"""Credit turn by turn: anchor states, returns over turns, and what all turns of a rollout share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms.base import Batch
from trivet.algorithms.credit import GiGPO, MeanOnly, MultiStepGRPO, lift_turns, turn_returns
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace


def played(reward, turns, *, attempt=0, player="policy") -> Rollout:
    """A rollout whose turns are (tokens, earned, state)."""
    trace = Trace()
    node = trace.add(-1, [1, 2])
    for tokens, earned, state in turns:
        node = trace.add_sampled(node, [5] * tokens, [-0.5] * tokens, 0)
        trace.nodes[node].reward, trace.nodes[node].state = earned, state
        node = trace.add(node, [3])
    task = Task("test", (Message("user", "?"),))
    return Rollout(task, trace, Scored(reward), Termination.FINISHED, attempt=attempt, player=player)


def batch_of_groups(*groups) -> Batch:
    return collate([Group(f"g{i}", IssueKey(f"g{i}", 0), list(g)) for i, g in enumerate(groups)])


def per_turn(batch: Batch, advantage_T: np.ndarray) -> list[list[float]]:
    """The advantage of each turn of each rollout; all tokens of a turn must agree."""
    out = [[] for _ in range(batch.rollouts)]
    for w, n in enumerate(batch.turn_rollout_W):
        values = np.unique(advantage_T[batch.turn_index_T == w])
        assert len(values) == 1
        out[n].append(values[0])
    return out


def test_returns_over_turns():
    batch = batch_of_groups(
        [
            played(1.0, [(1, None, None), (2, None, None), (1, None, None)]),
            played(2.0, [(1, 0.5, None), (1, 0.25, None)]),
            played(3.0, []),
        ]
    )
    # 1 back over three turns at 0.5; the rollout's 2 joins the last turn's own 0.25: 2.25, 0.5 + 0.5 * 2.25.
    assert turn_returns(batch, 0.5) == pytest.approx([0.25, 0.5, 1.0, 1.625, 2.25])
    assert turn_returns(batch, 1.0) == pytest.approx([1.0, 1.0, 1.0, 2.75, 2.25])


def test_gigpo_by_hand():
    first = played(1.0, [(2, None, "door"), (1, None, "hall")])
    second = played(0.0, [(1, None, "door"), (3, None, "door"), (1, None, "cellar")], attempt=1)
    batch = batch_of_groups([first, second])
    # A_E = +-0.5. Returns at gamma 0.5: 0.5, 1 and 0, 0, 0. At "door": 0.5, 0, 0, mean 1/6. The other
    # states are alone.
    got = GiGPO(gamma=0.5)(batch)
    assert per_turn(batch, got)[0] == pytest.approx([0.5 + 1 / 3, 0.5])
    assert per_turn(batch, got)[1] == pytest.approx([-0.5 - 1 / 6, -0.5 - 1 / 6, -0.5])
    # Divided by the std: A_E = +-0.5 / sqrt(0.5); at the door (1/3, -1/6, -1/6) / sqrt((4 + 1 + 1) / 36 / 2).
    got = GiGPO(gamma=0.5, normalise=True, omega=2.0)(batch)
    door = 1 / np.sqrt(12)
    assert per_turn(batch, got)[0] == pytest.approx([np.sqrt(0.5) + 2 * (1 / 3) / door, np.sqrt(0.5)])
    assert per_turn(batch, got)[1][0] == pytest.approx(-np.sqrt(0.5) - 2 * (1 / 6) / door)


def test_gigpo_compares_states_only_within_group_and_player():
    turn = [(1, None, "door")]
    one = [played(1.0, turn, player="a"), played(0.0, turn, player="b")]
    other = [played(0.0, turn, player="a"), played(1.0, turn, player="b")]
    assert np.nanmax(np.abs(GiGPO()(batch_of_groups(one, other)))) == 0


def test_gigpo_without_states_is_mean_only():
    batch = batch_of_groups(
        [played(r, [(1, None, None)] * 2, attempt=i) for i, r in enumerate([1.0, 0.0, 0.0])]
    )
    np.testing.assert_allclose(GiGPO()(batch), MeanOnly()(batch)[batch.rollout_T])


def test_gigpo_tells_turns_apart_where_all_rollouts_end_alike():
    slow = played(1.0, [(1, None, "door"), (1, None, "door"), (1, None, "hall")])
    fast = played(1.0, [(1, None, "door")], attempt=1)
    batch = batch_of_groups([slow, fast])
    # Returns at 0.5: 0.25, 0.5 at the door of the slow one, 1 of the fast one: mean 7/12.
    first, second = per_turn(batch, GiGPO(gamma=0.5)(batch))
    assert first == pytest.approx([0.25 - 7 / 12, 0.5 - 7 / 12, 0.0])
    assert second == pytest.approx([1 - 7 / 12])


def test_turns_of_unscored_rollouts_are_in_no_baseline():
    kept = [played(1.0, [(1, None, "door")]), played(0.0, [(1, None, "door")], attempt=1)]
    lost = played(9.0, [(1, None, "door")], attempt=2)
    lost.termination = Termination.ABORTED
    alone, batch = batch_of_groups(kept), batch_of_groups([*kept, lost])
    got = GiGPO()(batch)
    np.testing.assert_allclose(got[: alone.tokens], GiGPO()(alone))
    assert np.isnan(got[alone.tokens :]).all()


def test_lift_turns_gives_other_tokens_the_rollout_value():
    batch = batch_of_groups([played(1.0, [(2, None, None), (1, None, None)])])
    # Tokens: two of the prompt, two sampled, one inserted, one sampled, one inserted.
    assert lift_turns(batch, np.asarray([7.0, 8.0]), np.asarray([5.0])).tolist() == [5, 5, 7, 7, 5, 8, 5]
    silent = batch_of_groups([played(1.0, [])])
    assert lift_turns(silent, np.zeros(0), np.asarray([5.0])).tolist() == [5.0, 5.0]


def test_multi_step_grpo_by_hand():
    groups = [
        [played(1.0, [(1, None, None)] * 4), played(0.0, [(1, None, None)] * 2, attempt=1)],
        [played(0.5, [(1, None, None)]), played(0.0, [(1, None, None)], attempt=1)],
    ]
    batch = batch_of_groups(*groups)
    half = np.sqrt(0.5)
    assert MultiStepGRPO()(batch) == pytest.approx([half, -half, half, -half])
    assert MultiStepGRPO("none")(batch) == pytest.approx([0.5, -0.5, 0.25, -0.25])
    assert MultiStepGRPO("none", per_turn=True)(batch) == pytest.approx([0.125, -0.25, 0.25, -0.25])
    # Over the batch: mean 0.375, squares 0.390625 + 2 * 0.140625 + 0.015625 = 0.6875, over 3.
    std = np.sqrt(0.6875 / 3)
    assert MultiStepGRPO("batch")(batch) == pytest.approx(np.asarray([0.5, -0.5, 0.25, -0.25]) / std)


turns = st.tuples(st.integers(1, 2), st.sampled_from([None, 0.5]), st.sampled_from([None, "a", "b"]))
rollouts = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.lists(turns, max_size=4))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(rollouts, min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_gigpo_against_a_loop(groups, gamma):
    """The definition, one turn at a time."""
    built = [[played(r, t, attempt=i) for i, (r, t) in enumerate(g)] for g in groups]
    batch = batch_of_groups(*built)
    got, at = per_turn(batch, GiGPO(gamma=gamma, omega=0.5)(batch)), 0
    for group in groups:
        mean = np.mean([r for r, _ in group])
        met: dict[str, list[float]] = {}
        returns = []
        for reward, steps in group:
            run = []
            for i in range(len(steps)):
                earned = [
                    (s[1] or 0.0) + (reward if j == len(steps) - 1 else 0.0) for j, s in enumerate(steps)
                ]
                run.append(sum(gamma ** (j - i) * earned[j] for j in range(i, len(steps))))
                if steps[i][2]:
                    met.setdefault(steps[i][2], []).append(run[i])
            returns.append(run)
        for (reward, steps), run in zip(group, returns, strict=True):
            for i, step in enumerate(steps):
                gap = run[i] - np.mean(met[step[2]]) if step[2] else 0.0
                assert got[at][i] == pytest.approx(reward - mean + 0.5 * gap, abs=1e-9)
            at += 1


def test_shaped_rewards_reach_the_turns():
    batch = batch_of_groups([played(1.0, [(1, None, "a")]), played(0.0, [(1, None, "a")], attempt=1)])
    shaped = replace(batch, reward_N=np.asarray([3.0, 0.0]))
    assert per_turn(shaped, GiGPO()(shaped)) == [[3.0], [-3.0]]
