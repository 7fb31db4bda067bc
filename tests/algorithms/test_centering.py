"""Score centering: the gradient against its formula, its expectation under the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivet.algorithms import AlgorithmError, resolve
from trivet.algorithms.base import ObjectiveInputs, TopInputs
from trivet.algorithms.objectives import CentredPG

torch = pytest.importorskip("torch")
VOCABULARY = 7


def inputs(logits, tokens, weight, advantage, entries):
    """Positions over one matrix of logits; `entries`: per position {id: sampler log-probability}."""
    full = torch.log_softmax(logits, -1)
    position = [p for p, top in enumerate(entries) for _ in top]
    ids = [k for top in entries for k in top]
    logq = [v for top in entries for v in top.values()]
    row = torch.tensor(position, dtype=torch.long)
    top = TopInputs(
        row, torch.tensor(logq, dtype=logits.dtype), full[row, torch.tensor(ids, dtype=torch.long)]
    )
    logp = full.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return ObjectiveInputs(
        logp_P=logp,
        weight_P=torch.tensor(weight, dtype=logits.dtype),
        unit_P=torch.zeros(len(tokens), dtype=torch.long),
        units=0,
        behaviour_P=logp.detach() - 0.1,
        advantage_P=torch.tensor(advantage, dtype=logits.dtype),
        top=top,
    )


def test_golden_number():
    """Two tokens, pi = (0.75, 0.25), sampled 0, q stored as (0.3, 0.1) -> renormalised (0.75, 0.25).

    sum q log pi = 0.75 * -0.287682 + 0.25 * -1.386294 = -0.562335; log pi(0) - that = 0.274653;
    w = 0.5, A = 2: l = -0.274653.
    """
    logits = torch.log(torch.tensor([[0.75, 0.25]], dtype=torch.float64))
    x = inputs(logits, [0], [0.5], [2.0], [{0: math.log(0.3), 1: math.log(0.1)}])
    terms, stats = CentredPG()(x)
    assert float(terms) == pytest.approx(-0.274653, abs=1e-6)
    assert float(stats["uncentred"]) == 0
    assert float(stats["top_mass"]) == pytest.approx(0.4)


def test_gradient_is_the_formula():
    """w A (grad log p(token) - sum_k q_k grad log p(k)), each gradient taken by autograd on its own."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCABULARY, generator=g, dtype=torch.float64).requires_grad_()
    tokens, weight, advantage = [2, 5, 0], [0.3, 1.1, 0.7], [1.5, -2.0, 0.4]
    entries = [
        {2: -0.5, 3: -1.5, 6: -4.0},
        {},
        {1: -0.2, 4: -2.2},
    ]  # the second is not centred; 0 not among its own
    terms, stats = CentredPG()(inputs(logits, tokens, weight, advantage, entries))
    (got,) = torch.autograd.grad(terms.sum(), logits)
    expected = torch.zeros_like(logits)
    for p, (token, w, a, top) in enumerate(zip(tokens, weight, advantage, entries, strict=True)):
        mass = sum(math.exp(v) for v in top.values())
        for k, share in [(token, 1.0), *((k, -math.exp(v) / mass) for k, v in top.items())]:
            one = torch.log_softmax(logits, -1)[p, k]
            expected -= w * a * share * torch.autograd.grad(one, logits)[0]
    assert torch.allclose(got, expected, atol=1e-14)
    assert float(stats["uncentred"]) == 1


def test_expectation_under_the_sampler_is_zero_with_the_whole_vocabulary():
    """sum over tokens of q(token) * gradient = 0, for a other sampler; uncentred it is not."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(1, VOCABULARY, generator=g, dtype=torch.float64).requires_grad_()
    logq = torch.log_softmax(torch.randn(VOCABULARY, generator=g, dtype=torch.float64), -1)
    total, plain = torch.zeros_like(logits), torch.zeros_like(logits)
    for token in range(VOCABULARY):
        x = inputs(logits, [token], [1.0], [1.0], [{k: float(logq[k]) for k in range(VOCABULARY)}])
        q = logq[token].exp()
        total += q * torch.autograd.grad(CentredPG()(x)[0].sum(), logits)[0]
        plain += q * torch.autograd.grad(torch.log_softmax(logits, -1)[0, token], logits)[0]
    assert total.abs().max() < 1e-15
    assert plain.abs().max() > 0.05


def test_algorithm_asks_for_the_top_and_batches_without_are_refused(batch_of):
    from trivet.algorithms import prepare, stream_loss

    algorithm = resolve("score_centering")
    assert algorithm.needs == {"top", "proximal_logp"}
    prepared = prepare(batch_of([0.0, 1.0]), algorithm)
    stream = prepared.streams[0]
    index = np.flatnonzero(stream.active_T)
    with pytest.raises(AlgorithmError, match=r"engine\.top"):
        stream_loss(prepared, stream, index, torch.zeros(len(index)))
