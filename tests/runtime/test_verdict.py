"""Marks of short runs, on made-up series."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.runtime.verdict import loss_spikes, norm_spikes, verdict


def falling(n: int = 60, noise: float = 0.02, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return (1.0 + 2.0 * np.exp(-np.arange(n) / 15) + rng.normal(0, noise, n)).tolist()


def even(n: int = 60, seed: int = 1) -> list[float]:
    return (1.0 + np.random.default_rng(seed).uniform(-0.3, 0.3, n)).tolist()


@given(st.integers(0, 500), st.sampled_from([0.0, 0.005, 0.02, 0.05]))
def test_a_falling_loss_is_stable(seed: int, noise: float) -> None:
    assert verdict(falling(noise=noise, seed=seed), even(seed=seed)).mark == "stable"


@given(st.integers(0, 500))
def test_a_flat_loss_is_stable(seed: int) -> None:
    """Noise around one value, also around 0 as rewards' objectives have it."""
    rng = np.random.default_rng(seed)
    assert verdict((2.0 + rng.uniform(-0.05, 0.05, 60)).tolist(), even()).mark == "stable"


@pytest.mark.parametrize("at", [9, 20, 59])
def test_one_spike_of_the_loss(at: int) -> None:
    losses = falling()
    losses[at] += 2.0
    found = verdict(losses, even())
    assert found.mark == "spiking"
    assert f"loss at step {at + 1}" in found.why
    assert loss_spikes(losses) == [at]


def test_one_spike_of_the_gradient() -> None:
    norms = even()
    norms[30] = 9.0
    found = verdict(falling(), norms)
    assert found.mark == "spiking"
    assert "gradient norm at step 31" in found.why
    assert norm_spikes(norms) == [30]


def test_a_rise_above_the_start_diverges() -> None:
    losses = [2.0 + 0.05 * i for i in range(40)]
    assert verdict(losses, even(40)).mark == "diverging"
    assert "ended at" in verdict(losses, even(40)).why


def test_a_fall_that_is_lost_again_diverges() -> None:
    """It ends below its start, and far above what it had reached."""
    losses = [*falling(40), *(np.linspace(1.2, 2.6, 20)).tolist()]
    found = verdict(losses, even())
    assert found.mark == "diverging"
    assert "fell from" in found.why


def test_a_little_of_it_lost_is_no_divergence() -> None:
    losses = [*falling(40), *(np.linspace(1.1, 1.3, 20)).tolist()]
    assert verdict(losses, even()).mark == "stable"


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient norm"])
def test_what_is_no_number_diverges(bad: float | None, where: str) -> None:
    losses: list[float | None] = list(falling())
    norms: list[float | None] = list(even())
    (losses if where == "loss" else norms)[7] = bad
    found = verdict(losses, norms)
    assert found == ("diverging", f"{where} of step 8 is no finite number")


def test_a_loss_that_stands_still_has_no_spikes() -> None:
    """Equal values have no deviation: a tenth of the value is still needed."""
    assert verdict([2.0] * 20 + [2.1] + [2.0] * 20, [0.0] * 41).mark == "stable"
    assert verdict([2.0] * 20 + [2.3] + [2.0] * 20, [0.0] * 41).mark == "spiking"


def test_few_steps_are_judged_by_what_there_is() -> None:
    assert verdict([3.0, 5.0], [1.0, 1.0]).mark == "stable"
    assert verdict([], []).mark == "stable"
    assert verdict([3.0, math.nan], [1.0, 1.0]).mark == "diverging"
