"""A fingerprint of a tensor's values that both ends of a weight transfer can compute.

The values are read as 32-bit words x_i in row-major order. Words are grouped into blocks of 32,768 and

    h = sum_b g_b * sum_j x_(b,j) * w_j   (mod 2^64)

with fixed odd 64-bit multipliers w_j (of the place in the block) and g_b (of the block). One changed word
always changes h, because the multipliers are odd; exchanged elements, rows or blocks change it because every
place has a multiplier of its own. A word has 32 bits and a multiplier 64, so that two flipped signs do not
cancel as they would with 64-bit words. Integer sums are exact: the result depends neither on the device nor
on the number of threads nor on strides. It guards against accidents, not against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

_BLOCK = 1 << 15
_SEED_PLACE, _SEED_BLOCK = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_PASS = 512  # blocks a pass on a GPU: few launches, 128 MB of temporaries


def _multipliers(seed: int, start: int, count: int) -> torch.Tensor:
    """Odd int64 multipliers start:start+count of a splitmix64 sequence, shape (count,)."""
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))


@cache
def _place_multipliers(device: str) -> torch.Tensor:
    return _multipliers(_SEED_PLACE, 0, _BLOCK).to(device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The values as int32 words in row-major order, shape (n,); bytes that fill no word are zero-padded."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = len(flat) % 4
    if tail:
        flat = torch.cat([flat, flat.new_zeros(4 - tail)])
    elif flat.storage_offset() % 4:  # a byte view into a larger buffer: words must be aligned
        flat = flat.clone()
    return flat.view(torch.int32)


def _block_sums_cpu(words: torch.Tensor, place: torch.Tensor, blocks: int) -> torch.Tensor:
    """sum_j x_(b,j) * w_j of every block, int64, shape (blocks,). One fused pass: the integer dot product,
    which exists on CPUs only."""
    sums = torch.zeros(blocks, dtype=torch.int64)
    wide = torch.empty(_BLOCK, dtype=torch.int64)
    for b in range(blocks):
        part = words[b * _BLOCK : (b + 1) * _BLOCK]
        torch.dot(wide[: len(part)].copy_(part), place[: len(part)], out=sums[b])
    return sums


def _block_sums(words: torch.Tensor, place: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same on any device."""
    sums = torch.zeros(blocks, dtype=torch.int64, device=words.device)
    for first in range(0, blocks, _PASS):
        part = words[first * _BLOCK : (first + _PASS) * _BLOCK]
        whole = len(part) // _BLOCK
        if whole:
            sums[first : first + whole] = (part[: whole * _BLOCK].view(whole, _BLOCK) * place).sum(1)
        if whole * _BLOCK < len(part):
            rest = part[whole * _BLOCK :]
            sums[first + whole] = (rest * place[: len(rest)]).sum()
    return sums


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """`dtype[shape]:16 hex digits` of the tensor's values; equal for equal values whatever the strides.

    Any dtype, shape and device; torch operations only.
    """
    words = _words(tensor)
    device = words.device
    place = _place_multipliers(str(device))
    blocks = -(-len(words) // _BLOCK)
    sums = (_block_sums_cpu if device.type == "cpu" else _block_sums)(words, place, blocks)
    total = (sums * _multipliers(_SEED_BLOCK, 0, blocks).to(device)).sum()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}:{int(total.item()) % 2**64:016x}".replace(" ", "")


def _identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What two names of one tensor have in common; None for tensors that own no memory."""
    if math.prod(tensor.shape) == 0 or tensor.device.type == "meta":
        return None
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def untie(
    named: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors once each, under their first name, and {further name: first name} of the tied ones.

    A model with tied embeddings lists one tensor under two names (`model.embed_tokens.weight` and
    `lm_head.weight`); it is published, moved and proved once.
    """
    first: dict[tuple[object, ...], str] = {}
    once: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named.items():
        key = _identity(tensor)
        if key is not None and key in first:
            tied[name] = first[key]
            continue
        if key is not None:
            first[key] = name
        once[name] = tensor
    return once, tied


def checksums(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Checksum of every tensor; one that appears under several names is read once and listed under each."""
    once, tied = untie(named)
    sums = {name: checksum(tensor) for name, tensor in once.items()}
    return {name: sums[tied.get(name, name)] for name in named}
