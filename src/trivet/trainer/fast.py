"""Cheaper ways of computing what most models here have: RMS norms, gated MLPs, the embedding's gradient.

All are proved equal on the module at hand before they take its place; a module that computes something else
keeps its own forward.
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch import nn


class _RMSNorm(torch.autograd.Function):
    """y = w x r with r = (mean(x^2) + eps)^-1/2: keeps x and r only.

    dx = r (g w) - x r^3 mean(g w x), dw = sum over tokens of g x r.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        r.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return torch.mul(wide, r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        size = x.shape[-1]
        wide = (x if x.dtype == r.dtype else x.to(r.dtype)).reshape(-1, size)
        g, flat_r = grads[0].to(r.dtype).reshape(-1, size), r.view(-1)
        product = g * wide
        d_weight = torch.mv(product.t(), flat_r).to(weight.dtype) if ctx.needs_input_grad[1] else None
        pull = torch.mv(product, weight.to(r.dtype)).mul_(flat_r.pow(3)).div_(-size)
        dx = torch.mul(g, weight, out=product).mul_(flat_r[:, None]).addcmul_(wide, pull[:, None])
        return dx.view(x.shape).to(x.dtype), d_weight, None


def _norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _RMSNorm.apply(x, self.weight, self.trivet_eps))


@torch.no_grad()
def replace_norms(module: nn.Module) -> int:
    """Let the model's RMS norms compute as `_RMSNorm`, where that gives what they give; how many do."""
    count = 0
    generator = torch.Generator().manual_seed(0)
    for norm in module.modules():
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or eps is None or "forward" in vars(norm):
            continue
        if not type(norm).__name__.endswith("RMSNorm") or len(dict(norm.named_parameters())) != 1:
            continue
        x = torch.randn(3, len(weight), generator=generator).to(weight)
        own, fast = norm(x), cast(torch.Tensor, _RMSNorm.apply(x, weight, float(eps)))
        if own.shape == fast.shape and torch.allclose(own, fast, rtol=1e-5, atol=1e-6):
            norm.trivet_eps = float(eps)  # type: ignore[assignment]
            norm.forward = types.MethodType(_norm_forward, norm)
            count += 1
    return count


class _Gate(torch.autograd.Function):
    """silu(a) b: keeps a and b, not silu(a)."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return nn.functional.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * b, a), nn.functional.silu(a).mul_(grads[0])


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


@torch.no_grad()
def replace_mlps(module: nn.Module) -> int:
    """Let gated MLPs compute through `_Gate`, where that gives what they give; how many do."""
    count = 0
    generator = torch.Generator().manual_seed(0)
    for mlp in module.modules():
        parts = dict(mlp.named_children())
        linear = [parts.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
        first = linear[0]
        if not isinstance(first, nn.Linear) or not all(isinstance(p, nn.Linear) for p in linear):
            continue
        if set(parts) - {"gate_proj", "up_proj", "down_proj", "act_fn"} or "forward" in vars(mlp):
            continue
        x = torch.randn(3, first.in_features, generator=generator).to(first.weight)
        if torch.allclose(mlp(x), _mlp_forward(mlp, x), rtol=1e-5, atol=1e-6):
            mlp.forward = types.MethodType(_mlp_forward, mlp)
            count += 1
    return count


class _Rows(torch.autograd.Function):
    """Rows of the embedding; their gradient goes straight into `weight.grad`.

    autograd would fill a second matrix of the vocabulary's size for each micro-batch, and add it.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids_P: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.ids_P = weight, ids_P
        return weight.detach().index_select(0, ids_P)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        add_rows(gradient_of(ctx.weight), ctx.ids_P, grads[0])
        return None, None


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """`parameter.grad`, made where it is missing."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def add_rows(matrix: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    matrix.index_add_(0, rows, values.to(matrix.dtype))


def embed(embedding: nn.Module, ids_P: torch.Tensor) -> torch.Tensor:
    """What `embedding(ids_P)` gives, (_P, hidden). A padding row, if it has one, is trained like any other:
    packed rows hold no padding, and many models pad with a token their conversations really use."""
    if type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding._forward_hooks:
        return cast(torch.Tensor, _Rows.apply(embedding.weight, ids_P))
    return embedding(ids_P)
