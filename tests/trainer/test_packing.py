"""The grid of micro-batches: each row once, within budget, sharing exactly what is equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.trainer.packing import MIN_SHARED, Plan, PlanError, plan


def grid(rows: list[list[int]], wanted: list[list[bool]] | None = None, **more: Any) -> Plan:
    length_R = np.asarray([len(row) for row in rows], np.int64)
    start_R = np.cumsum(length_R) - length_R
    position_T = np.concatenate([np.arange(n) for n in length_R])
    wanted_T = position_T > 0 if wanted is None else np.concatenate([np.asarray(w, bool) for w in wanted])
    arguments: dict[str, Any] = {
        "unit_R": np.arange(len(rows)),
        "micro_tokens": 1 << 20,
        "position_T": position_T,
        **more,
    }
    return plan(
        ids_T=np.concatenate([np.asarray(row, np.int64) for row in rows]),
        row_start_R=start_R,
        row_length_R=length_R,
        wanted_T=wanted_T,
        **arguments,
    )


def walk(rows: list[list[int]], out: Plan) -> dict[int, tuple[list[int], list[int]]]:
    """target token -> (ids on the path up to its source, their positions), read off segments and parents."""
    flat = [token for row in rows for token in row]
    seen: dict[int, tuple[list[int], list[int]]] = {}
    for micro in out.micro:
        paths = micro.paths()
        owner = np.repeat(np.arange(len(micro.start_S)), micro.length_S)
        for target, source in zip(micro.target_N.tolist(), micro.source_N.tolist(), strict=True):
            path = paths[owner[source]]
            index = [p for s in path for p in range(micro.start_S[s], micro.start_S[s] + micro.length_S[s])]
            index = index[: index.index(source) + 1]
            assert target not in seen
            seen[target] = ([flat[micro.token_P[p]] for p in index], index)
    return seen


few = st.integers(0, 2)  # few symbols: rows often begin alike
row = st.lists(few, min_size=1, max_size=16)


@given(
    rows=st.lists(row, min_size=1, max_size=12),
    share=st.booleans(),
    budget=st.integers(16, 60),
    data=st.data(),
)
def test_every_wanted_token_is_predicted_once_from_its_own_past(
    rows: list[list[int]], share: bool, budget: int, data: st.DataObject
) -> None:
    wanted = [[i > 0 and data.draw(st.booleans()) for i in range(len(r))] for r in rows]
    out = grid(rows, wanted, share_prefix=share, micro_tokens=budget)
    expected, start = {}, 0
    for r, w in zip(rows, wanted, strict=True):
        expected |= {start + i: r[:i] for i in range(len(r)) if w[i]}
        start += len(r)
    seen = walk(rows, out)
    assert {t: ids for t, (ids, _) in seen.items()} == expected
    assert all(m.tokens <= budget for m in out.micro)
    active = [i for i, w in enumerate(wanted) if any(w)]
    assert [r for m in out.micro for r in m.row_R.tolist()] == active
    for micro in out.micro:
        assert (micro.parent_S < np.arange(len(micro.parent_S))).all()
        assert len(set(micro.token_P.tolist())) == micro.tokens
        assert micro.length_S.min() > 0
        assert micro.length_S.sum() == micro.tokens
    fed = sum(max(i for i in range(len(r)) if w[i]) for r, w in zip(rows, wanted, strict=True) if any(w))
    assert out.forwarded + out.saved == fed
    assert out.saved >= 0
    assert share or out.saved == 0
    assert out.trained == len(expected)


@given(
    rows=st.lists(row, min_size=1, max_size=12),
    units=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    share=st.booleans(),
)
def test_a_unit_is_never_split(rows: list[list[int]], units: list[int], share: bool) -> None:
    unit_R = np.asarray(units[: len(rows)])
    try:
        out = grid(rows, unit_R=unit_R, micro_tokens=48, share_prefix=share)
    except PlanError:
        return
    where: dict[int, set[int]] = {}
    for i, micro in enumerate(out.micro):
        for r in micro.row_R:
            where.setdefault(int(unit_R[r]), set()).add(i)
    assert all(len(places) == 1 for places in where.values())


def test_a_prompt_is_computed_once() -> None:
    prompt = list(range(10, 20))
    rows = [[*prompt, 1, 2, 3], [*prompt, 4, 5, 6, 7], [*prompt, 8, 9]]
    wanted = [[i >= 10 for i in range(len(r))] for r in rows]
    out = grid(rows, wanted)
    (micro,) = out.micro
    # 10 of the prompt, then each answer without its last token, which predicts nothing.
    assert micro.tokens == 10 + 2 + 3 + 1
    assert out.saved == 20
    assert micro.parent_S.tolist() == [-1, 0, 0, 0]
    assert micro.source_N[micro.target_N == 10].tolist() == [
        9
    ]  # the prompt's last token predicts all three firsts
    assert micro.source_N[micro.target_N == 23].tolist() == [9]


def test_equal_rows_cost_nothing() -> None:
    rows = [[1, 2, 3, 4, 5, 6, 7]] * 4
    out = grid(rows)
    assert out.forwarded == 6
    assert out.saved == 18
    assert out.trained == 24


def test_short_common_beginnings_are_not_shared() -> None:
    common = list(range(MIN_SHARED - 1))
    out = grid([[*common, 7, 7, 7], [*common, 8, 8, 8]])
    assert out.saved == 0


def test_equal_tokens_at_other_positions_are_not_shared() -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    position = np.r_[np.arange(6), np.arange(6) + 3]
    assert grid(rows, position_T=position).saved == 0


def test_what_follows_the_last_wanted_token_is_not_fed() -> None:
    out = grid([[1, 2, 3, 4, 5, 6]], [[False, True, False, True, False, False]])
    assert out.micro[0].token_P.tolist() == [0, 1, 2]
    assert out.micro[0].target_N.tolist() == [1, 3]
    assert out.micro[0].source_N.tolist() == [0, 2]


def test_too_large_a_unit_says_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"needs 9 tokens in one forward pass.*micro_tokens to at least 9"):
        grid([[1] * 4, list(range(10))], micro_tokens=8)


def test_first_token_cannot_be_trained() -> None:
    with pytest.raises(PlanError, match="row 0: its first token"):
        grid([[1, 2]], [[True, True]])


def test_same_batch_same_grid() -> None:
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 2, rng.integers(2, 20)).tolist() for _ in range(30)]
    first, second = (grid(rows, micro_tokens=64) for _ in range(2))
    for a, b in zip(first.micro, second.micro, strict=True):
        for name in ("token_P", "start_S", "parent_S", "target_N", "source_N"):
            assert (getattr(a, name) == getattr(b, name)).all()


def test_five_long_and_five_short_ranks_of_old_get_the_same_number_of_micro_batches() -> None:
    """5 rows of 95 tokens, or of 20 tokens 5 to a unit: 5 micro-batches of at most 100 either way."""
    long = grid([[i] * 96 for i in range(5)], micro_tokens=100, share_prefix=False)
    short = grid(
        [[i] * 21 for i in range(25)], micro_tokens=100, share_prefix=False, unit_R=np.repeat(np.arange(5), 5)
    )
    assert len(long.micro) == len(short.micro) == 5
