"""Shaping of rewards before credit: numbers by hand, what must not change, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, make_part, prepare, registered, resolve
from trivet.algorithms.base import Batch
from trivet.algorithms.shaping import hashed_ngrams
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

SPECS = (
    {"kind": "relative_length", "limit": 20},
    {"kind": "overlength", "start": 2, "limit": 8},
    {"kind": "soft_overlong", "max_length": 8, "buffer": 4},
    "length_bonus",
    "malformed_calls",
    "tool_gate",
    "no_answer",
    "quality_bonus",
    "diversity_bonus",
)


def answers(make_rollout, make_group, *lengths_rewards, **fields) -> Batch:
    """One group of (length, reward)."""
    rollouts = [make_rollout(r, (n,), attempt=i, **fields) for i, (n, r) in enumerate(lengths_rewards)]
    return collate([make_group("g", rollouts)])


def counted(rewards, **counters) -> Batch:
    """A group of rollouts with counters, one list each; None: it has none."""
    rollouts = []
    for i, reward in enumerate(rewards):
        trace = Trace()
        trace.add_sampled(trace.add(-1, [1]), [5, 6], [-0.5, -0.5], 0)
        own = {name: float(column[i]) for name, column in counters.items() if column[i] is not None}
        task = Task("test", (Message("user", "?"),))
        parts = {"quality": own.pop("quality")} if "quality" in own else {}
        rollouts.append(
            Rollout(task, trace, Scored(reward, parts), Termination.FINISHED, attempt=i, counters=own)
        )
    return collate([Group("g", IssueKey("g", 0), rollouts)])


def answer(ids, attempt: int = 0) -> Rollout:
    """A rollout that says `ids`."""
    trace = Trace()
    node = trace.add(-1, [1])
    if ids:
        trace.add_sampled(node, list(ids), [-0.5] * len(ids), 0)
    task = Task("test", (Message("user", "?"),))
    return Rollout(task, trace, Scored(0.0), Termination.FINISHED, attempt=attempt)


def said(*texts, step: int = 1) -> Batch:
    """A group of answers of given tokens."""
    rollouts = [answer(ids, attempt=i) for i, ids in enumerate(texts)]
    return collate([Group("g", IssueKey("g", 0), rollouts)], step=step)


def shape(spec, batch: Batch) -> np.ndarray:
    return make_part("shaping", spec)(batch)


def test_every_part_has_a_test():
    assert {s if isinstance(s, str) else s["kind"] for s in SPECS} == set(registered("shaping"))


# -- length --------------------------------------------------------------------------------------


def test_relative_length_by_hand(make_rollout, make_group):
    # Shortest correct: 4 of limit 20, cap 0.5: 12 tokens are half way, 20 and 30 at the cap, wrong ones too.
    batch = answers(make_rollout, make_group, (4, 1.0), (12, 1.0), (20, 0.0), (30, 1.0), (2, 0.0))
    got = shape({"kind": "relative_length", "limit": 20, "cap": 0.5}, batch)
    assert got.tolist() == [1.0, 0.75, -0.5, 0.5, 0.0]


def test_relative_length_needs_a_correct_one(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (4, 0.5), (12, 0.0))
    assert shape({"kind": "relative_length", "limit": 8}, batch).tolist() == [0.5, 0.0]
    assert shape({"kind": "relative_length", "limit": 12, "correct": 0.5}, batch).tolist() == [0.5, -0.5]


def test_relative_length_with_the_shortest_at_the_limit(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (8, 1.0), (9, 1.0), (8, 1.0))
    assert shape({"kind": "relative_length", "limit": 8}, batch).tolist() == [1.0, 0.5, 1.0]


def test_correct_is_what_the_verifier_said(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (4, 1.0), (12, 0.0))
    earlier = replace(batch, reward_N=np.asarray([0.9, 1.0]))  # what a part before it left
    got = shape({"kind": "relative_length", "limit": 12, "cap": 0.5}, earlier)
    assert got.tolist() == [0.9, 0.5]
    assert shape("length_bonus", earlier).tolist() == [0.9, 1.0]


def test_relative_length_is_per_group_and_ignores_aborted(make_rollout, make_group):
    quick = make_rollout(1.0, (1,), attempt=2, termination=Termination.ABORTED)
    one = make_group("a", [make_rollout(1.0, (4,)), make_rollout(1.0, (12,), attempt=1), quick])
    other = make_group("b", [make_rollout(1.0, (12,))])
    got = shape({"kind": "relative_length", "limit": 20, "cap": 0.5}, collate([one, other]))
    assert got[[0, 1, 3]].tolist() == [1.0, 0.75, 1.0]


def test_overlength_touches_only_positive_rewards(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (4, 8.0), (6, 8.0), (8, 8.0), (20, 8.0), (20, -3.0), (20, 0.0))
    got = shape({"kind": "overlength", "start": 4, "limit": 8, "cap": 0.75}, batch)
    assert got.tolist() == [8.0, 5.0, 2.0, 2.0, -3.0, 0.0]  # factors 1, 0.625, 0.25, 0.25
    with pytest.raises(AlgorithmError, match="limit 4 must lie above start 4"):
        make_part("shaping", {"kind": "overlength", "start": 4, "limit": 4})


def test_soft_overlong_by_hand(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (6, 1.0), (7, 1.0), (10, 1.0), (11, 0.0), (8, -1.0))
    got = shape({"kind": "soft_overlong", "max_length": 10, "buffer": 4}, batch)
    assert got.tolist() == [1.0, 0.75, 0.0, -1.0, -1.5]
    half = shape({"kind": "soft_overlong", "max_length": 10, "buffer": 4, "weight": 0.5}, batch)
    assert half.tolist() == [1.0, 0.875, 0.5, -0.5, -1.25]
    with pytest.raises(AlgorithmError, match="longer than max_length"):
        make_part("shaping", {"kind": "soft_overlong", "max_length": 4, "buffer": 5})


def test_length_bonus_by_hand(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (10, 1.0), (20, 1.0), (5, 0.5), (40, 0.0))
    assert shape("length_bonus", batch) == pytest.approx([1.1, 1.0, 0.5, 0.0])  # 0.2 (1 - 10 / 20)
    lone = answers(make_rollout, make_group, (10, 1.0), (20, 0.5))
    assert shape("length_bonus", lone).tolist() == [1.0, 0.5]


def test_length_counts_all_rows_of_a_rollout():
    trace = Trace()
    for prompt, out in (([1, 2], 3), ([9, 8], 7), ([1, 2, 3, 4], 5), ([9, 8, 7, 6], 5), ([1, 2, 4, 5, 6], 7)):
        trace.add_sampled(trace.branch(prompt), [out], [-0.5], 0)
    task = Task("test", (Message("user", "?"),))
    batch = collate([Group("g", IssueKey("g", 0), [Rollout(task, trace, Scored(1.0), Termination.FINISHED)])])
    assert shape({"kind": "soft_overlong", "max_length": 6, "buffer": 2}, batch).tolist() == [0.5]  # 5 tokens


# -- behaviour -----------------------------------------------------------------------------------


def test_malformed_calls_by_hand():
    batch = counted(
        [1.0, 1.0, 1.0, 1.0, -0.5, 0.8],
        malformed_calls=[0, 1, 4, None, 4, 0],
        tool_calls=[3, 4, 4, 2, 4, None],
    )
    assert shape("malformed_calls", batch).tolist() == [1.0, 0.875, 0.5, 1.0, -0.5, 0.8]
    assert shape({"kind": "malformed_calls", "floor": 0.0}, batch)[2] == 0.0
    renamed = counted([1.0], bad=[1], all=[2])
    assert shape({"kind": "malformed_calls", "malformed": "bad", "calls": "all"}, renamed).tolist() == [0.75]


def test_tool_gate_by_hand():
    batch = counted([1.0, 1.0, 1.0, -0.2, 0.0], successful_calls=[2, 1, None, 0, 0])
    assert shape("tool_gate", batch).tolist() == [1.0, 0.0, 0.0, -0.2, 0.0]
    assert shape({"kind": "tool_gate", "minimum": 1}, batch).tolist() == [1.0, 1.0, 0.0, -0.2, 0.0]


def test_no_answer_by_hand():
    batch = counted([0.0, 0.0, 1.0], no_answer=[1, 0, None], quality=[1.0, 0.0, 0.0])
    assert shape("no_answer", batch).tolist() == [-0.1, 0.0, 1.0]
    assert shape({"kind": "no_answer", "flag": "quality", "penalty": -1}, batch).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", ["malformed_calls", "tool_gate", "no_answer", "quality_bonus"])
def test_a_missing_counter_is_named_with_those_there_are(kind):
    wanted = {"tool_gate": "successful_calls", "quality_bonus": "quality"}.get(kind, kind)
    with pytest.raises(
        AlgorithmError, match=rf"{kind!r} reads {wanted!r}.*counters: tokens, turns; parts.*none"
    ):
        shape(kind, counted([1.0], turns=[1], tokens=[2]))


# -- bonuses that fade ---------------------------------------------------------------------------


def test_quality_bonus_fades():
    batch = counted([0.0, 1.0, 0.5], quality=[1.0, 0.5, None])
    spec = {"kind": "quality_bonus", "weight": 0.5, "final": 0.3, "steps": 5}
    for step, weight in ((1, 0.5), (3, 0.4), (5, 0.3), (50, 0.3), (0, 0.5)):
        got = shape(spec, replace(batch, step=step))
        assert got == pytest.approx([weight, 1.0 + weight / 2, 0.5])


def test_diversity_bonus_by_hand():
    # Single tokens: unit vectors a, a, b. Sum (2, 1), length sqrt 5: cosines 2 / sqrt 5 and 1 / sqrt 5.
    batch = said([7], [7], [9])
    got = shape({"kind": "diversity_bonus", "ngram": 1}, batch)
    assert got == pytest.approx([0.5 * (1 - 2 / np.sqrt(5))] * 2 + [0.5 * (1 - 1 / np.sqrt(5))])
    later = shape({"kind": "diversity_bonus", "ngram": 1, "steps": 11}, said([7], [7], [9], step=11))
    assert later == pytest.approx(got * 0.6)  # 0.3 / 0.5


def test_long_answers_pull_the_mean_no_more_than_short_ones():
    # Directions a and b, whatever the number of words: each at 1 / sqrt 2 to the mean.
    got = shape({"kind": "diversity_bonus", "ngram": 1}, said([7, 7, 7], [9]))
    assert got == pytest.approx([0.5 * (1 - np.sqrt(0.5))] * 2)


def test_the_same_said_gets_exactly_nothing():
    for texts in (*([list(range(n))] * m for n in (5, 6, 11) for m in (3, 7, 12)), [[4, 5], [4, 5]], [[5]]):
        got = shape("diversity_bonus", said(*texts))
        assert got.tolist() == [0.0] * len(texts)


def test_silence_gets_no_bonus_and_changes_none():
    with_silence = shape("diversity_bonus", said([7, 8], [9], []))
    assert with_silence[2] == 0.0
    assert with_silence[:2] == pytest.approx(shape("diversity_bonus", said([7, 8], [9])))


def test_diversity_is_of_the_group():
    apart = collate([Group(f"g{i}", IssueKey(f"g{i}", 0), [answer([7 + i, 8])]) for i in range(2)])
    assert shape("diversity_bonus", apart).tolist() == [0.0, 0.0]


def test_ngrams_are_counted_once_each():
    batch = said([4, 5, 4, 5], [4])
    counts = hashed_ngrams(batch, 2, 1 << 16)
    assert counts.sum(1).tolist() == [7.0, 1.0]  # 4 tokens and 3 pairs; one token
    assert sorted(counts[0][counts[0] > 0].tolist()) == [1.0, 2.0, 2.0, 2.0]  # 54 once; 4, 5 and 45 twice
    assert hashed_ngrams(said([4, 5], [5, 4]), 2, 1 << 16)[0].tolist() != counts[0].tolist()


def test_an_embedding_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def by_length(batch):\n    return np.stack([batch.length_N == 1, batch.length_N == 2], 1)\n"
        "def wrong(batch):\n    return np.ones(3)\n"
    )
    spec = {"kind": "diversity_bonus", "embed": f"{file}:by_length"}
    assert shape(spec, said([7], [8], [9, 10])) == pytest.approx(
        [0.5 * (1 - 2 / np.sqrt(5))] * 2 + [0.5 * (1 - 1 / np.sqrt(5))]
    )
    with pytest.raises(AlgorithmError, match=r"must give finite numbers of shape \(rollouts, D\) = \(2, D\)"):
        shape({"kind": "diversity_bonus", "embed": f"{file}:wrong"}, said([7], [8]))
    with pytest.raises(AlgorithmError, match="has no 'by_lenght'; did you mean 'by_length'"):
        make_part("shaping", {"kind": "diversity_bonus", "embed": f"{file}:by_lenght"})
    with pytest.raises(AlgorithmError, match="module:function"):
        make_part("shaping", {"kind": "diversity_bonus", "embed": "by_length"})


# -- all -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_the_unscored_stay_so_the_rest_stays_finite_and_order_is_nothing(
    make_rollout, make_group, made, random
):
    counters = {
        "tool_calls": 4.0,
        "malformed_calls": 1.0,
        "successful_calls": 2.0,
        "no_answer": 0.0,
        "quality": 0.5,
    }
    rollouts = [
        make_rollout(r, (n,), attempt=i, id=str(i), counters=counters) for i, (r, n) in enumerate(made)
    ]
    mixed = list(rollouts)
    random.shuffle(mixed)
    plain, other = (collate([make_group("g", rs)], step=3) for rs in (rollouts, mixed))
    place = [other.rollout_ids.index(name) for name in plain.rollout_ids]
    for spec in SPECS:
        got = shape(spec, plain)
        assert (np.isfinite(got) == np.isfinite(plain.reward_N)).all()
        np.testing.assert_allclose(got, shape(spec, other)[place], atol=1e-12, err_msg=str(spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_empty_batch(spec):
    names = ("tool_calls", "malformed_calls", "successful_calls", "no_answer", "quality")
    batch = replace(collate([]), counters={name: np.zeros(0) for name in names})
    assert shape(spec, batch).tolist() == []


def test_parts_run_in_order_and_are_counted(make_rollout, make_group):
    batch = answers(make_rollout, make_group, (4, 1.0), (12, 1.0), (12, 0.0))
    algorithm = resolve(
        {
            "kind": "dr_grpo",
            "shaping": [
                {"kind": "relative_length", "limit": 20, "cap": 0.5},  # 1, 0.75, -0.25
                {"kind": "overlength", "start": 4, "limit": 20, "cap": 1.0},  # 1, 0.375, -0.25
                "length_bonus",  # 1 + 0.2 (1 - 4 / 12), and nothing for the longest solve
            ],
        }
    )
    prepared = prepare(batch, algorithm)
    assert prepared.batch.reward_N == pytest.approx([1 + 0.2 * 2 / 3, 0.375, -0.25])
    assert prepared.batch.raw_reward_N.tolist() == [1.0, 1.0, 0.0]
    assert prepared.counters["shaped/relative_length"] == pytest.approx(-0.5 / 3)
