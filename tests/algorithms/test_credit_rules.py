"""Credit with other baselines than the group's mean: by hand, and what holds for any rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, make_part, prepare, resolve, stream_loss
from trivet.algorithms.base import Batch
from trivet.algorithms.credit import (
    OPMD,
    AsymRE,
    GroupNormalised,
    LeaveOneOut,
    MaxRL,
    MeanOnly,
    Reinforce,
    ReinforcePlusPlusBaseline,
    ReMax,
    SuccessOffset,
)
from trivet.trainer.batch import collate
from trivet.types import Termination

BY_GROUP = (
    "group_normalised",
    {"kind": "group_normalised", "std": "population"},
    "mean_only",
    "leave_one_out",
    {"kind": "leave_one_out", "normalise": True},
    "opmd",
    {"kind": "opmd", "baseline": "logavgexp", "tau": 0.3},
    {"kind": "opmd", "baseline": "pairwise"},
    "maxrl",
    "success_offset",
    "reinforce_plus_plus_baseline",
    "multi_step_grpo",
    {"kind": "multi_step_grpo", "std": "batch", "per_turn": True},
    "gigpo",
)
SHIFTS = [spec for spec in BY_GROUP if spec not in ("maxrl", "success_offset")]
SCALES = (
    "group_normalised",
    {"kind": "group_normalised", "std": "population"},
    {"kind": "multi_step_grpo", "std": "batch"},
    "maxrl",
    "reinforce_plus_plus_baseline",
)


def credit(spec, batch: Batch) -> np.ndarray:
    """The rule's advantage per rollout (these batches have rollouts of one advantage)."""
    got = make_part("credit", spec)(batch)
    if got.shape == (batch.rollouts,):
        return got
    out = np.full(batch.rollouts, np.nan)
    trained = batch.train_T > 0
    out[batch.rollout_T[trained]] = got[trained]
    return out


# -- REINFORCE -----------------------------------------------------------------------------------


def test_reinforce_by_hand(batch_of):
    batch = batch_of([1.0, 0.0], [None, 0.5, 0.5])
    np.testing.assert_array_equal(Reinforce()(batch), [1.0, 0.0, np.nan, 0.5, 0.5])
    np.testing.assert_array_equal(Reinforce(0.25)(batch), [0.75, -0.25, np.nan, 0.25, 0.25])
    other = batch_of([1.0, 1.0], [None, 0.0, 0.0])
    np.testing.assert_array_equal(Reinforce("batch")(other), [0.5, 0.5, np.nan, -0.5, -0.5])


def test_the_batch_mean_of_equal_rewards_leaves_nothing(batch_of):
    assert Reinforce("batch")(batch_of([0.1] * 3, [0.1 + 1e-17] * 4)).tolist() == [0.0] * 7


def test_plus_plus_baseline_by_hand(make_rollout, make_group):
    # Group one: rewards 1 and 0 with 1 and 3 tokens: gaps 0.5 and -0.5. Group two: 2 and 2: gaps 0, a
    # token each.
    # Over the six tokens: mean (0.5 - 1.5) / 6 = -1/6, squares 4/9 + 3/9 + 2/36 = 5/6, over 5: std sqrt(1/6).
    groups = [
        make_group("a", [make_rollout(1.0, (1,)), make_rollout(0.0, (3,), attempt=1)]),
        make_group("b", [make_rollout(2.0, (1,)), make_rollout(2.0, (1,), attempt=1)]),
    ]
    got = ReinforcePlusPlusBaseline()(batch := collate(groups))
    trained = batch.train_T > 0
    std = np.sqrt(1 / 6)
    expected = [(1 / 2 + 1 / 6) / std, *[(-1 / 2 + 1 / 6) / std] * 3, 0.0, 0.0]
    assert got[trained] == pytest.approx(expected, rel=1e-12)
    assert np.isnan(got[~trained]).all()


def test_plus_plus_baseline_keeps_what_is_never_trained_out_of_its_scale(make_rollout, make_group):
    """A greedy rollout counts in its group's mean, its tokens not in the batch's mean and std."""
    rollouts = [make_rollout(r, (n,), attempt=i) for i, (r, n) in enumerate([(1.0, 1), (0.0, 1)])]
    greedy = make_rollout(0.5, (50,), attempt=2, role="baseline")
    batch = collate([make_group("g", [*rollouts, greedy])])
    got = ReinforcePlusPlusBaseline()(batch)
    assert got[(batch.train_T > 0) & (batch.rollout_T < 2)] == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)])
    assert np.isnan(got[batch.rollout_T == 2]).all()


def test_others_that_agree_but_for_rounding_have_no_std(batch_of):
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.0]
    assert LeaveOneOut(normalise=True)(batch_of(rewards))[3] == pytest.approx(-0.3)


# -- ReMax ---------------------------------------------------------------------------------------


def test_remax_by_hand(make_rollout, make_group):
    groups = [
        make_group("a", [make_rollout(1.0), make_rollout(0.25, attempt=1, role="baseline")]),
        make_group("b", [make_rollout(1.0), make_rollout(0.5, attempt=1)]),  # no baseline
        make_group("c", [make_rollout(0.5), make_rollout(None, attempt=1, role="baseline")]),
        make_group("d", [make_rollout(0.1 + 0.2), make_rollout(0.3, attempt=1, role="baseline")]),
        make_group("e", [make_rollout(None), make_rollout(0.3, attempt=1, role="baseline")]),
    ]
    nan = np.nan
    np.testing.assert_array_equal(
        ReMax()(collate(groups)), [0.75, nan, nan, nan, nan, nan, 0.0, nan, nan, nan]
    )


def test_remax_means_over_the_scored_baselines(make_rollout, make_group):
    greedy = [
        make_rollout(0.25, attempt=1, role="baseline"),
        make_rollout(0.75, attempt=2, role="baseline"),
        make_rollout(None, attempt=3, role="baseline"),
        make_rollout(9.0, attempt=4, role="baseline", termination=Termination.ABORTED),
    ]
    assert ReMax()(collate([make_group("g", [make_rollout(1.0), *greedy])]))[0] == 0.5


def test_remax_counts_groups_without_a_baseline_and_refuses_a_batch_of_them(
    make_rollout, make_group, batch_of
):
    groups = [
        make_group("a", [make_rollout(1.0), make_rollout(0.0, attempt=1, role="baseline")]),
        make_group("b", [make_rollout(1.0), make_rollout(0.5, attempt=1)]),
    ]
    prepared = prepare(collate(groups), resolve("remax"))
    assert prepared.counters["masked_rollouts/no_advantage"] == 2
    assert prepared.counters["masked_rollouts/baseline"] == 1
    assert prepared.counters["trained_tokens"] == 2
    with pytest.raises(AlgorithmError, match="none of the 2 groups has one: an attempt"):
        ReMax()(batch_of([1.0, 0.0], [0.0, 1.0]))


# -- OPMD, AsymRE, MaxRL -------------------------------------------------------------------------


def test_opmd_by_hand(batch_of):
    batch = batch_of([1.0, 0.0, 0.0])
    assert OPMD()(batch) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    # Mean difference to the others: (1 + 1) / 2, (-1 + 0) / 2.
    assert OPMD("pairwise")(batch) == pytest.approx([1.0, -0.5, -0.5])
    # tau log((e^(1 / tau) + 2) / 3) at tau 0.5: log(9.389056 / 3) = log 3.129685 = 1.140932, half of it.
    assert OPMD("logavgexp", 0.5)(batch) == pytest.approx([0.429534, -0.570466, -0.570466], abs=1e-6)


def test_logavgexp_lies_between_the_mean_and_the_maximum(batch_of):
    batch = batch_of([3.0, 1.0, -4.0, 0.5])
    assert OPMD("logavgexp", 1e6)(batch) == pytest.approx(MeanOnly()(batch), abs=1e-4)
    assert OPMD("logavgexp", 1e-3)(batch)[0] == pytest.approx(0.0, abs=2e-3)  # tau log 4
    far = replace(batch, reward_N=np.asarray([1e6, 0.0, -1e6, 1.0]))
    assert np.isfinite(OPMD("logavgexp", 1e-3)(far)).all()


def test_asymre_leans_on_the_good(batch_of):
    batch = batch_of([1.0, 0.0], [0.5, 0.5], [1.0], [None, 1.0, 0.0])
    expected = [0.6, -0.4, 0.1, 0.1, 0.0, np.nan, 0.6, -0.4]
    np.testing.assert_allclose(AsymRE()(batch), expected, atol=1e-15)


def test_maxrl_by_hand(batch_of):
    # k = 1 of 4: 4 / 1 - 1 and -1. k = 3 of 4: 4 / 3 - 1 and -1. None solved: nothing.
    batch = batch_of([1.0, 0, 0, 0], [1.0, 1, 1, 0], [0.0, 0, 0, 0])
    assert MaxRL()(batch) == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0])


def test_maxrl_refuses_negative_rewards(batch_of):
    with pytest.raises(AlgorithmError, match=r"1 are, the first is -0.1 of rollout 'g0#1'.*mean_only"):
        MaxRL()(batch_of([1.0, -0.1]))


# -- success offset ------------------------------------------------------------------------------


def test_success_offset_with_all_solved_keeps_the_length_term(make_rollout, make_group):
    """Bonus 0.2 (1 - 1000 / 2000) = 0.1 for one, 0 for eleven: mean 0.1 / 12; (0.1 - 0.1 / 12) / 0.5."""
    rollouts = [make_rollout(1.0, (1000 if i == 0 else 2000,), attempt=i) for i in range(12)]
    got = SuccessOffset()(collate([make_group("g", rollouts)]))
    assert got[0] == pytest.approx(0.1833, abs=5e-5)
    assert got[1:] == pytest.approx([-0.0167] * 11, abs=5e-5)


def test_success_offset_by_hand(make_rollout, make_group):
    # R' = 1.5, 0.5 * 0.5 = 0.25, 0: mean 7/12, deviations 11/12, -4/12, -7/12, std sqrt(186/144/2). One solve
    # only, so b = 0.
    rollouts = [make_rollout(r, (5,), attempt=i) for i, r in enumerate([1.0, 0.5, 0.0])]
    got = SuccessOffset()(batch := collate([make_group("g", rollouts)]))
    std = np.sqrt(186 / 144 / 2)
    assert got == pytest.approx(np.asarray([11, -4, -7]) / 12 / std)
    assert SuccessOffset(std="population")(batch) == pytest.approx(got * np.sqrt(3 / 2))


def test_success_offset_adds_both_terms(make_rollout, make_group):
    # R' = 1.5, 1.5, 0: mean 1, deviations 0.5, 0.5, -1, std sqrt(1.5 / 2). b = 0.2 (1 - 4 / 8) = 0.1, 0, 0.
    rollouts = [make_rollout(r, (n,), attempt=i) for i, (r, n) in enumerate([(1.0, 4), (1.0, 8), (0.0, 20)])]
    got = SuccessOffset()(collate([make_group("g", rollouts)]))
    bonus = (np.asarray([0.1, 0, 0]) - 0.1 / 3) / 0.5
    assert got == pytest.approx(np.asarray([0.5, 0.5, -1]) / np.sqrt(0.75) + bonus)


def test_a_solve_is_told_by_the_verifier_not_by_what_shaping_left(batch_of):
    batch = batch_of([1.0, 0.0])
    shaped = replace(batch, reward_N=np.asarray([0.7, 0.0]))
    assert SuccessOffset()(shaped).tolist() == SuccessOffset()(batch).tolist()


# -- what holds for all --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", BY_GROUP, ids=str)
def test_equal_rewards_and_a_group_of_one_are_exactly_zero(batch_of, spec):
    batch = batch_of([0.1] * 7, [0.3] * 12, [0.1 + 0.2, 0.3, 0.3], [5.0], [1 / 3] * 3)
    assert credit(spec, batch).tolist() == [0.0] * batch.rollouts
    mixed = batch_of([1.0, 0.0, 0.25], [0.3] * 12, [5.0])  # the others' signal must not reach them
    assert credit(spec, mixed)[3:].tolist() == [0.0] * 13
    assert (credit(spec, mixed)[:3] != 0).any()


@pytest.mark.parametrize("spec", [*BY_GROUP, "asymre", {"kind": "reinforce", "baseline": "batch"}], ids=str)
def test_unscored_and_aborted_leave_before_any_mean(make_rollout, make_group, spec):
    kept = [make_rollout(r, attempt=i) for i, r in enumerate([1.0, 0.0, 0.25])]
    lost = [
        make_rollout(None, attempt=3),
        make_rollout(100.0, (7,), attempt=4, termination=Termination.ABORTED),
    ]
    alone = credit(spec, collate([make_group("g", kept)]))
    got = credit(spec, collate([make_group("g", [lost[0], *kept, lost[1]])]))
    assert got[1:4] == pytest.approx(alone, rel=1e-12)
    assert np.isnan(got[[0, 4]]).all()
    nothing = credit(spec, collate([make_group("g", [make_rollout(None), make_rollout(1.0, attempt=1)])]))
    assert np.isnan(nothing[0])


def test_the_unscored_of_the_golden_case(batch_of):
    for spec in (*SHIFTS, "success_offset"):
        np.testing.assert_array_equal(
            credit(spec, batch_of([None, -1.0, -1.0, None])), [np.nan, 0, 0, np.nan]
        )


@pytest.mark.parametrize("spec", [*BY_GROUP, "asymre"], ids=str)
@pytest.mark.parametrize("size", [1e-200, 1e150])
def test_extreme_rewards_stay_finite(batch_of, spec, size):
    got = credit(spec, batch_of([size, 0.0, 0.5 * size, size], [size, size]))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("spec", [*BY_GROUP, "asymre", "reinforce"], ids=str)
def test_an_empty_batch_and_one_without_scores(batch_of, spec):
    part = make_part("credit", spec)
    assert len(part(collate([]))) == 0
    assert np.isnan(part(batch_of([None, None]))).all()


rewards_of_groups = st.lists(
    st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(rewards_of_groups, st.floats(0.25, 8), st.floats(0, 8))
def test_shift_and_scale(batch_of, groups, scale, shift):
    batch = batch_of(*groups)
    moved = replace(batch, reward_N=batch.reward_N + shift)
    larger = replace(batch, reward_N=batch.reward_N * scale)
    for spec in SHIFTS:
        np.testing.assert_allclose(credit(spec, batch), credit(spec, moved), atol=1e-9)
    for spec in SCALES:
        np.testing.assert_allclose(credit(spec, batch), credit(spec, larger), atol=1e-9)
    for spec in ("mean_only", "leave_one_out", "opmd", {"kind": "opmd", "baseline": "pairwise"}, "reinforce"):
        np.testing.assert_allclose(credit(spec, batch) * scale, credit(spec, larger), atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(rewards_of_groups, st.randoms(use_true_random=False))
def test_order_does_not_matter(make_rollout, make_group, groups, random):
    def build(shuffled):
        order = list(range(len(groups)))
        members = [list(range(len(rewards))) for rewards in groups]
        for one in (order, *members) if shuffled else ():
            random.shuffle(one)
        made = [
            make_group(
                f"g{g}",
                [make_rollout(groups[g][a], (1 + a, 2), attempt=a, id=f"{g}/{a}") for a in members[g]],
            )
            for g in order
        ]
        return collate(made)

    plain, mixed = build(False), build(True)
    place = [mixed.rollout_ids.index(name) for name in plain.rollout_ids]
    for spec in (*BY_GROUP, "asymre", {"kind": "reinforce", "baseline": "batch"}):
        np.testing.assert_allclose(
            credit(spec, plain), credit(spec, mixed)[place], atol=1e-9, err_msg=str(spec)
        )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8))
@example([1.0, 1.0 + 1e-9, 1.0, 1e6])  # a member far from others that nearly agree
@example([-1e9, 1e-3, 2e-3, 3e-3])
def test_leave_one_out_against_a_loop(batch_of, rewards):
    got, divided = LeaveOneOut()(batch_of(rewards)), LeaveOneOut(True)(batch_of(rewards))
    if max(rewards) - min(rewards) <= 1e-9 * max(map(abs, rewards), default=0):
        return
    for i, reward in enumerate(rewards):
        others = np.asarray(rewards[:i] + rewards[i + 1 :])
        gap = reward - others.mean()
        size = np.abs(rewards).max()
        assert got[i] == pytest.approx(gap, rel=1e-9, abs=1e-12 * size)
        spread = others.std(ddof=1) if len(others) > 1 else 0.0
        if spread > 1e-6 * np.abs(others).max():
            assert divided[i] == pytest.approx(gap / spread, rel=1e-5, abs=1e-12 * size / spread)


def test_players_have_baselines_of_their_own(make_rollout, make_group):
    rewards = {"a": [1.0, 0.0], "b": [0.75, 0.25]}
    rollouts = [make_rollout(rewards[p][i], attempt=i, player=p) for i in range(2) for p in "ab"]
    batch = collate([make_group("g", rollouts)])
    for spec in (MeanOnly(), OPMD(), Reinforce("batch")):
        assert spec(batch) == pytest.approx([0.5, 0.25, -0.5, -0.25])
    assert MaxRL()(batch) == pytest.approx([1.0, 0.5, -1.0, -0.5])


def test_a_lone_success_at_sixteen_in_every_algorithm_that_divides(batch_of):
    batch = batch_of([0.01] + [0.0] * 15)
    for spec in ("group_normalised", "multi_step_grpo", {"kind": "gigpo", "normalise": True, "omega": 0}):
        assert credit(spec, batch)[0] == pytest.approx(3.75)
    assert GroupNormalised("population")(batch)[0] == pytest.approx(3.873, abs=5e-4)


# -- the algorithms made of them -----------------------------------------------------------------

KINDS = {
    "dr_grpo": ("mean_only", "fixed"),
    "rloo": ("leave_one_out", "sequence_sum"),
    "reinforce": ("reinforce", "sequence_sum"),
    "reinforce_plus_plus": ("returns", "token_mean"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "token_mean"),
    "remax": ("remax", "sequence_sum"),
    "opmd": ("opmd", "token_mean"),
    "asymre": ("asymre", "token_mean"),
    "gigpo": ("gigpo", "token_mean"),
    "multi_step_grpo": ("multi_step_grpo", "token_mean"),
    "maxrl": ("maxrl", "sequence_sum"),
    "success_offset": ("success_offset", "attempt_mean"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_algorithm_is_its_parts_and_each_can_be_replaced(kind):
    algorithm = resolve(kind)
    assert algorithm.credit is not None
    assert (algorithm.credit.name, algorithm.streams[0].aggregation.name) == KINDS[kind]
    changed = resolve({"kind": kind, "credit": "mean_only", "aggregation": "sequence_mean", "tis": None})
    objective = "rec" if kind in ("opmd", "asymre") else "ppo_clip"
    assert [p.name for p in changed.parts] == ["mean_only", "sequence_mean", objective]


@pytest.mark.parametrize("kind", ["opmd", "asymre"])
def test_no_ratio_enters_the_gradient(make_rollout, make_group, kind):
    """-w A log pi, wherever the policy has moved from its sampler: d / d log pi = -w A exactly."""
    torch = pytest.importorskip("torch")
    rollouts = [make_rollout(r, (3,), attempt=i) for i, r in enumerate([1.0, 0.0])]
    prepared = prepare(collate([make_group("g", rollouts)]), resolve(kind))
    (stream,) = prepared.streams
    index = np.flatnonzero(stream.active_T)
    moved = torch.tensor(prepared.batch.logprob_T[index] + 0.5, dtype=torch.float64, requires_grad=True)
    loss, _ = stream_loss(prepared, stream, index, moved)
    (grad,) = torch.autograd.grad(loss, moved)
    expected = -stream.weight_T[index] * stream.columns["advantage"][index]
    assert grad.numpy() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_algorithm_prepares_a_batch(make_rollout, make_group, kind):
    rollouts = [make_rollout(r, (2, 3), attempt=i) for i, r in enumerate([1.0, 0.0, 0.25])]
    greedy = make_rollout(0.5, attempt=3, role="baseline")
    prepared = prepare(collate([make_group("g", [*rollouts, greedy])]), resolve(kind))
    stream = prepared.streams[0]
    assert not stream.weight_T[prepared.batch.rollout_T == 3].any()  # the greedy one is never trained
    gain = np.bincount(prepared.batch.rollout_T, stream.weight_T * stream.columns["advantage"])
    assert gain[0] > 0 > gain[1]


def test_options_reach_the_parts():
    assert resolve({"kind": "dr_grpo", "length": 30}).streams[0].aggregation.options == {"length": 30}
    assert resolve({"kind": "success_offset", "floor": 9}).streams[0].aggregation.options == {"floor": 9}
    algorithm = resolve({"kind": "reinforce_plus_plus", "reward_kl": 0.1})
    assert "ref_logp" in algorithm.credit_needs
    assert "ref_logp" not in resolve("reinforce_plus_plus").needs
    with pytest.raises(AlgorithmError, match="length"):
        resolve({"kind": "dr_grpo", "length": 0})
    with pytest.raises(AlgorithmError, match="tau"):
        make_part("credit", {"kind": "opmd", "tau": 0})


def test_plus_plus_normalises_over_the_batch(batch_of):
    # Two tokens each: rewards 1, 0, 0, 0 twice over; mean 1/4, squares 2 (9/16 + 3/16) = 3/2, over 7.
    prepared = prepare(batch_of([1.0], [0.0], [0.0], [0.0]), resolve("reinforce_plus_plus"))
    got = prepared.streams[0].columns["advantage"][prepared.batch.train_T > 0]
    std = np.sqrt(1.5 / 7)
    assert got == pytest.approx([0.75 / std] * 2 + [-0.25 / std] * 6)
