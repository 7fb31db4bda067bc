"""pass@k and intervals against numbers worked by hand and against counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.evals import mean_interval, pass_at_k, wilson


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (8, 2, 4, 1 - 15 / 70),  # 1 - C(6,4)/C(8,4)
        (5, 0, 5, 0.0),
        (5, 1, 5, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_what_is_not_defined_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


def test_wilson_by_hand() -> None:
    low, high = wilson(5, 10)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    low, high = wilson(0, 10)  # z^2/(n+z^2) = 3.8415/13.8415
    assert low == 0.0
    assert high == pytest.approx(0.27754, abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_interval_holds_the_mean_and_stays_in_range(values: list[float]) -> None:
    value_N = np.asarray(values)
    low, high = mean_interval(value_N)
    assert 0 <= low <= high <= 1
    assert low - 1e-12 <= value_N.mean() <= high + 1e-12
    assert not math.isnan(low)
