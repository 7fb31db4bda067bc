"""Where keys and values live: one row per slot, preallocated, and a last row nobody reads.

Every cache tensor has shape (slots + 1, context, ...), so that position p of slot s is entry s * context + p
of its flat view. Padding writes go to the last row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: masked positions are multiplied by 0 and so must never hold NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc hands out pages when they are first written: a large context costs nothing until it is used.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(tuple(shape))


class Cache:
    """The cache tensors of a model, one or more per layer; rows can be copied and exchanged."""

    def __init__(self, slots: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.context, self.dtype, self.device = slots, context, dtype, device
        self.tensors: list[Tensor] = []
        # Window i of (context zeros, context times -inf) hides all but the first context - i keys. They all
        # overlap in one small vector: a mask is one indexed read.
        steps = torch.zeros(2 * context, dtype=dtype, device=device)
        steps[context:] = float("-inf")
        self._windows = steps.as_strided((context, context), (1, 1))

    def bias(self, position_NC: Tensor, length: int) -> Tensor:
        """(_N, 1, _C, length): 0 where a key is at or before the position, -inf after it."""
        rows, columns = position_NC.shape
        window = (self.context - 1 - position_NC).reshape(-1)
        return self._windows[:, :length].index_select(0, window).view(rows, 1, columns, length)

    def add(self, *entry: int, dtype: torch.dtype | None = None) -> Tensor:
        """A new cache tensor (slots + 1, context, *entry)."""
        shape = (self.slots + 1, self.context, *entry)
        self.tensors.append(allocate(shape, dtype or self.dtype, self.device))
        return self.tensors[-1]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def clear(self) -> None:
        """Zero everything: needed only after NaN, which a mask does not hide."""
        for tensor in self.tensors:
            tensor.zero_()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of one slot to others."""
        for tensor in self.tensors:
            row = tensor[source, :length]
            for target in targets:
                tensor[target, :length].copy_(row)

    def exchange(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Swap two slots of which the first `length_a` and `length_b` positions are in use."""
        for tensor in self.tensors:
            kept = tensor[a, :length_a].clone() if length_b else tensor[a, :length_a]
            if length_b:
                tensor[a, :length_b].copy_(tensor[b, :length_b])
            if length_a:
                tensor[b, :length_a].copy_(kept)


class Span:
    """Which positions a forward pass computes and what they may look at.

    `position_NC` (_N rows, _C columns) are token positions, `write_T` (_N * _C) flat cache indices, `length`
    how many cached positions are read; `rows` the slots: a range (decode, read in place) or a tensor
    (prefill, gathered). `bias` (_N, 1, _C, length) is 0 where a key is visible and -inf elsewhere.
    """

    __slots__ = ("bias", "length", "position_NC", "rows", "write_T")

    def __init__(
        self, cache: Cache, rows: slice | Tensor, position_NC: Tensor, write_T: Tensor, length: int
    ) -> None:
        self.rows, self.position_NC, self.write_T, self.length = rows, position_NC, write_T, length
        self.bias = cache.bias(position_NC, length)

    def sliding(self, window: int) -> Tensor:
        """`bias` (_N, 1, _C, length) of a layer that sees `window` positions, its own among them."""
        hidden = self.position_NC[:, None, :, None] - window  # the last key out of sight
        return self.bias.masked_fill(torch.arange(self.length, device=hidden.device) <= hidden, float("-inf"))

    def read(self, tensor: Tensor) -> Tensor:
        """(_N, length, ...) of a cache tensor."""
        part = tensor[:, : self.length]
        return part[self.rows] if isinstance(self.rows, slice) else part.index_select(0, self.rows)


def prefill_span(
    cache: Cache, rows: np.ndarray, start: np.ndarray, count: np.ndarray, columns: int, length: int
) -> Span:
    """`count` tokens from position `start` on for each slot in `rows`, padded to `columns`."""
    place = np.arange(columns)
    position = np.minimum(start[:, None] + place, cache.context - 1)
    write = np.where(place < count[:, None], rows[:, None] * cache.context + position, _trash(cache))
    device = cache.device
    return Span(
        cache,
        torch.from_numpy(rows).to(device),
        torch.from_numpy(position).to(device),
        torch.from_numpy(write.reshape(-1)).to(device),
        length,
    )


def decode_spans(
    cache: Cache, position: np.ndarray, live: int, groups: Sequence[tuple[int, int, int]]
) -> list[Span]:
    """One token for each of slots 0..n-1; of these the first `live` are real and the rest padding.

    `groups` are (first slot, end, length): rows of similar length, each read no further than its longest.
    """
    write = np.arange(len(position)) * cache.context + position
    write[live:] = _trash(cache)
    position_N1 = torch.from_numpy(position[:, None]).to(cache.device)
    write_T = torch.from_numpy(write).to(cache.device)
    return [
        Span(cache, slice(lo, hi), position_N1[lo:hi], write_T[lo:hi], length) for lo, hi, length in groups
    ]


def _trash(cache: Cache) -> int:
    return cache.slots * cache.context
