"""Returns and generalised advantages: golden numbers, tool spans, turns, and a plain loop beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, make_part, prepare, resolve
from trivet.algorithms.credit.returns import GAE, Returns, Steps, rewards_of
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

NAN = float("nan")


def with_values(batch: Any, values: Any) -> Any:
    """The batch with `values` at its trained tokens, NaN elsewhere, as a critic annotates it."""
    column = np.full(batch.tokens, np.nan, np.float32)
    column[batch.train_T > 0] = values
    batch.annotations["value"] = column
    return batch


def trained(batch: Any, column_T: np.ndarray) -> list[float]:
    return column_T[batch.train_T > 0].tolist()


def one_group(*rollouts: Rollout) -> Any:
    return collate([Group("g", IssueKey("g", 0), list(rollouts))])


def test_returns_across_a_tool_span(batch_of):
    # Two turns of one token, an inserted token between: rewards [0, 0, 1], mask [1, 0, 1], gamma 0.5.
    # G at the last = 1; the inserted token takes no time, so G at the first = 0 + 0.5 * 1 = 0.5.
    batch = batch_of([1.0], lengths=(1, 1))
    columns = Returns(gamma=0.5, whiten=False)(batch)
    assert columns["advantage"].tolist() == pytest.approx([NAN, NAN, 0.5, NAN, 1.0], nan_ok=True)
    assert columns["return"].tolist() == pytest.approx([NAN, NAN, 0.5, NAN, 1.0], nan_ok=True)


def test_gae_by_hand(batch_of):
    # values 0.5, 0.25, 1; reward 2 at the end; gamma 0.5, lam 0.5, so gamma * lam = 0.25.
    # delta_3 = 2 - 1 = 1;                         A_3 = 1
    # delta_2 = 0.5 * 1 - 0.25 = 0.25;             A_2 = 0.25 + 0.25 * 1 = 0.5
    # delta_1 = 0.5 * 0.25 - 0.5 = -0.375;         A_1 = -0.375 + 0.25 * 0.5 = -0.25
    # returns = A + V = 0.25, 0.75, 2
    batch = with_values(batch_of([2.0], lengths=(2, 1)), [0.5, 0.25, 1.0])
    columns = GAE(gamma=0.5, lam=0.5, whiten=False)(batch)
    assert trained(batch, columns["advantage"]) == pytest.approx([-0.25, 0.5, 1.0])
    assert trained(batch, columns["return"]) == pytest.approx([0.25, 0.75, 2.0])


def test_the_ends_of_lambda(batch_of):
    batch = with_values(batch_of([1.0, 0.0], lengths=(3,)), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    whole = GAE(lam=1.0, whiten=False)(batch)["advantage"]
    assert trained(batch, whole) == pytest.approx([0.9, 0.8, 0.7, -0.4, -0.5, -0.6], rel=1e-5)  # G - V
    step = GAE(lam=0.0, whiten=False)(batch)["advantage"]
    assert trained(batch, step) == pytest.approx([0.1, 0.1, 0.7, 0.1, 0.1, -0.6], rel=1e-5)  # V' - V, r - V


def test_a_cut_off_end(make_rollout):
    cut = make_rollout(0.0, (2,), termination=Termination.LENGTH)
    ended = make_rollout(0.0, (2,), attempt=1)
    batch = with_values(one_group(cut, ended), [0.5, 1.0, 0.5, 1.0])
    plain = GAE(lam=0.0, gamma=0.5, whiten=False)(batch)["advantage"]
    assert trained(batch, plain) == pytest.approx([0.0, -1.0, 0.0, -1.0])
    # bootstrapped: after the cut the last estimate stands, delta = 0 + 0.5 * 1 - 1
    more = GAE(lam=0.0, gamma=0.5, whiten=False, bootstrap=True)(batch)["advantage"]
    assert trained(batch, more) == pytest.approx([0.0, -0.5, 0.0, -1.0])


def turns(rewards: list[float | None], reward: float, train: list[float] | None = None) -> Rollout:
    """Turns of two tokens with a reward each (None: none), a tool's token between."""
    trace = Trace()
    node = trace.add(-1, [1, 2])
    for i, own in enumerate(rewards):
        if i:
            node = trace.add(node, [3])
        node = trace.add_sampled(node, [4, 5], [-1.0, -1.0], 0)
        trace.nodes[node].reward = own
    return Rollout(Task("t", (Message("user", "?"),)), trace, Scored(reward), Termination.FINISHED)


def test_rewards_of_turns_lie_at_their_last_tokens():
    batch = one_group(turns([0.5, None, 0.25], 1.0), turns([None, 2.0, None], 0.0))
    reward = rewards_of(batch, Steps.of(batch))
    assert reward.tolist() == [0, 0.5, 0, 0, 0, 1.25, 0, 0, 0, 2.0, 0, 0]
    # gamma 1: to go 1.75 up to the first turn's end, then 1.25
    returns = Returns(whiten=False)(batch)["return"]
    assert trained(batch, returns) == [1.75, 1.75, 1.25, 1.25, 1.25, 1.25, 2, 2, 2, 2, 0, 0]


def test_a_turn_of_which_nothing_is_trained_pays_the_step_before_it():
    batch = one_group(turns([0.5, 0.25], 1.0), turns([0.5, None], 0.0))
    for rollout, turn in ((0, 1), (1, 0)):
        batch.train_T[(batch.rollout_T == rollout) & (batch.turn_T == turn)] = 0
    # rollout 0: steps of turn 0 only: its own 0.5, turn 1's 0.25, and the end's 1.0 at its last step.
    # rollout 1: turn 0 has no step before it, so its 0.5 is nobody's.
    assert rewards_of(batch, Steps.of(batch)).tolist() == [0.0, 1.75, 0.0, 0.0]


def test_rows_of_a_rollout_follow_each_other():
    trace = Trace()
    root = trace.add(-1, [1, 2])
    trace.add_sampled(root, [4, 5], [-1.0, -1.0], 0)
    trace.add_sampled(trace.add(root, [3]), [6], [-1.0], 0)  # another branch from the same root
    rollout = Rollout(Task("t", (Message("user", "?"),)), trace, Scored(1.0), Termination.FINISHED)
    batch = one_group(rollout)
    assert batch.rows == 2
    assert trained(batch, Returns(gamma=0.5, whiten=False)(batch)["return"]) == [0.25, 0.5, 1.0]


def test_what_has_no_reward_has_no_advantage(make_rollout):
    lost = make_rollout(1.0, (2,), termination=Termination.ABORTED)
    batch = with_values(one_group(make_rollout(None), make_rollout(1.0), lost), 0.0)
    for credit in (Returns(), GAE()):
        for column in credit(batch).values():
            assert np.isfinite(column).tolist() == [False] * 6 + [True, True] + [False] * 4


def test_the_penalty_of_distance_is_in_the_reward_and_in_the_returns(batch_of):
    batch = with_values(batch_of([1.0], lengths=(2,)), [0.0, 0.0])
    batch.annotations |= {
        "proximal_logp": np.asarray([NAN, NAN, -1.0, -2.0]),
        "ref_logp": np.asarray([NAN, NAN, -1.5, -1.0]),
    }
    # r_1 = -0.1 (-1 + 1.5) = -0.05; r_2 = 1 - 0.1 (-2 + 1) = 1.1; to go 1.05, 1.1
    credit = make_part("credit", {"kind": "gae", "kl": 0.1, "lam": 1.0, "whiten": False})
    assert credit.needs == {"value", "ref_logp", "proximal_logp"}
    columns = credit(batch)
    assert trained(batch, columns["advantage"]) == pytest.approx([1.05, 1.1])
    assert trained(batch, columns["return"]) == pytest.approx([1.05, 1.1])


def test_whitening_is_over_all_trained_tokens(batch_of):
    batch = with_values(batch_of([1.0, 0.0], [3.0]), np.arange(6.0))
    raw, white = (GAE(whiten=w)(batch)["advantage"][batch.train_T > 0] for w in (False, True))
    assert white.mean() == pytest.approx(0, abs=1e-12)
    assert white.std(ddof=1) == pytest.approx(1)
    assert white == pytest.approx((raw - raw.mean()) / raw.std(ddof=1))
    assert GAE()(batch)["return"].tolist() == pytest.approx(GAE(whiten=False)(batch)["return"], nan_ok=True)


def test_equal_returns_whiten_to_exactly_zero(batch_of):
    batch = batch_of([0.1 + 0.2, 0.3], [0.3])
    assert set(trained(batch, Returns()(batch)["advantage"])) == {0.0}


def test_a_value_that_is_not_there_is_refused(batch_of):
    batch = with_values(batch_of([1.0, 0.0]), [0.0, NAN, 0.0, 0.0])
    with pytest.raises(AlgorithmError, match=r"value is not a finite number at 1 trained tokens.*'g0#0'"):
        GAE()(batch)


def test_a_batch_without_steps(batch_of):
    batch = with_values(batch_of([None, None]), 0.0)
    assert np.isnan(GAE()(batch)["advantage"]).all()


rollouts = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=1, max_size=4),
        st.none() | st.floats(-3, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    rollouts=rollouts,
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    bootstrap=st.booleans(),
    seed=st.integers(0, 9),
)
def test_gae_is_the_plain_loop(make_rollout, rollouts, gamma, lam, bootstrap, seed):
    made = [
        make_rollout(r, lengths, attempt=i, termination=Termination.LENGTH if cut else Termination.FINISHED)
        for i, (lengths, r, cut) in enumerate(rollouts)
    ]
    batch = one_group(*made)
    rng = np.random.default_rng(seed)
    turn = rng.integers(0, 2, len(batch.turn_reward_W)) * rng.normal(size=len(batch.turn_reward_W))
    batch.turn_reward_W[:] = turn
    with_values(batch, rng.normal(size=int((batch.train_T > 0).sum())))
    got = GAE(gamma=gamma, lam=lam, bootstrap=bootstrap, whiten=False)(batch)
    advantage = np.full(batch.tokens, np.nan)
    for n, (_, reward, cut) in enumerate(rollouts):
        steps = np.flatnonzero((batch.rollout_T == n) & (batch.train_T > 0))
        if reward is None:
            continue
        value = batch.annotations["value"][steps].astype(float)
        last, carry = (value[-1] if cut and bootstrap else 0.0), 0.0
        for k in reversed(range(len(steps))):
            w = batch.turn_index_T[steps[k]]
            ends = k == len(steps) - 1 or batch.turn_index_T[steps[k + 1]] != w
            r = (turn[w] if ends else 0.0) + (reward if k == len(steps) - 1 else 0.0)
            following = value[k + 1] if k + 1 < len(steps) else last
            carry = r + gamma * following - value[k] + gamma * lam * carry
            advantage[steps[k]] = carry
    assert got["advantage"] == pytest.approx(advantage, abs=1e-9, nan_ok=True)
    assert got["return"] == pytest.approx(advantage + batch.annotations["value"], abs=1e-6, nan_ok=True)


def test_ppo_trains_a_value_where_there_is_a_return(make_rollout):
    batch = with_values(one_group(make_rollout(1.0), make_rollout(None, attempt=1)), 0.0)
    prepared = prepare(batch, resolve({"kind": "ppo", "credit": {"lam": 1.0}}))
    policy, critic = prepared.streams
    assert (policy.spec.model, critic.spec.model) == ("policy", "critic")
    known = (batch.rollout_T == 0) & (batch.train_T > 0)
    assert critic.active_T.tolist() == known.tolist()
    assert critic.weight_T.sum() == pytest.approx(1)
    # Equal returns: the policy has nothing to learn, the critic has.
    assert not policy.active_T.any()
    assert not prepared.empty
