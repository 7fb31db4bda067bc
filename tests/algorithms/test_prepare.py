"""Masks, weights, streams, and what is said when there is nothing to train on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms import (
    AlgorithmError,
    NothingToTrain,
    Part,
    make_part,
    prepare,
    register_mask,
    resolve,
)
from trivet.algorithms.masks import staleness_T
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace, Unscored

AGGREGATIONS = (
    "token_mean",
    "sequence_mean",
    "sequence_sum",
    {"kind": "fixed", "length": 8},
    {"kind": "attempt_mean", "floor": 3},
)


def weights(batch, aggregation, mask_T=None):
    mask_T = batch.train_T.astype(np.float64) if mask_T is None else mask_T
    return make_part("aggregation", aggregation)(batch, mask_T)


def two(make_rollout, make_group):
    """Answers of 1 and 3 tokens, advantages +1 and -1 (rewards 2 and 0, mean only)."""
    return collate([make_group("g", [make_rollout(2.0, (1,)), make_rollout(0.0, (3,), attempt=1)])])


def test_weights_by_hand(make_rollout, make_group):
    batch = two(make_rollout, make_group)
    trained = batch.train_T > 0

    def of(aggregation):
        return weights(batch, aggregation)[trained].tolist()

    assert of("token_mean") == [0.25] * 4
    assert of("sequence_mean") == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert of("sequence_sum") == [0.5] * 4
    assert of({"kind": "fixed", "length": 8}) == [1 / 16] * 4
    assert of("attempt_mean") == of("sequence_mean")
    assert of({"kind": "attempt_mean", "floor": 2}) == pytest.approx([1 / 4, 1 / 6, 1 / 6, 1 / 6])


def test_attempt_mean_joins_the_players_of_an_attempt(make_rollout, make_group):
    rollouts = [
        make_rollout(1.0, (1,), player="a"),
        make_rollout(1.0, (3,), player="b"),
        make_rollout(0.0, (2,), player="a", attempt=1),
    ]
    batch = collate([make_group("g", rollouts)])
    got = weights(batch, "attempt_mean")[batch.train_T > 0]
    assert got == pytest.approx([1 / 8] * 4 + [1 / 4] * 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_batch_has_zero_weights_and_no_nan(batch_of, aggregation):
    batch = batch_of([1.0, 0.0])
    assert weights(batch, aggregation, np.zeros(batch.tokens)).tolist() == [0.0] * batch.tokens


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masking_one_leaves_the_other_as_if_alone(make_rollout, make_group, aggregation):
    both = collate([make_group("g", [make_rollout(1.0, (3,)), make_rollout(0.0, (5,), attempt=1)])])
    alone = collate([make_group("g", [make_rollout(1.0, (3,))])])
    mask_T = both.train_T * (both.rollout_T == 0)
    got = weights(both, aggregation, mask_T.astype(np.float64))
    assert got[: alone.tokens].tolist() == weights(alone, aggregation).tolist()
    assert not got[alone.tokens :].any()


def test_rows_of_one_rollout_count_once():
    trace = Trace()
    for prompt, out in (([1, 2], 3), ([9, 8], 7), ([1, 2, 3, 4], 5), ([9, 8, 7, 6], 5), ([1, 2, 4, 5, 6], 7)):
        trace.add_sampled(trace.branch(prompt), [out], [-0.5], 0)
    task = Task("test", (Message("user", "?"),))
    one = Rollout(task, trace, Scored(1.0), Termination.FINISHED)
    short = Trace()
    short.add_sampled(short.add(-1, [1]), [2], [-0.1], 0)
    two = Rollout(task, short, Scored(0.0), Termination.FINISHED, attempt=1)
    batch = collate([Group("g", IssueKey("t", 0), [one, two])])
    assert batch.length_N.tolist() == [5, 1]
    prepared = prepare(batch, resolve({"kind": "grpo", "credit": "mean_only"}))
    stream = prepared.streams[0]
    got = stream.weight_T[batch.train_T > 0]
    assert got == pytest.approx([1 / 10] * 5 + [1 / 2])  # N = 2 rollouts, n = 5 and 1
    assert stream.columns["advantage"][batch.train_T > 0].tolist() == [0.5] * 5 + [-0.5]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_weights_do_not_depend_on_order_or_packing(make_rollout, make_group, lengths, random):
    rollouts = [make_rollout(float(i), n, attempt=i, id=f"r{i}") for i, n in enumerate(lengths)]
    mixed = list(rollouts)
    random.shuffle(mixed)
    together = collate([make_group("g", rollouts)])
    apart = collate([make_group(r.id, [r]) for r in mixed])
    for aggregation in AGGREGATIONS:
        first, second = weights(together, aggregation), weights(apart, aggregation)
        for n, rollout in enumerate(rollouts):
            m = [r.id for r in mixed].index(rollout.id)
            np.testing.assert_allclose(
                first[together.rollout_T == n], second[apart.rollout_T == m], rtol=1e-12
            )


def test_unscored_aborted_and_baseline_are_left_out(make_rollout, make_group):
    rollouts = [
        make_rollout(1.0),
        make_rollout(0.0, attempt=1),
        make_rollout(None, attempt=2),
        make_rollout(0.5, attempt=3, termination=Termination.ABORTED),
        make_rollout(0.5, attempt=4, role="baseline"),
    ]
    prepared = prepare(collate([make_group("g", rollouts)]), resolve("grpo"))
    weighed = np.unique(prepared.batch.rollout_T[prepared.streams[0].weight_T > 0])
    assert weighed.tolist() == [0, 1]
    assert prepared.streams[0].weight_T.sum() == pytest.approx(1.0)
    counters = prepared.counters
    assert counters["rollouts_unscored"] == counters["rollouts_aborted"] == counters["rollouts_baseline"] == 1
    assert counters["masked_tokens/unscored"] == counters["masked_tokens/aborted"] == 2
    assert counters["masked_tokens/baseline"] == 2
    assert counters["masked_tokens/no_advantage"] == counters["masked_tokens/no_stream"] == 0
    assert counters["trained_tokens"] == 4
    assert prepared.row_active_R.tolist() == [True, True, False, False, False]


def test_zero_advantage_groups_stay_in_the_denominator_but_are_not_forwarded(batch_of):
    prepared = prepare(batch_of([1.0, 0.0], [1.0, 1.0]), resolve("grpo"))
    stream = prepared.streams[0]
    assert prepared.row_active_R.tolist() == [True, True, False, False]
    assert stream.weight_T[prepared.batch.train_T > 0] == pytest.approx([1 / 8] * 8)
    assert not stream.active_T[prepared.batch.group_N[prepared.batch.rollout_T] == 1].any()
    assert prepared.counters["groups_zero_advantage"] == 1
    assert prepared.counters["trained_tokens"] == 8
    assert prepared.counters["active_tokens"] == 4


def test_truncated_rollouts_are_compared_and_optionally_masked(make_rollout, make_group):
    rollouts = [
        make_rollout(1.0),
        make_rollout(0.0, attempt=1, termination=Termination.LENGTH),
        make_rollout(0.5, attempt=2, termination=Termination.TURNS),
    ]
    batch = collate([make_group("g", rollouts)])
    on = prepare(batch, resolve({"kind": "grpo", "credit": "mean_only", "masks": ["truncated"]}))
    off = prepare(batch, resolve({"kind": "grpo", "credit": "mean_only"}))
    assert np.unique(batch.rollout_T[on.streams[0].weight_T > 0]).tolist() == [0]
    assert on.streams[0].columns["advantage"][on.trained_T].tolist() == [0.5, 0.5]
    assert on.counters["masked_tokens/truncated"] == 4
    assert on.counters["masked_rollouts/truncated"] == 2
    assert on.counters["truncated_share"] == off.counters["truncated_share"] == pytest.approx(2 / 3)
    assert off.counters["trained_tokens"] == 6


@register_mask("test_attempt_is")
def attempt_is(batch, *, number: int):
    return batch.attempt_N != number


@register_mask("baseline")
def a_name_trivet_uses_itself(batch):
    return np.ones(batch.rollouts, bool)


@register_mask("test_share")
def share(batch):
    return np.full(batch.rollouts, 0.5)


def test_one_mask_twice_and_masks_named_like_our_own(make_rollout, make_group):
    roles = ("train", "train", "train", "baseline")
    rollouts = [make_rollout(float(i), attempt=i, role=role) for i, role in enumerate(roles)]
    twice = [{"kind": "test_attempt_is", "number": n} for n in (0, 2)]
    batch = collate([make_group("g", rollouts)])
    prepared = prepare(batch, resolve({"kind": "grpo", "masks": [*twice, "baseline"]}))
    assert np.unique(batch.rollout_T[prepared.mask_T > 0]).tolist() == [1]
    assert prepared.counters["masked_tokens/test_attempt_is"] == 4
    assert prepared.counters["masked_rollouts/test_attempt_is"] == 2
    assert prepared.counters["masked_tokens/baseline"] == 2


def test_a_mask_is_yes_or_no(batch_of):
    with pytest.raises(AlgorithmError, match=r"mask 'test_share' must return booleans.*float64"):
        prepare(batch_of([0.0, 1.0]), resolve({"kind": "grpo", "masks": ["test_share"]}))


def test_credit_may_return_any_mapping(batch_of):
    from types import MappingProxyType

    def credit(batch):
        return MappingProxyType({"advantage": batch.reward_N - 0.5, "more": batch.reward_N})

    algorithm = replace(resolve("grpo"), credit=Part("credit", "mine", credit, {}))
    assert set(prepare(batch_of([0.0, 1.0]), algorithm).columns) == {"advantage", "more"}


def test_stale_turns_are_masked_and_the_rollout_stays_in_the_baseline(make_rollout, make_group):
    rollouts = [
        make_rollout(1.0, (2, 2), versions=(3, 7)),
        make_rollout(0.0, (1, 3), attempt=1, versions=(2, 3)),
        make_rollout(0.0, (2,), attempt=2, versions=(9,)),
    ]
    batch = collate([make_group("g", rollouts)])
    prepared = prepare(
        batch, resolve({"kind": "grpo", "credit": "mean_only"}), current_version=9, max_staleness=2
    )
    kept = prepared.streams[0].weight_T > 0
    assert np.unique(np.stack([batch.rollout_T, batch.turn_T])[:, kept], axis=1).T.tolist() == [
        [0, 1],
        [2, 0],
    ]
    assert prepared.counters["masked_tokens/stale"] == 2 + 4
    assert prepared.counters["masked_rollouts/stale"] == 1
    assert prepared.counters["staleness_max"] == 7
    assert prepared.counters["staleness_mean"] == pytest.approx((2 * 6 + 2 * 2 + 7 + 3 * 6 + 0) / 10)
    assert prepared.streams[0].columns["advantage"][kept] == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])


def test_a_turn_is_as_old_as_its_oldest_token_and_distance_follows_the_line():
    trace = Trace()
    trace.add_sampled(trace.add(-1, [1]), [2, 3], [-0.1, -0.1], [4, 6])
    rollout = Rollout(Task("t", (Message("user", "?"),)), trace, Scored(1.0), Termination.FINISHED)
    batch = collate([Group("g", IssueKey("t", 0), [rollout])])
    assert staleness_T(batch, 6).tolist() == [0, 2, 2]
    # Versions 4 and 6 are neighbours on the line when 5 was rolled back.
    assert staleness_T(batch, 6, {4: 1, 6: 0}.__getitem__).tolist() == [0, 1, 1]


def test_nothing_to_train_says_why(batch_of):
    with pytest.raises(
        NothingToTrain, match=r"2 groups, 6 rollouts.*1 unscored: judge_down.*5 zero advantage"
    ) as e:
        prepare(batch_of([1.0, 1.0, 1.0], [0.0, 0.0, None]), resolve("grpo"))
    assert e.value.solve_rate == {"0": 1, "1": 1}
    assert e.value.causes == {"zero advantage": 5, "unscored: judge_down": 1}
    assert e.value.counters["groups_zero_advantage"] == 2


def test_all_unscored_is_nothing_to_train(batch_of):
    with pytest.raises(NothingToTrain, match="no reward: 1"):
        prepare(batch_of([None, None]), resolve("grpo"))


def test_all_truncated_is_nothing_to_train(batch_of):
    batch = batch_of([1.0, 0.0], termination=Termination.LENGTH)
    with pytest.raises(NothingToTrain, match="2 truncated"):
        prepare(batch, resolve({"kind": "grpo", "masks": ["truncated"]}))


def test_rewards_outside_the_unit_interval_have_a_histogram(batch_of):
    with pytest.raises(NothingToTrain) as e:
        prepare(batch_of([-3.0, -3.0], [7.0, 7.0]), resolve("grpo"))
    assert sum(e.value.solve_rate.values()) == 2


def supervised(lengths_weights, make_group):
    """Examples: a prompt token, then answer tokens with a loss weight each."""
    groups = []
    for i, train in enumerate(lengths_weights):
        trace = Trace()
        trace.add(trace.add(-1, [1]), [5] * len(train), train=np.asarray(train, np.float32))
        task = Task("sft", (Message("user", str(i)),))
        rollout = Rollout(task, trace, Unscored("supervised"), Termination.FINISHED, source="expert")
        groups.append(make_group(f"s{i}", [rollout], "sft"))
    return collate(groups)


def test_sft_weights(make_group):
    batch = supervised([[1, 1], [0, 2, 1, 1]], make_group)
    token = prepare(batch, resolve("sft"))
    assert token.streams[0].weight_T.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 0, 0, 2 / 6, 1 / 6, 1 / 6])
    sequence = prepare(batch, resolve({"kind": "sft", "aggregation": "sequence_mean"}))
    assert sequence.streams[0].weight_T.tolist() == pytest.approx(
        [0, 1 / 4, 1 / 4, 0, 0, 1 / 4, 1 / 8, 1 / 8]
    )
    assert token.trained_T.tolist() == [False, True, True, False, False, True, True, True]
    assert "rollouts_unscored" not in token.counters
    assert resolve("sft").needs == frozenset()


def test_sft_with_nothing_marked(make_group):
    with pytest.raises(NothingToTrain, match="1 no trained token"):
        prepare(supervised([[0, 0]], make_group), resolve("sft"))


def test_kinds_must_fit(batch_of, make_group):
    with pytest.raises(AlgorithmError, match=r"'g0' is of kind 'rollout'.*\['sft'\]"):
        prepare(batch_of([1.0, 0.0]), resolve("sft"))
    with pytest.raises(AlgorithmError, match="kind 'sft'"):
        prepare(supervised([[1]], make_group), resolve("grpo"))


def test_foreign_tokens_need_a_stream_without_ratio(make_rollout, make_group):
    trace = Trace()
    trace.add(trace.add(-1, [1]), [5, 6], train=1.0)
    expert = make_rollout(1.0, source="expert", id="x9")
    expert.trace = trace
    batch = collate([make_group("g", [expert, make_rollout(0.0, attempt=1)])])
    for spec in ("grpo", {"kind": "grpo", "proximal": "behaviour"}):
        with pytest.raises(
            AlgorithmError, match=r"2 trained tokens have no behaviour.*'x9' \(source 'expert'\)"
        ):
            prepare(batch, resolve(spec))


def test_max_staleness_needs_a_version(batch_of):
    with pytest.raises(AlgorithmError, match="current_version"):
        prepare(batch_of([1.0, 0.0]), resolve("grpo"), max_staleness=1)


@pytest.mark.parametrize("reward", [-0.1, 1.1, 1.7e308])
def test_means_that_differ_by_rounding_have_a_histogram(batch_of, reward):
    """Three and eight times -0.1 have means one bit apart: no range to cut into five."""
    with pytest.raises(NothingToTrain) as caught:
        prepare(batch_of([reward] * 3, [reward] * 8), resolve("grpo"))
    assert sum(caught.value.solve_rate.values()) == 2


@pytest.mark.parametrize(
    "spec", ["reinforce", {"kind": "grpo", "credit": {"kind": "returns", "whiten": False}}]
)
def test_advantages_beyond_float32_are_refused(batch_of, spec):
    """They would be infinite in the loss; three bad updates later the learning rate would be blamed."""
    with pytest.raises(AlgorithmError, match=r"more than the loss can hold.*1e\+300"):
        prepare(batch_of([1e300, 0.0]), resolve(spec))
