"""Attention over a packed forest of segments, for Hugging Face models that take an attention function.

A token sees its segment's tokens up to itself and all tokens of the segment's ancestors. On CPUs, segments of
similar shape are gathered into batched matrix products (grouped query heads are folded into the rows, so keys
are never repeated); long ones go through the flash kernel block by block, ancestors without a mask, joined by
their log-sum-exp (and differentiated with the joint one, which makes each block's gradient exact). Elsewhere:
variable-length kernels where nothing is shared and the dtype allows, else one boolean block mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trivet.trainer.packing import MicroBatch

NAME = "trivet_packed"
LONG = 512  # keys from which the flash kernel beats plain products (measured on AVX-512)
BLOCK = 128  # queries of a segment that are attended at once: later keys are left out block by block
_WASTE = 0.25  # padded share of a bucket's score matrices that is worth one call less
_FREE = 1 << 15  # score elements per head below which padding costs less than a call
_AREA = 1 << 19  # score elements per head in one bucket: keeps its score matrices near the cache


class AttentionError(RuntimeError):
    """The model asks for an attention that packed training does not compute; says which."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries of one segment: packed first, how many, packed indices of their keys."""

    first: int
    queries: int
    index: np.ndarray

    @property
    def keys(self) -> int:
        return len(self.index)


@dataclass(slots=True)
class _Bucket:
    """Pieces of segments (_B) of at most _L queries and _K keys. Rows index (token, kv head) pairs."""

    documents: int
    queries: int
    keys: int
    query_rows: torch.Tensor  # (_B * kv * _L,)
    key_rows: torch.Tensor  # (_B * kv * _K,)
    bias: torch.Tensor  # (_B or 1, 1, _L, 1, _K): 0 or -inf
    valid: torch.Tensor | None  # slots of query_rows that are real; None: all
    padding: torch.Tensor | None  # the others


@dataclass(slots=True)
class _Long:
    """One long segment: its packed range and its ancestors' ranges."""

    own: slice
    ancestors: list[slice]


@dataclass(slots=True)
class _Layout:
    """How one kind of layer (heads, window) computes a micro-batch."""

    buckets: list[_Bucket]
    long: list[_Long]


@dataclass
class AttentionPlan:
    """What attention must know of one micro-batch; built once, used by every layer, forward and backward.

    `kind`: "segments" (this module's CPU kernels) or "mask" (one block mask, any device); default: by device.
    """

    micro: MicroBatch
    device: torch.device
    kind: str = ""
    _layouts: dict[Any, _Layout] = field(default_factory=dict)
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)
    paths: list[list[int]] = field(init=False)
    keys_S: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.kind = self.kind or ("segments" if self.device.type == "cpu" else "mask")
        self.paths = self.micro.paths()
        length = self.micro.length_S
        self.keys_S = np.asarray([int(length[path].sum()) for path in self.paths], np.int64)

    @property
    def flat(self) -> bool:
        """No segment has a parent: plain documents side by side."""
        return bool((self.micro.parent_S < 0).all())

    def window(self, window: int | None) -> int | None:
        """The sliding window, None where it hides nothing."""
        return window if window is not None and len(self.keys_S) and window < self.keys_S.max() else None

    def key_index(self, segment: int) -> np.ndarray:
        """Packed indices of all tokens the segment's last one sees, in order."""
        micro = self.micro
        return np.concatenate(
            [np.arange(micro.start_S[s], micro.start_S[s] + micro.length_S[s]) for s in self.paths[segment]]
        )

    def layout(self, kv_heads: int, window: int | None, dtype: torch.dtype, *, flash: bool) -> _Layout:
        """`flash`: the kernel for long segments may be used (it knows no windows)."""
        key = (kv_heads, window, dtype, flash)
        if key not in self._layouts:
            every = range(len(self.paths))
            long = [s for s in every if self.keys_S[s] > LONG] if flash and window is None else []
            pieces = [p for s in every if s not in set(long) for p in self._pieces(s)]
            pieces.sort(key=lambda p: (p.keys, p.queries, p.first))
            buckets = [self._bucket(b, kv_heads, window, dtype) for b in _split(pieces)]
            self._layouts[key] = _Layout(buckets, [self._long(s) for s in long])
        return self._layouts[key]

    def _pieces(self, segment: int) -> list[_Piece]:
        """The segment's queries, BLOCK at a time, each with the keys its last query sees."""
        start, length = int(self.micro.start_S[segment]), int(self.micro.length_S[segment])
        before, index = int(self.keys_S[segment]) - length, self.key_index(segment)
        return [
            _Piece(start + a, min(BLOCK, length - a), index[: before + min(a + BLOCK, length)])
            for a in range(0, length, BLOCK)
        ]

    def _bucket(
        self, members: list[_Piece], kv_heads: int, window: int | None, dtype: torch.dtype
    ) -> _Bucket:
        length_B = np.asarray([p.queries for p in members])
        keys_B = np.asarray([p.keys for p in members])
        n, queries, keys = len(members), int(length_B.max()), int(keys_B.max())
        query, key = np.zeros((n, queries), np.int64), np.zeros((n, keys), np.int64)
        for i, piece in enumerate(members):
            query[i, : piece.queries] = np.arange(piece.first, piece.first + piece.queries)
            key[i, : piece.keys] = piece.index
        # A query's last key is itself: its depth on the path is keys - queries + its number.
        depth = (keys_B - length_B)[:, None, None] + np.arange(queries)[None, :, None]
        gap = depth - np.arange(keys)[None, None, :]
        real = np.arange(queries)[None] < length_B[:, None]
        seen = (gap >= 0) & (gap < (window or keys + queries + 1)) & real[:, :, None]
        seen[~real, 0] = True  # a padded query must see something, or its softmax is not a number
        if n > 1 and (seen == seen[:1]).all():
            seen = seen[:1]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        bias = torch.zeros(seen.shape, dtype=wide).masked_fill_(torch.from_numpy(~seen), float("-inf"))
        slots = np.broadcast_to(real[:, None], (n, kv_heads, queries)).ravel()
        padded = not real.all()
        return _Bucket(
            n,
            queries,
            keys,
            torch.from_numpy(_per_head(query, kv_heads)),
            torch.from_numpy(_per_head(key, kv_heads)),
            bias[:, None, :, None, :],
            torch.from_numpy(np.flatnonzero(slots)) if padded else None,
            torch.from_numpy(np.flatnonzero(~slots)) if padded else None,
        )

    def _long(self, segment: int) -> _Long:
        start, length = self.micro.start_S, self.micro.length_S
        ranges = [slice(int(start[s]), int(start[s] + length[s])) for s in self.paths[segment]]
        return _Long(ranges[-1], ranges[:-1])

    def mask(self, window: int | None) -> torch.Tensor:
        """Boolean (_P, _P): query row sees key column."""
        if window not in self._masks:
            seen = np.zeros((self.micro.tokens, self.micro.tokens), bool)
            for s in range(len(self.paths)):
                own = slice(int(self.micro.start_S[s]), int(self.micro.start_S[s] + self.micro.length_S[s]))
                index, length = self.key_index(s), int(self.micro.length_S[s])
                gap = (len(index) - length + np.arange(length))[:, None] - np.arange(len(index))[None]
                seen[own, index] = (gap >= 0) & (gap < (window or len(index) + 1))
            self._masks[window] = torch.from_numpy(seen).to(self.device)
        return self._masks[window]

    def ends(self) -> torch.Tensor:
        """Cumulative document lengths (int32, _S + 1), for variable-length kernels."""
        if "ends" not in self._masks:
            ends = np.concatenate([[0], np.cumsum(self.micro.length_S)]).astype(np.int32)
            self._masks["ends"] = torch.from_numpy(ends).to(self.device)
        return self._masks["ends"]


def _split(order: list[_Piece]) -> Iterator[list[_Piece]]:
    """Neighbours by size into buckets: a piece joins while the padding it causes stays cheap."""
    bucket: list[_Piece] = []
    real = widest = 0
    for piece in order:
        area, wide = piece.keys * piece.queries, max(widest, piece.queries)
        padded = (len(bucket) + 1) * wide * piece.keys
        waste = padded - real - area
        if bucket and (waste > max(_FREE, _WASTE * (real + area)) or padded > _AREA):
            yield bucket
            bucket, real, wide = [], 0, piece.queries
        bucket.append(piece)
        real, widest = real + area, wide
    if bucket:
        yield bucket


def _per_head(index: np.ndarray, kv_heads: int) -> np.ndarray:
    """(_B, _L) token indices -> flat rows of a (token, kv head) table in the order (_B, kv, _L)."""
    return (index[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]).reshape(-1)


class _Segments(torch.autograd.Function):
    """Attention of a whole micro-batch. q (_P, heads, d), k (_P, kv, d), v (_P, kv, e) -> (_P, heads, e)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: _Layout, scale: float):
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        kept = [t for b in layout.buckets for t in _bucket_forward(b, q, k, v, out, scale)]
        sums = [_long_forward(item, q, k, v, out, scale) for item in layout.long]
        ctx.layout, ctx.scale, ctx.shapes = layout, scale, (q.shape, k.shape, v.shape)
        ctx.save_for_backward(*kept, *sums, *((q, k, v, out) if layout.long else ()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        layout, grad, saved = ctx.layout, grads[0].contiguous(), list(ctx.saved_tensors)
        dq, dk, dv = (grad.new_zeros(shape) for shape in ctx.shapes)
        for bucket in layout.buckets:
            kept, saved = saved[:4], saved[4:]
            _bucket_backward(bucket, kept, grad, dq, dk, dv, ctx.scale)
        for item in layout.long:
            _long_backward(item, saved.pop(0), grad, saved[-4:], dq, dk, dv, ctx.scale)
        return dq, dk, dv, None, None


def _gather(table: torch.Tensor, rows: torch.Tensor, batch: int, width: int) -> torch.Tensor:
    """Rows of a contiguous (_P, kv, ...) tensor, as (batch, rows per batch, width)."""
    kv_rows = table.view(-1, table.shape[-1]).index_select(0, rows)
    return kv_rows.view(batch, -1, width)


def _fold(t: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(_P, heads, d) -> (_P, kv, group * d): the query heads of one key head side by side."""
    return t.view(t.shape[0], kv_heads, -1)


def _bucket_forward(
    b: _Bucket, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Writes the bucket's rows of `out`; returns what its gradient needs: probabilities
    (_B * kv, _L * group, _K), scaled queries, keys, values.
    """
    kv, n = k.shape[1], b.documents * k.shape[1]
    qb = _gather(_fold(q, kv), b.query_rows, n, q.shape[2]).mul_(scale)
    kb, vb = _gather(k, b.key_rows, n, k.shape[2]), _gather(v, b.key_rows, n, v.shape[2])
    scores = torch.bmm(qb, kb.transpose(1, 2))
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    wide.view(b.documents, kv, b.queries, -1, b.keys).add_(b.bias)
    probs = torch.softmax(wide, -1, out=wide).to(scores.dtype)
    result = torch.bmm(probs, vb).view(n * b.queries, -1)
    rows = b.query_rows
    if b.valid is not None:
        result, rows = result.index_select(0, b.valid), rows.index_select(0, b.valid)
    _fold(out, kv).view(-1, result.shape[1]).index_copy_(0, rows, result)
    return probs, qb, kb, vb


def _bucket_backward(
    b: _Bucket,
    kept: list[torch.Tensor],
    grad: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
) -> None:
    """Adds the bucket's share to dq, dk, dv. dS = P (dP - rowsum(P dP))."""
    probs, qb, kb, vb = kept
    kv, d, e = dk.shape[1], dk.shape[2], dv.shape[2]
    folded = _fold(grad, kv)
    gb = folded.view(-1, folded.shape[2]).index_select(0, b.query_rows)
    if b.padding is not None:
        gb.index_fill_(0, b.padding, 0.0)
    gb = gb.view(len(probs), -1, e)
    dv.view(-1, e).index_add_(0, b.key_rows, torch.bmm(probs.transpose(1, 2), gb).view(-1, e))
    ds = torch.ops.aten._softmax_backward_data(torch.bmm(gb, vb.transpose(1, 2)), probs, -1, probs.dtype)
    rows = torch.bmm(ds, kb).mul_(scale).view(len(b.query_rows), -1)
    _fold(dq, kv).view(-1, rows.shape[1]).index_add_(0, b.query_rows, rows)
    dk.view(-1, d).index_add_(0, b.key_rows, torch.bmm(ds.transpose(1, 2), qb).view(-1, d))


def _heads(t: torch.Tensor, where: slice) -> torch.Tensor:
    """Packed (_P, heads, d) -> a (1, heads, _L, d) view of a range."""
    return t[where].transpose(0, 1).unsqueeze(0)


def _long_forward(
    item: _Long, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
) -> torch.Tensor:
    """Writes the segment's rows of `out`; returns the joint log-sum-exp (1, heads, _L)."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = _heads(q, item.own)
    total, lse = flash(query, _heads(k, item.own), _heads(v, item.own), 0.0, True, scale=scale)
    for where in item.ancestors:
        part, part_lse = flash(query, _heads(k, where), _heads(v, where), 0.0, False, scale=scale)
        joint = torch.logaddexp(lse, part_lse)
        total = total * (lse - joint).exp().unsqueeze(-1).to(total.dtype)
        total += part * (part_lse - joint).exp().unsqueeze(-1).to(total.dtype)
        lse = joint
    _heads(out, item.own).copy_(total)
    return lse


def _long_backward(
    item: _Long,
    lse: torch.Tensor,
    grad: torch.Tensor,
    kept: list[torch.Tensor],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
) -> None:
    """Each block is differentiated with the joint output and log-sum-exp: so its probabilities are right."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v, out = kept
    g, query, result = (_heads(t, item.own) for t in (grad, q, out))
    for where in (item.own, *item.ancestors):
        keys, values, causal = _heads(k, where), _heads(v, where), where is item.own
        parts = backward(g, query, keys, values, result, lse, 0.0, causal, scale=scale)
        for total, part, at in zip((dq, dk, dv), parts, (item.own, where, where), strict=True):
            _heads(total, at).add_(part)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    trivet_plan: AttentionPlan | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: query (1, heads, _P, d), key and value (1, kv, _P, .) -> (1, _P, heads, e)."""
    if trivet_plan is None:
        raise AttentionError(
            f"{type(module).__name__} did not hand the plan on to its attention, or was called outside the "
            f"trainer: this model cannot be trained packed; use one whose layers pass keyword arguments to "
            f"their attention"
        )
    refused = [n for n in ("softcap", "s_aux", "position_bias") if extra.get(n) is not None]
    if refused:
        raise AttentionError(
            f"{type(module).__name__} uses {', '.join(refused)}: not supported in packed training"
        )
    if dropout:
        raise AttentionError("attention dropout is on: the trainer computes in evaluation mode")
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary embeddings come back wide
    window = trivet_plan.window(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if trivet_plan.kind == "segments":
        q, k, v = (t.transpose(1, 2)[0].contiguous() for t in (query, key, value))
        # The flash kernel wants values as wide as the queries; those of latent attention are not.
        layout = trivet_plan.layout(k.shape[1], window, q.dtype, flash=q.shape[-1] == v.shape[-1])
        packed: Any = _Segments.apply(q, k, v, layout, scale)
        return packed.unsqueeze(0), None
    if (
        trivet_plan.flat
        and window is None
        and query.is_cuda
        and query.shape[-1] == value.shape[-1]
        and query.dtype in (torch.float16, torch.bfloat16)
    ):
        return _varlen(query, key, value, trivet_plan, scale), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=trivet_plan.mask(window),
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2), None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Plain documents through torch's variable-length kernel (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = plan.ends(), int(plan.micro.length_S.max())
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out: Any = varlen_attn(
        q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=grouped
    )
    return out[None]


def register() -> None:
    """Make the function known to transformers under NAME; no mask is ever built for it. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
