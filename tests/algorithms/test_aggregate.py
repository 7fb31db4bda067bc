"""Weights: the denominators, against a plain loop, and what rows, packing and order may not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, make_part, prepare, registered, resolve
from trivet.algorithms.base import Batch
from trivet.trainer.batch import collate, split
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

SPECS = (
    "token_mean",
    "sequence_mean",
    "weighted_sequence_mean",
    "sequence_sum",
    {"kind": "fixed", "length": 7},
    "attempt_mean",
    {"kind": "attempt_mean", "floor": 4},
)


def weigh(spec, batch: Batch, mask_T=None) -> np.ndarray:
    mask_T = batch.train_T.astype(np.float64) if mask_T is None else mask_T
    return make_part("aggregation", spec)(batch, mask_T)


def attempt(reward, tokens, *, rows=1, number=0, player="policy", name="") -> Rollout:
    """`tokens` sampled tokens, one turn each, over `rows` rows (compactions: the history is written anew)."""
    trace = Trace()
    node = trace.add(-1, [1, 2])
    for i in range(tokens):
        if i and i % -(-tokens // rows) == 0:
            node = trace.add(-1, [1, 3 + i])
        node = trace.add_sampled(node, [9], [-0.5], 0)
        node = trace.add(node, [4])
    task = Task("test", (Message("user", "?"),))
    return Rollout(task, trace, Scored(reward), Termination.FINISHED, attempt=number, player=player, id=name)


def group(name, rollouts) -> Group:
    return Group(name, IssueKey(name, 0), list(rollouts))


def test_all_aggregations_are_here():
    assert {s if isinstance(s, str) else s["kind"] for s in SPECS} == set(registered("aggregation"))


def test_a_rollouts_own_weight_stays():
    """Masks 2, 2 | 1, 0.5, 0 (c = 2): mean weights 2 and 0.75, M = 2.75. Without weights: sequence_mean."""
    batch = collate([group("g", [attempt(1.0, 2), attempt(0.0, 3, number=1)])])
    trained = np.flatnonzero(batch.train_T > 0)
    mask_T = np.zeros(batch.tokens)
    mask_T[trained] = [2, 2, 1, 0.5, 0]
    got = weigh("weighted_sequence_mean", batch, mask_T)
    assert got[trained] == pytest.approx([1 / 2.75, 1 / 2.75, 0.5 / 2.75, 0.25 / 2.75, 0])
    mask_T = (mask_T > 0).astype(np.float64)
    plain, weighted = (weigh(kind, batch, mask_T) for kind in ("sequence_mean", "weighted_sequence_mean"))
    assert np.array_equal(plain, weighted)
    assert not weigh("weighted_sequence_mean", batch, np.zeros(batch.tokens)).any()


def test_the_floor_is_a_number_of_tokens():
    batch = collate([group("g", [attempt(1.0, 2), attempt(0.0, 4096, number=1)])])
    got = weigh({"kind": "attempt_mean", "floor": 2048}, batch)
    trained = batch.train_T > 0
    # Two attempts: 1 / (2 * 2048) for the short one, 1 / (2 * 4096) for the long one.
    assert np.unique(got[trained & (batch.rollout_T == 0)]).tolist() == [1 / 4096]
    assert np.unique(got[trained & (batch.rollout_T == 1)]).tolist() == [1 / 8192]
    assert got.sum() == pytest.approx(2 / 4096 + 1 / 2)
    with pytest.raises(AlgorithmError, match="floor"):
        make_part("aggregation", {"kind": "attempt_mean", "floor": 0})
    with pytest.raises(AlgorithmError, match="needs option"):
        make_part("aggregation", "fixed")


lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(lengths, st.randoms(use_true_random=False))
def test_against_a_loop(groups, random):
    """The definitions, over any mask, supervised weights between 0 and 1 among them."""
    batch = collate(
        [group(f"g{g}", [attempt(0.0, n, number=i) for i, n in enumerate(ns)]) for g, ns in enumerate(groups)]
    )
    levels = [0.0, 0.5, 1.0]
    mask_T = batch.train_T * np.asarray([random.choice(levels) for _ in range(batch.tokens)])
    n_N = [mask_T[batch.rollout_T == n].sum() for n in range(batch.rollouts)]
    count = sum(n > 0 for n in n_N)
    c_N = [np.count_nonzero(mask_T[batch.rollout_T == n]) for n in range(batch.rollouts)]
    mean_weights = sum(n / c for n, c in zip(n_N, c_N, strict=True) if c)
    for t, m in enumerate(mask_T):
        n = n_N[batch.rollout_T[t]]
        expected = {
            "token_mean": m / mask_T.sum() if m else 0.0,
            "sequence_mean": m / (count * n) if m else 0.0,
            "weighted": m / c_N[batch.rollout_T[t]] / mean_weights if m else 0.0,
            "sequence_sum": m / count if m else 0.0,
            "fixed": m / (count * 7) if m else 0.0,
            "attempt_mean": m / (count * max(n, 1)) if m else 0.0,
            "floor": m / (count * max(n, 4)) if m else 0.0,
        }
        for spec, value in zip(SPECS, expected.values(), strict=True):
            assert weigh(spec, batch, mask_T)[t] == pytest.approx(value, rel=1e-12), spec


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_rows_order_and_company_change_nothing(made, random):
    """A rollout's tokens weigh the same in one row or in several, wherever it stands and beside whom."""
    whole = [attempt(0.0, n, number=i, name=str(i)) for i, (n, _) in enumerate(made)]
    cut = [attempt(0.0, n, rows=k, number=i, name=str(i)) for i, (n, k) in enumerate(made)]
    random.shuffle(cut)
    first, second = collate([group("g", whole)]), collate([group("g", cut)])
    assert second.rows >= first.rows
    for spec in SPECS:
        one, other = weigh(spec, first), weigh(spec, second)
        for n, name in enumerate(first.rollout_ids):
            m = second.rollout_ids.index(name)
            of_one = one[(first.rollout_T == n) & (first.train_T > 0)]
            of_other = other[(second.rollout_T == m) & (second.train_T > 0)]
            np.testing.assert_allclose(of_one, of_other, rtol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_several_rows_share_one_advantage_and_count_once(spec):
    """Summing weight times advantage gives the same with the history in one row or in four."""
    results = []
    for rows in (1, 4):
        batch = collate([group("g", [attempt(1.0, 8, rows=rows), attempt(0.0, 2, number=1)])])
        assert batch.rows == rows + 1
        stream = prepare(
            batch, resolve({"kind": "grpo", "credit": "mean_only", "aggregation": spec})
        ).streams[0]
        results.append(np.bincount(batch.rollout_T, stream.weight_T * stream.columns["advantage"]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_denominator_is_the_updates(spec):
    """Each update of a batch weighs its groups as if they were all there is."""
    groups = [group(f"g{g}", [attempt(float(i), 2 + g + i, number=i) for i in range(2)]) for g in range(4)]
    algorithm = resolve({"kind": "dr_grpo", "aggregation": spec})
    for update, part in enumerate(split(prepare(collate(groups), algorithm), 2)):
        alone = prepare(collate(groups[2 * update : 2 * update + 2]), algorithm)
        np.testing.assert_allclose(part.streams[0].weight_T, alone.streams[0].weight_T, rtol=1e-12)


def test_players_of_one_attempt_are_one():
    rollouts = [
        attempt(1.0, 2, player="a"),
        attempt(1.0, 6, player="b"),
        attempt(0.0, 4, player="a", number=1),
    ]
    batch = collate([group("g", rollouts), group("h", [attempt(0.0, 1)])])
    got = weigh({"kind": "attempt_mean", "floor": 4}, batch)
    per = [np.unique(got[(batch.rollout_T == n) & (batch.train_T > 0)]).tolist() for n in range(4)]
    assert per == [[1 / 24], [1 / 24], [1 / 12], [1 / 12]]  # three attempts of 8, 4 and (floored) 4 tokens


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nothing_to_weigh(spec):
    assert weigh(spec, collate([])).tolist() == []
    batch = collate([group("g", [attempt(1.0, 3)])])
    assert weigh(spec, batch, np.zeros(batch.tokens)).tolist() == [0.0] * batch.tokens


@pytest.mark.parametrize(
    ("spec", "factor"), [("token_mean", 1), ("sequence_mean", 1), ("sequence_sum", 4), ("attempt_mean", 1)]
)
def test_scale_of_the_supervised_weights(spec, factor):
    """Means forget the scale of the loss weights, sums keep it."""
    batch = collate([group("g", [attempt(0.0, 3), attempt(0.0, 5, number=1)])])
    larger = replace(batch, train_T=batch.train_T * 4)
    np.testing.assert_allclose(weigh(spec, larger), weigh(spec, batch) * factor, rtol=1e-12)
