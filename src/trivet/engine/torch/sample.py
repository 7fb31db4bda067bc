"""Exact sampling from softmax(logits / T) over the whole vocabulary, in one pass of exponentials.

What was thrown away: an exponential random number per symbol (40 ms a step at 32 rows x 49k symbols). A row
needs one uniform number: it picks a block of the vocabulary by the inverse of the cumulative distribution,
then a token inside the block. The log-probability comes from the same softmax.

A request's uniforms are SplitMix64's (Steele, Lea and Flood 2014) with its seed as the state, which is a
counter: they depend neither on the batch nor on what else is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
# Below this many symbols one cumulative sum is cheaper than two.
_DIRECT = 2048
# u * total must stay below total after rounding, else the last, possibly impossible, token could be chosen.
_BELOW_ONE = 1.0 - 2.0**-50
_GAMMA, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S11, _S27, _S30, _S31 = (np.uint64(n) for n in (11, 27, 30, 31))
TOP_FLOOR = 1e-4
"""Smallest probability kept in `Top`."""


def uniforms(seed: int, n: int) -> np.ndarray:
    """The numbers in [0, 1) that choose the first `n` tokens of a request, float64 (_T,)."""
    z = np.arange(1, n + 1, dtype=np.uint64) * _GAMMA + np.uint64(seed & (2**64 - 1))
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return np.minimum(((z ^ (z >> _S31)) >> _S11) * 2.0**-53, _BELOW_ONE)


def _invert(weight_BV: Tensor, u_B: Tensor) -> Tensor:
    """The index at which the cumulative weight passes u of the total; never one of weight 0. (_B,)"""
    cumulative = weight_BV.cumsum(-1, dtype=torch.float64)
    return _passing(cumulative, (cumulative[:, -1] * u_B)[:, None])[:, 0]


def _passing(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index of each row above its target; in range also where a row is NaN (reported by the caller)."""
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def choose(p_BV: Tensor, u_B: Tensor) -> Tensor:
    """One token per row from (unnormalised) probabilities, by u in [0, 1). (_B,) int64.

    The block is drawn with the blocks' sums, the token with the same u stretched over its block: exact up to
    the rounding of a float32 sum of 256 terms (1e-7 of a block's mass).
    """
    rows, vocab = p_BV.shape
    if vocab <= _DIRECT:
        return _invert(p_BV, u_B)
    even = vocab // BLOCK * BLOCK
    sums = p_BV[:, :even].reshape(rows, -1, BLOCK).sum(-1)
    if even < vocab:
        sums = torch.cat([sums, p_BV[:, even:].sum(-1, keepdim=True)], -1)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    target = (cumulative[:, -1] * u_B)[:, None]
    block = _passing(cumulative, target)
    mass = sums.gather(1, block).double()
    before = cumulative.gather(1, block) - mass
    inside = ((target - before) / mass).clamp_(0.0, _BELOW_ONE)[:, 0]
    index = block * BLOCK + torch.arange(BLOCK, device=p_BV.device)
    weight = p_BV.gather(1, index.clamp(max=vocab - 1))
    if even < vocab:
        weight.masked_fill_(index >= vocab, 0.0)
    return block[:, 0] * BLOCK + _invert(weight, inside)


def narrow(p_BV: Tensor, top_p: Sequence[float], top_k: Sequence[int]) -> Tensor:
    """Zero what top-p and top-k leave out (evaluation only); the most probable token always stays."""
    ordered, index = p_BV.sort(-1, descending=True)
    device = p_BV.device
    p_B1 = torch.tensor(top_p, dtype=torch.float64, device=device)[:, None]
    k_B1 = torch.tensor([k or p_BV.shape[1] for k in top_k], device=device)[:, None]
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    keep = (before < p_B1) & (torch.arange(p_BV.shape[1], device=device) < k_B1)
    keep[:, 0] = True
    return torch.zeros_like(p_BV).scatter_(1, index, ordered * keep)


@dataclass(slots=True)
class Plan:
    """How the rows of a step are sampled; made anew only when rows join, leave or move.

    `temperature_B1` is None where every row has temperature 1 (the fastest path); greedy rows have 1 there.
    `narrowed` lists rows with top-p or top-k, `top` the largest K asked for.
    """

    temperature_B1: Tensor | None
    greedy_B: Tensor | None
    narrowed: list[int]
    top_p: list[float]
    top_k: list[int]
    top: int

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, int, int]], device: torch.device) -> Plan:
        """From (temperature, top_p, top_k, top) per row."""
        temperature = [t if t > 0 else 1.0 for t, *_ in rows]
        greedy = [t == 0 for t, *_ in rows]
        narrowed = [i for i, (t, p, k, _) in enumerate(rows) if t > 0 and (p < 1 or k > 0)]
        return cls(
            torch.tensor(temperature, device=device)[:, None] if set(temperature) != {1.0} else None,
            torch.tensor(greedy, device=device) if any(greedy) else None,
            narrowed,
            [rows[i][1] for i in narrowed],
            [rows[i][2] for i in narrowed],
            max((row[3] for row in rows), default=0),
        )


@dataclass(slots=True)
class Drawn:
    """One step's tokens (_B,) int64, log-probabilities (_B,) float32; top ids and probabilities (_B, _K)."""

    ids_B: np.ndarray
    logprob_B: np.ndarray
    top_id_BK: np.ndarray | None = None
    top_p_BK: np.ndarray | None = None


def sample(logits_BV: Tensor, u_B: Tensor, plan: Plan) -> Drawn:
    """Draw one token per row. `logits_BV` float32 may be overwritten; `u_B` float64 in [0, 1).

    Log-probabilities are of softmax(logits / T) over the whole vocabulary, also for rows narrowed by top-p or
    top-k; for greedy rows (T = 0) of softmax(logits).
    """
    if plan.temperature_B1 is not None:
        logits_BV.div_(plan.temperature_B1)
    p_BV = torch.softmax(logits_BV, -1)
    ids_B = choose(p_BV, u_B)
    if plan.greedy_B is not None:
        ids_B = torch.where(plan.greedy_B, logits_BV.argmax(-1), ids_B)
    if plan.narrowed:
        rows = torch.tensor(plan.narrowed, device=p_BV.device)
        ids_B[rows] = choose(narrow(p_BV[rows], plan.top_p, plan.top_k), u_B[rows])
    logprob_B = p_BV.gather(1, ids_B[:, None]).log_()[:, 0]
    drawn = Drawn(ids_B.cpu().numpy(), logprob_B.cpu().numpy())
    if plan.top:
        top_p, top_id = p_BV.topk(min(plan.top, p_BV.shape[1]), -1)
        drawn.top_id_BK, drawn.top_p_BK = top_id.cpu().numpy(), top_p.cpu().numpy()
    return drawn
