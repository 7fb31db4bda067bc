"""Every way of computing packed attention against one dense, masked softmax."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from trivet.trainer import attention
from trivet.trainer.attention import AttentionError, AttentionPlan, packed_attention
from trivet.trainer.packing import MicroBatch


def forest(lengths: list[int], parents: list[int]) -> MicroBatch:
    length = np.asarray(lengths, np.int64)
    empty = np.zeros(0, np.int64)
    return MicroBatch(
        np.arange(length.sum()),
        np.cumsum(length) - length,
        length,
        np.asarray(parents, np.int64),
        empty,
        empty,
        empty,
    )


def dense(
    micro: MicroBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    """(1, heads, _P, d) -> (1, _P, heads, d): token by token, from the definition."""
    owner = np.repeat(np.arange(len(micro.length_S)), micro.length_S)
    group, paths, out = q.shape[1] // k.shape[1], micro.paths(), []
    for token, segment in enumerate(owner):
        ranges = [range(micro.start_S[s], micro.start_S[s] + micro.length_S[s]) for s in paths[segment]]
        keys = [p for p in itertools.chain(*ranges) if p <= token or owner[p] != segment]
        keys = keys[-window:] if window else keys
        rows = []
        for h in range(q.shape[1]):
            kk, vv = k[0, h // group, keys], v[0, h // group, keys]
            rows.append(torch.softmax(kk @ q[0, h, token] * q.shape[-1] ** -0.5, 0) @ vv)
        out.append(torch.stack(rows))
    return torch.stack(out)[None]


FORESTS = {
    "one": ([7], [-1]),
    "flat": ([3, 9, 1, 4], [-1, -1, -1, -1]),
    "group": ([6, 4, 4, 4], [-1, 0, 0, 0]),
    "ragged": ([5, 3, 1, 8, 2, 6, 4], [-1, 0, 1, 1, -1, 4, 0]),
}


@pytest.mark.parametrize("kind", ["segments", "mask"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("long", "block"), [(512, 128), (512, 3), (5, 128)], ids=["products", "pieces", "flash"]
)
@pytest.mark.parametrize("name", FORESTS)
def test_equals_dense(
    name: str, long: int, block: int, window: int | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LONG", long)
    monkeypatch.setattr(attention, "BLOCK", block)
    micro = forest(*FORESTS[name])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, micro.tokens, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    tensors = (q, k, v)
    plan = AttentionPlan(micro, torch.device("cpu"), kind)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, trivet_plan=plan)
    expected = dense(micro, q, k, v, window)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    got, want = torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [None, 3])
def test_values_of_another_size_than_the_queries(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention has them; the flash kernel, meant for long segments, refuses them."""
    monkeypatch.setattr(attention, "LONG", 5)
    micro = forest(*FORESTS["ragged"])
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, micro.tokens, d, dtype=torch.float64, requires_grad=True)
        for h, d in ((4, 8), (2, 8), (2, 6))
    )
    plan = AttentionPlan(micro, torch.device("cpu"))
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, trivet_plan=plan)
    expected = dense(micro, q, k, v, window)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    got, want = torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_many_documents_in_few_buckets() -> None:
    """512 answers of 12..28 tokens under 32 prompts: a handful of calls, not one a document."""
    rng = np.random.default_rng(0)
    lengths, parents = [], []
    for _ in range(32):
        root = len(lengths)
        lengths += [int(rng.integers(8, 13)), *rng.integers(12, 28, 16).tolist()]
        parents += [-1, *[root] * 16]
    plan = AttentionPlan(forest(lengths, parents), torch.device("cpu"))
    buckets = plan.layout(2, None, torch.float32, flash=True).buckets
    assert sum(b.documents for b in buckets) == len(lengths)
    assert len(buckets) <= 10
    real = int((plan.keys_S * plan.micro.length_S).sum())
    assert sum(b.documents * b.queries * b.keys for b in buckets) < 1.5 * real


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_what_is_not_computed_is_refused(extra: dict[str, Any]) -> None:
    plan = AttentionPlan(forest([3], [-1]), torch.device("cpu"))
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(AttentionError, match=next(iter(extra))):
        packed_attention(torch.nn.Identity(), q, q, q, None, trivet_plan=plan, **extra)


def test_a_model_that_drops_the_plan_is_told_so() -> None:
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(AttentionError, match="cannot be trained packed"):
        packed_attention(torch.nn.Identity(), q, q, q, None)
