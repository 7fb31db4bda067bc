"""Composition: numbers worked by hand, targets met or refused, and a choice that only the seed decides."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.compose import Examples, MixError, Targets, compose, composition_table


def index(rows: Sequence[tuple[str, str, int, int]]) -> Examples:
    """(category, source, tokens, trained tokens) of each example; two turns, one of them supervised."""
    categories = tuple(sorted({row[0] for row in rows}))
    sources = tuple(sorted({row[1] for row in rows}))
    n = len(rows)
    return Examples(
        sources,
        categories,
        np.asarray([sources.index(row[1]) for row in rows], np.int64),
        np.asarray([categories.index(row[0]) for row in rows], np.int64),
        np.asarray([row[2] for row in rows], np.int64),
        np.asarray([row[3] for row in rows], np.int64),
        np.full(n, 2),
        np.ones(n, np.int64),
    )


# 6 of maths (60 trained tokens), 2 of code (60): s has 4 + 1, t has 2 + 1.
MIXED = index(
    [("maths", "s", 100, 10)] * 4
    + [("maths", "t", 300, 10)] * 2
    + [("code", "s", 200, 20), ("code", "t", 400, 40)]
)


def used(examples: Examples, mix_uses: np.ndarray, category: str, source: str | None = None) -> list[int]:
    keep = examples.category_N == examples.categories.index(category)
    if source is not None:
        keep &= examples.source_N == examples.sources.index(source)
    return sorted(mix_uses[keep].tolist())


def test_shares_of_samples_by_hand() -> None:
    mix = compose(MIXED, Targets({"maths": 0.5, "code": 0.5}))
    # 8 in all, so 4 and 4: maths loses 2 (its sources stay 2 to 1: 2.67 and 1.33), code is used twice.
    assert mix.total == 8
    assert used(MIXED, mix.uses_N, "maths", "s") == [0, 1, 1, 1]
    assert used(MIXED, mix.uses_N, "maths", "t") == [0, 1]
    assert used(MIXED, mix.uses_N, "code") == [2, 2]
    maths, code = sorted(mix.categories, key=lambda row: -row["examples"])
    assert (maths["asked_share"], maths["achieved_share"], maths["achieved"]) == (pytest.approx(0.5), 0.5, 4)
    assert (code["available"], code["uses"], code["passes"]) == (2, 4, 2.0)
    assert len(mix.order()) == 8 and mix.order().tolist() == sorted(mix.order())


def test_shares_of_trained_tokens_by_hand() -> None:
    mix = compose(MIXED, Targets({"maths": 0.25, "code": 0.75}, by="trained_tokens", total=160))
    # 40 for maths, of which s has two thirds: 27 of 40 tokens, nearest 30; t 13 of 20, nearest 10.
    assert used(MIXED, mix.uses_N, "maths", "s") == [0, 1, 1, 1]
    assert used(MIXED, mix.uses_N, "maths", "t") == [0, 1]
    # 120 for code, which has 20 + 40: each example twice.
    assert used(MIXED, mix.uses_N, "code") == [2, 2]
    assert [row["achieved"] for row in mix.categories] == [120, 40]
    assert [row["asked"] for row in mix.categories] == [120, 40]


def test_both_tables_are_met() -> None:
    mix = compose(
        MIXED, Targets({"maths": 0.5, "code": 0.5}, {"s": 0.25, "t": 0.75}, total=1000, most_passes=500)
    )
    assert [row["achieved"] for row in mix.categories] == [500, 500]
    assert [row["achieved"] for row in mix.sources] == [250, 750]
    # What is not asked for stays as it is: the odds of maths against code in s over those in t.
    cell = {(row["category"], row["source"]): row["achieved"] for row in mix.cells}
    odds = cell["maths", "s"] * cell["code", "t"] / (cell["maths", "t"] * cell["code", "s"])
    assert odds == pytest.approx(4 * 1 / (2 * 1), rel=0.05)


def test_no_targets_use_each_once() -> None:
    for by in ("samples", "trained_tokens"):
        mix = compose(MIXED, Targets(by=by))  # type: ignore[arg-type]
        assert mix.uses_N.tolist() == [1] * 8
    assert compose(MIXED, Targets(total=16)).uses_N.tolist() == [2] * 8


def test_a_share_of_nothing_leaves_out() -> None:
    mix = compose(MIXED, Targets(sources={"s": 1.0, "t": 0}))
    assert mix.total == 5
    assert mix.uses_N.tolist() == [1, 1, 1, 1, 0, 0, 1, 0]


def test_a_cell_that_must_vanish() -> None:
    rows = [("a", "s", 1, 1)] * 10 + [("a", "t", 1, 1)] * 10 + [("b", "t", 1, 1)] * 10
    mix = compose(index(rows), Targets({"a": 0.5, "b": 0.5}, {"s": 0.5, "t": 0.5}, total=20))
    assert [row["achieved"] for row in mix.cells] == [10, 0, 10]


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        (Targets({"maths": 0.5, "code": 0.4}), "sum to 0.9"),
        (Targets({"maths": 1.0}), r"no share is given for category code \(2 examples\)"),
        (Targets({"maths": 0.5, "code": 0.4, "law": 0.1}), "'law' has a share of 0.1, but no example"),
        (Targets({"maths": -1.0, "code": 2.0}), "share is -1.0"),
        (Targets({"maths": float("nan"), "code": 1.0}), "share is nan"),
        (Targets({"maths": 0.01, "code": 0.99}, total=100), "50.0 passes, above most_passes 8"),
        (Targets(sources={"s": 0.5}), "sum to 0.5|no share is given for source t"),
        (Targets(by="tokens"), "by is 'tokens'"),  # type: ignore[arg-type]
        (Targets(total=0), "total is 0"),
        (Targets(most_passes=0), "most_passes is 0"),
    ],
)
def test_impossible_targets_are_refused_with_the_reason(targets: Targets, match: str) -> None:
    with pytest.raises(MixError, match=match):
        compose(MIXED, targets)


def test_tables_that_contradict_each_other_are_refused() -> None:
    rows = [("a", "s", 1, 1)] * 5 + [("b", "t", 1, 1)] * 5
    with pytest.raises(MixError, match=r"cannot be met together.*off by"):
        compose(index(rows), Targets({"a": 0.8, "b": 0.2}, {"s": 0.5, "t": 0.5}))
    assert compose(index(rows), Targets({"a": 0.8, "b": 0.2}, {"s": 0.8, "t": 0.2})).total == 10


def test_nothing_trained_or_nothing_at_all_is_refused() -> None:
    rows = [("a", "s", 9, 0), ("b", "s", 9, 5)]
    with pytest.raises(MixError, match=r"'a' has a share of 0\.5, but its examples have no trained tokens"):
        compose(index(rows), Targets({"a": 0.5, "b": 0.5}, by="trained_tokens"))
    with pytest.raises(MixError, match="no samples to mix"):
        compose(index([]), Targets())
    one = [("a", "s", 9, 5), ("b", "t", 9, 5)]
    with pytest.raises(MixError):
        compose(index(one), Targets({"a": 1.0, "b": 0.0}, {"s": 0.0, "t": 1.0}))


def test_an_index_that_does_not_hold_together_is_refused() -> None:
    with pytest.raises(MixError, match="differ in length"):
        Examples(("s",), ("a",), *(np.zeros(n, np.int64) for n in (2, 2, 2, 2, 2, 1)))
    with pytest.raises(MixError, match="there are 1 names"):
        Examples(("s",), ("a",), np.ones(1, np.int64), *(np.zeros(1, np.int64) for _ in range(5)))
    with pytest.raises(MixError, match="twice"):
        Examples(("s", "s"), ("a",), *(np.zeros(1, np.int64) for _ in range(6)))


def test_the_choice_depends_on_the_seed_and_the_cell_alone() -> None:
    rows = [("a", "s", 10, 10)] * 50 + [("b", "s", 10, 10)] * 50
    half = Targets({"a": 0.5, "b": 0.5}, total=50)
    one, again = compose(index(rows), half), compose(index(rows), half)
    assert one.uses_N.tolist() == again.uses_N.tolist()
    other = compose(index(rows), Targets({"a": 0.5, "b": 0.5}, total=50, seed=1))
    assert one.uses_N.tolist() != other.uses_N.tolist()
    # A category more, before the others in the table: what is chosen from a stays.
    more = index([("0", "s", 10, 10)] * 20 + rows)
    third = compose(more, Targets({"0": 0.2, "a": 0.4, "b": 0.4}, total=62))
    assert used(more, third.uses_N, "a") == used(index(rows), one.uses_N, "a")
    assert third.uses_N[20:70].tolist() == one.uses_N[:50].tolist()


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("st"), st.just(9), st.integers(1, 50)), min_size=1
    ),
    st.integers(1, 200),
    st.sampled_from(["samples", "trained_tokens"]),
    st.integers(0, 3),
)
def test_uses_are_passes_and_near_what_was_asked(rows: list, total: int, by: str, seed: int) -> None:
    examples = index(rows)
    mix = compose(examples, Targets(by=by, total=total, most_passes=1000, seed=seed))  # type: ignore[arg-type]
    assert sum(row["asked"] for row in mix.cells) == total
    for row in mix.cells:
        uses = used(examples, mix.uses_N, row["category"], row["source"])
        assert uses[-1] - uses[0] <= 1  # whole passes and at most one use more
        longest = max(r[3] for r in rows if r[:2] == (row["category"], row["source"]))
        assert abs(row["achieved"] - row["asked"]) <= (0 if by == "samples" else longest / 2)


# -- the table -------------------------------------------------------------------------------------


def test_the_table_by_hand() -> None:
    table = composition_table(MIXED, edges=[0, 200, 300])
    assert json.loads(json.dumps(table)) == table
    assert table["total"] == {
        "samples": 8,
        "share_samples": 1.0,
        "raw_tokens": 1600,
        "trained_tokens": 120,
        "share_trained": 1.0,
        "turns": 16,
        "supervised_turns": 8,
        "mean": 200.0,
        "p50": 100,  # 100 100 100 100 | 200 300 300 400
        "p95": 400,
        "max": 400,
        "histogram": [4, 1, 3],
    }
    code, maths = table["categories"]
    assert (code["category"], code["samples"], code["share_samples"]) == ("code", 2, 0.25)
    assert (code["trained_tokens"], code["share_trained"], code["histogram"]) == (60, 0.5, [0, 1, 1])
    assert (maths["raw_tokens"], maths["mean"], maths["p50"], maths["p95"]) == (1000, 1000 / 6, 100, 300)
    assert [(r["category"], r["source"], r["samples"]) for r in table["cells"]] == [
        ("code", "s", 1),
        ("code", "t", 1),
        ("maths", "s", 4),
        ("maths", "t", 2),
    ]
    assert [(r["source"], r["raw_tokens"]) for r in table["sources"]] == [("s", 600), ("t", 1000)]


def test_the_table_counts_uses() -> None:
    table = composition_table(MIXED, np.asarray([0, 0, 0, 0, 0, 0, 3, 1]), edges=[0, 300])
    assert [r["category"] for r in table["categories"]] == ["code"]
    total = table["total"]
    assert (total["samples"], total["raw_tokens"], total["trained_tokens"]) == (4, 1000, 100)
    assert (total["p50"], total["p95"], total["turns"], total["histogram"]) == (200, 400, 8, [3, 1])
    assert [r["share_trained"] for r in table["sources"]] == [0.6, 0.4]


def test_the_table_of_nothing() -> None:
    table = composition_table(index([]), edges=[0, 10])
    assert table["cells"] == [] and table["total"]["samples"] == 0 and table["total"]["histogram"] == [0, 0]


@pytest.mark.parametrize("edges", [[], [1, 2], [0, 5, 5]])
def test_edges_that_lose_lengths_are_refused(edges: list[int]) -> None:
    with pytest.raises(MixError, match="edges"):
        composition_table(MIXED, edges=edges)


def test_uses_that_do_not_fit_are_refused() -> None:
    for uses in ([1], [-1] * 8):
        with pytest.raises(MixError, match="uses"):
            composition_table(MIXED, np.asarray(uses))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), max_size=30))
def test_the_table_equals_that_of_repeated_rows(pairs: list[tuple[int, int]]) -> None:
    rows = [("a", "s", length, length // 2) for length, _ in pairs]
    repeated = [row for row, (_, uses) in zip(rows, pairs, strict=True) for _ in range(uses)]
    uses = np.asarray([u for _, u in pairs], np.int64)
    edges = [0, 50, 100]
    assert (
        composition_table(index(rows), uses, edges=edges)["total"]
        == (composition_table(index(repeated), edges=edges)["total"])
    )
