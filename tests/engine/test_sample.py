"""Sampling: exact distribution, exact log-probabilities, randomness that belongs to the request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.engine import request_seed
from trivet.engine.torch.sample import _BELOW_ONE, Plan, choose, narrow, sample, uniforms
from trivet.engine.torch.slots import ragged_top

CPU = torch.device("cpu")


def _plan(*rows: tuple[float, float, int, int]) -> Plan:
    return Plan.of(rows, CPU)


def test_golden_temperature_logprobs() -> None:
    """Logits [1,0,-1,-2] at T 0.6: log p(0) = -0.2081, log p(3) = -5.2081 (raw would be -0.4402)."""
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]])
    first = sample(logits.clone(), torch.tensor([0.0], dtype=torch.float64), _plan((0.6, 1, 0, 0)))
    last = sample(logits.clone(), torch.tensor([_BELOW_ONE], dtype=torch.float64), _plan((0.6, 1, 0, 0)))
    assert (first.ids_B[0], last.ids_B[0]) == (0, 3)
    assert first.logprob_B[0] == pytest.approx(-0.2081, abs=5e-5)
    assert last.logprob_B[0] == pytest.approx(-5.2081, abs=5e-5)
    raw = sample(logits.clone(), torch.tensor([0.0], dtype=torch.float64), _plan((1.0, 1, 0, 0)))
    assert raw.logprob_B[0] == pytest.approx(-0.4402, abs=5e-5)


def test_768_requests_have_distinct_seeds_and_first_numbers() -> None:
    seeds = {request_seed("run", f"task{t}", 0, a) for t in range(48) for a in range(16)}
    assert len(seeds) == 768
    assert len({float(uniforms(seed, 1)[0]) for seed in seeds}) == 768


def _chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom; symbols expected less than 5 times are pooled."""
    expected = p * counts.sum()
    rare = expected < 5
    pooled = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    used = pooled[1] > 0
    return float((((pooled[0] - pooled[1]) ** 2)[used] / pooled[1][used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("vocab", [7, 97, 2304, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_those_of_softmax(vocab: int, temperature: float) -> None:
    """Direct (small) and blockwise (large, whole blocks or not) draws against softmax(logits / T)."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 2, vocab).astype(np.float32))
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    counts, rows = np.zeros(vocab), 500
    for trial in range(40):
        u = torch.from_numpy(np.random.default_rng([vocab, trial]).random(rows))
        drawn = sample(logits.expand(rows, -1).clone(), u, _plan(*[(temperature, 1, 0, 0)] * rows))
        np.add.at(counts, drawn.ids_B, 1)
        assert np.abs(drawn.logprob_B - np.log(p[drawn.ids_B])).max() < 2e-5
    statistic, freedom = _chi_square(counts, p)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("vocab", [33, 3000])
def test_inverse_cdf_to_the_token(vocab: int) -> None:
    """choose() returns the token whose interval of the cumulative distribution holds u."""
    rng = np.random.default_rng(3)
    p = torch.softmax(torch.from_numpy(rng.normal(0, 3, (1, vocab)).astype(np.float32)), -1)
    edges = np.concatenate([[0], np.cumsum(p[0].double().numpy())])
    edges /= edges[-1]
    u = rng.random(2000)
    got = choose(p.expand(2000, -1), torch.from_numpy(u)).numpy()
    assert ((edges[got] <= u + 1e-6) & (u <= edges[got + 1] + 1e-6)).all()


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([5, 300, 2100, 4099]),
    seed=st.integers(0, 2**32 - 1),
    u=st.one_of(st.sampled_from([0.0, _BELOW_ONE]), st.floats(0, _BELOW_ONE)),
)
def test_a_token_of_probability_zero_is_never_drawn(vocab: int, seed: int, u: float) -> None:
    rng = np.random.default_rng(seed)
    logits = np.full(vocab, -np.inf, np.float32)
    alive = rng.choice(vocab, rng.integers(1, min(vocab, 9)), replace=False)
    logits[alive] = rng.normal(0, 20, len(alive))
    drawn = sample(
        torch.from_numpy(logits[None]), torch.tensor([u], dtype=torch.float64), _plan((1, 1, 0, 0))
    )
    assert drawn.ids_B[0] in alive
    assert np.isfinite(drawn.logprob_B).all()


def test_uniforms_are_splitmix64s() -> None:
    """The generator's published outputs for the seed 1234567, as 53-bit fractions."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert uniforms(1234567, 5).tolist() == [(x >> 11) / 2**53 for x in published]


def test_uniforms_depend_on_seed_and_position_only() -> None:
    long, short = uniforms(11, 100), uniforms(11, 10)
    assert np.array_equal(long[:10], short)
    assert not np.array_equal(uniforms(12, 10), short)
    assert (long >= 0).all()
    assert (long < 1).all()
    assert uniforms(2**63 - 1, 1).shape == (1,)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 3)
    u = torch.full((3,), 0.9, dtype=torch.float64)
    drawn = sample(logits.clone(), u, _plan((0, 1, 0, 0), (1, 1, 0, 0), (0.5, 1, 0, 0)))
    one, half = torch.log_softmax(logits[0], -1).numpy(), torch.log_softmax(logits[0] * 2, -1).numpy()
    assert drawn.ids_B[0] == 1
    assert drawn.logprob_B[0] == pytest.approx(one[1], abs=1e-6)  # greedy: of softmax(logits)
    assert drawn.logprob_B[1] == pytest.approx(one[drawn.ids_B[1]], abs=1e-6)
    assert drawn.logprob_B[2] == pytest.approx(half[drawn.ids_B[2]], abs=1e-6)


def test_top_p_and_top_k_narrow_the_choice_but_not_the_logprob() -> None:
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    assert narrow(p, [0.6], [0])[0].tolist() == pytest.approx([0, 0.5, 0, 0.25])
    assert narrow(p, [1.0], [1])[0].tolist() == pytest.approx([0, 0.5, 0, 0])
    assert narrow(p, [1e-9], [0])[0].tolist() == pytest.approx([0, 0.5, 0, 0])
    rows = 400
    u = torch.from_numpy(np.random.default_rng(0).random(rows))
    drawn = sample(p.log().expand(rows, -1).clone(), u, _plan(*[(1.0, 1.0, 2, 0)] * rows))
    assert set(drawn.ids_B.tolist()) == {1, 3}
    assert np.allclose(drawn.logprob_B, np.log(p[0].numpy()[drawn.ids_B]), atol=1e-6)


def test_top_keeps_what_matters() -> None:
    p = torch.tensor([[0.9, 0.0999, 5e-5, 5e-5]])
    drawn = sample(p.log(), torch.zeros(1, dtype=torch.float64), _plan((1, 1, 0, 3)))
    assert drawn.top_id_BK is not None
    assert drawn.top_p_BK is not None
    top = ragged_top([(drawn.top_id_BK[0], drawn.top_p_BK[0])] * 2)
    assert top.offset_T.tolist() == [0, 2, 4]  # the third is below 1e-4
    assert top.id_K.tolist() == [0, 1, 0, 1]
    assert np.allclose(top.logprob_K, np.log([0.9, 0.0999] * 2), atol=2e-3)
    assert top.mass_T == pytest.approx([0.9999] * 2, abs=1e-4)
