"""The cheaper forms against autograd through the plain ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from trivet.trainer import fast


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def test_norm_and_gate_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(fast._RMSNorm.apply(x, w, 1e-5), plain_norm(x, w, 1e-5))  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(lambda a, b: fast._RMSNorm.apply(a, b, 1e-5), (x, w))
    assert torch.autograd.gradcheck(fast._Gate.apply, (x, y))


def test_embedding_gradient_goes_into_the_weight() -> None:
    table = torch.nn.Embedding(6, 3, padding_idx=1)
    ids, factor = torch.tensor([2, 2, 1, 5]), torch.arange(12.0).view(4, 3)
    (fast.embed(table, ids) * factor).sum().backward()
    expected = torch.zeros(6, 3).index_add_(0, ids, factor)
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad, expected)  # the padding row too: packed rows hold no padding


@pytest.mark.parametrize(("family", "norms"), [("qwen3", 9), ("llama", 5), ("qwen2", 5)])
def test_what_is_replaced(tools: Any, family: str, norms: int) -> None:
    model = tools.tiny_model(family, dtype=torch.float32)
    assert fast.replace_norms(model) == norms
    assert fast.replace_mlps(model) == 2
    assert fast.replace_norms(model) == fast.replace_mlps(model) == 0  # once is enough


def test_a_norm_that_does_something_else_is_left_alone() -> None:
    class OffsetRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.zeros(4)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return plain_norm(x, 1 + self.weight, self.eps)

    assert fast.replace_norms(OffsetRMSNorm()) == 0


def test_a_copy_has_weights_of_its_own(tools: Any) -> None:
    model = tools.tiny_model(dtype=torch.float32)
    fast.replace_norms(model)
    fast.replace_mlps(model)
    other = copy.deepcopy(model)
    x = torch.randn(1, 32)
    before = other.model.norm(x), other.model.layers[0].mlp(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(other.model.norm(x), before[0])
    assert torch.equal(other.model.layers[0].mlp(x), before[1])
    assert not model.model.norm(x).any()
