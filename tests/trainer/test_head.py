"""The chunked projection against full log-softmax and autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trivet.trainer import head as module
from trivet.trainer.head import Head, Positions, Read, Slopes

HIDDEN, VOCABULARY, PACKED, TRAINED = 6, 11, 9, 14


def setup(
    dtype: torch.dtype, *, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Positions]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(PACKED, HIDDEN, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(VOCABULARY, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    at = Positions(
        torch.randint(PACKED, (TRAINED,), generator=g),
        torch.randint(VOCABULARY, (TRAINED,), generator=g),
        (torch.rand(TRAINED, generator=g, dtype=torch.float64) + 0.5).to(dtype),
    )
    return hidden, weight, b, at


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, at: Positions
) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.nn.functional.linear(hidden[at.source_N], weight, bias) / at.temperature_N[:, None]
    full = torch.log_softmax(z, -1)
    return full.gather(1, at.target_N[:, None])[:, 0], -(full.exp() * full).sum(-1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL_VOCABULARY", 0)
    monkeypatch.setattr(module, "_CACHED", 2 * VOCABULARY)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_equal_autograd(chunk: int, bias: bool, with_entropy: bool) -> None:
    hidden, weight, b, at = setup(torch.float64, bias=bias)
    factor = torch.linspace(-1, 2, TRAINED, dtype=torch.float64)
    logp, entropy = reference(hidden, weight, b, at)
    loss = (factor * logp.exp()).sum() + (0.3 * entropy.square().sum() if with_entropy else 0.0)
    leaves = [t for t in (hidden, weight, b) if t is not None]
    expected = torch.autograd.grad(loss, leaves)
    head = Head(weight, b, chunk, torch.float64)

    def derivative(part: slice, read: Read) -> Slopes:
        lp, h, _ = read
        assert torch.allclose(lp, logp[part].detach(), atol=1e-12)
        if not with_entropy:
            return Slopes(factor[part] * lp.exp())
        assert h is not None
        assert torch.allclose(h, entropy[part].detach(), atol=1e-12)
        return Slopes(factor[part] * lp.exp(), 0.6 * h)

    d_hidden = head.backward(hidden.detach(), at, derivative, entropy=with_entropy, keep=with_entropy)
    got = [d_hidden, *(t.grad for t in leaves[1:])]
    for a, e in zip(got, expected, strict=True):
        assert torch.allclose(a, e, rtol=0, atol=1e-11)


def test_logprobs_and_entropy() -> None:
    hidden, weight, b, at = setup(torch.float32)
    logp, entropy, _ = Head(weight, b, 4, torch.float32).logprobs(hidden.detach(), at, entropy=True)
    expected, spread = reference(hidden, weight, b, at)
    assert entropy is not None
    assert torch.allclose(logp, expected, atol=1e-5)
    assert torch.allclose(entropy, spread, atol=1e-5)


def test_temperature_divides_logits_before_the_softmax() -> None:
    """Logits [1, 0, -1, -2] at 0.6, by hand: raw (-0.4402) and raw / T (-0.7336) would be wrong."""
    weight = torch.tensor([[1.0], [0.0], [-1.0], [-2.0]])
    at = Positions(torch.zeros(2, dtype=torch.long), torch.tensor([0, 3]), torch.full((2,), 0.6))
    logp = Head(weight, None, 8, torch.float32).logprobs(torch.ones(1, 1), at).logp
    assert logp[0] == pytest.approx(-0.2081, abs=5e-5)
    assert logp[1] == pytest.approx(-5.2081, abs=5e-5)


def test_hopeless_tokens_keep_an_exact_logarithm() -> None:
    """p underflows float32 at logits 200 apart; log p = -200 must not become -inf."""
    weight = torch.tensor([[200.0], [0.0]])
    at = Positions(torch.zeros(1, dtype=torch.long), torch.tensor([1]), torch.ones(1))
    logp, entropy, _ = Head(weight, None, 8, torch.float32).logprobs(torch.ones(1, 1), at, entropy=True)
    assert logp.item() == pytest.approx(-200.0, abs=1e-3)
    assert entropy is not None
    assert entropy.item() == pytest.approx(0.0, abs=1e-3)
    assert math.isfinite(entropy.item())


def test_frozen_projection_gets_no_gradient() -> None:
    hidden, weight, b, at = setup(torch.float64)
    weight.requires_grad_(False)
    d = Head(weight, b, 4, torch.float64).backward(
        hidden.detach(), at, lambda part, read: Slopes(torch.ones_like(read.logp))
    )
    assert weight.grad is None
    assert d.abs().sum() > 0


def test_bfloat16_products_stay_close() -> None:
    hidden, weight, b, at = setup(torch.float32)
    exact = Head(weight, b, 4, torch.float32).logprobs(hidden.detach(), at).logp
    rough = Head(weight, b, 4, torch.bfloat16).logprobs(hidden.detach(), at).logp
    assert rough.dtype == torch.float32
    assert (exact - rough).abs().max() < 0.1


def test_entries_in_bfloat16_products() -> None:
    """Values and all gradients near those of float32 products: what is scattered is not lost in rounding."""
    hidden, weight, b, at = setup(torch.float32)
    g = torch.Generator().manual_seed(5)
    offset = np.arange(0, 3 * TRAINED + 1, 3)
    ids = torch.cat([torch.randperm(VOCABULARY, generator=g)[:3] for _ in range(TRAINED)])
    at = Positions(at.source_N, at.target_N, at.temperature_N, (offset, ids))
    pull = torch.randn(len(ids), generator=g)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        weight.grad = b.grad = None  # type: ignore[union-attr]
        head = Head(weight, b, 4, dtype)
        top = head.logprobs(hidden.detach(), at).top
        d_hidden = head.backward(
            hidden.detach(),
            at,
            lambda part, read: Slopes(torch.ones_like(read.logp), None, pull[3 * part.start : 3 * part.stop]),
        )
        found.append([top, d_hidden, weight.grad, b.grad])  # type: ignore[union-attr]
    for exact, rough in zip(*found, strict=True):
        assert rough.dtype == torch.float32
        assert 0 < (exact - rough).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entries_equal_autograd(chunk: int, with_entropy: bool, dtype: torch.dtype) -> None:
    """Log-probabilities of further tokens, some none, the sampled token among them, and all gradients."""
    hidden, weight, b, at = setup(dtype)
    g = torch.Generator().manual_seed(3)
    count = np.asarray([0, 3, 1, 2, 0, 4, 11, 0, 1, 1, 5, 2, 0, 3])
    offset = np.concatenate([[0], np.cumsum(count)])
    ids = torch.cat([torch.randperm(VOCABULARY, generator=g)[:k] for k in count])
    ids[0] = at.target_N[1]
    row = torch.from_numpy(np.repeat(np.arange(TRAINED), count))
    pull = torch.randn(len(ids), generator=g, dtype=torch.float64).to(dtype)
    z = torch.nn.functional.linear(hidden[at.source_N], weight, b) / at.temperature_N[:, None]
    full = torch.log_softmax(z, -1)
    logp, entropy, top = (
        full.gather(1, at.target_N[:, None])[:, 0],
        -(full.exp() * full).sum(-1),
        full[row, ids],
    )
    loss = (
        logp.exp().sum() + (pull * top.square()).sum() + (0.3 * entropy.square().sum() if with_entropy else 0)
    )
    leaves = [t for t in (hidden, weight, b) if t is not None]
    expected = torch.autograd.grad(loss, leaves)
    at = Positions(at.source_N, at.target_N, at.temperature_N, (offset, ids))
    head = Head(weight, b, chunk, dtype)
    exact = 1e-11 if dtype == torch.float64 else 2e-4
    assert torch.allclose(head.logprobs(hidden.detach(), at).top, top, rtol=0, atol=exact)  # type: ignore[arg-type]

    def derivative(part: slice, read: Read) -> Slopes:
        here = slice(int(offset[part.start]), int(offset[part.stop]))
        assert read.top is not None
        slope = 2 * pull[here] * read.top
        return Slopes(read.logp.exp(), 0.6 * read.entropy if with_entropy else None, slope)  # type: ignore[operator]

    d_hidden = head.backward(hidden.detach(), at, derivative, entropy=with_entropy, keep=with_entropy)
    got = [d_hidden, *(t.grad for t in leaves[1:])]
    for a, e in zip(got, expected, strict=True):
        assert torch.allclose(a, e, rtol=exact, atol=exact)
