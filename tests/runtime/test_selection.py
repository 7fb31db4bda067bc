"""Which checkpoint is handed on, and when a plateau ends a stage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.recipe.supervised import KeepBest
from trivet.runtime.selection import Standing, look


def after(values: list[float], **config: object) -> Standing:
    standing = Standing()
    for step, value in enumerate(values):
        standing = look(standing, KeepBest(metric="eval/held_out/loss", **config), step, value)
    return standing


@given(st.lists(st.floats(-10, 10), min_size=1), st.sampled_from(["min", "max"]), st.floats(0, 3))
def test_the_first_of_the_best(values: list[float], mode: str, delta: float) -> None:
    best = (min if mode == "min" else max)(values)
    standing = after(values, mode=mode, min_delta=delta)
    assert standing.best == best
    assert standing.step == values.index(best)


def test_progress_is_counted_from_the_last_progress() -> None:
    """Small steps add up: 1.0, 0.96, 0.92 is progress of more than 0.05 from the first to the third."""
    assert after([1.0, 0.96], min_delta=0.05).waited == 1
    assert after([1.0, 0.96, 0.92], min_delta=0.05).waited == 0
    assert after([1.0, 0.96, 0.97], min_delta=0.05) == Standing(1, 0.96, 1.0, 2)
    assert after([1.0, 1.0]).waited == 1  # no better is no progress


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_best(bad: float) -> None:
    assert after([bad, 2.0, bad]) == Standing(1, 2.0, 2.0, 1)
    assert after([bad]) == Standing(None, None, None, 1)
