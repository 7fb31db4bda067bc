"""The vocabulary projection of trained positions, in chunks; logits are never kept.

With h a hidden state, W the projection, T the row's temperature, z = h W' / T and p = softmax(z):

    log p(y) = z_y - log sum exp z,   H = log sum exp z - sum p z,
    d log p(y) / dz = onehot(y) - p,  dH / dz = -p (log p + H).

When the objective's derivative by log p is at hand (g per position), the gradients follow from the chunk's
own probabilities and no second pass is made: dh = g (W_y - p W) / T and dW = sum over g (onehot(y) - p)' h /
T. Row factors are applied to the narrow side of each product, not to the (_N, _V) matrix, unless other
tokens' log-probabilities are asked for too (the sampler's most probable ones): with g_k for token k,
dz = g onehot(y) + sum over k of g_k onehot(k) - (g + sum of g_k) p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from trivet.trainer.fast import add_rows, gradient_of

_TINY = 1e-30  # below this a float32 probability is too rounded to take its logarithm
_CACHED = 1 << 18  # elements of a block that stays in a core's cache
_SMALL_VOCABULARY = 1 << 22  # elements of a chunk that cost less than a chunk's calls


@dataclass(frozen=True, slots=True)
class Positions:
    """Trained positions (_N): packed token that predicts, id that is predicted, temperature of the row.

    `entries`: further ids whose log-probability is asked for, position after position: (offset_N1 int64 on
    the host, ids (_E,) on the device).
    """

    source_N: torch.Tensor
    target_N: torch.Tensor
    temperature_N: torch.Tensor
    entries: tuple[np.ndarray, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.source_N)

    def entries_of(self, part: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(row inside `part`, id) of the entries of a range of positions, int64 (_e,)."""
        if self.entries is None:
            return None
        offset, ids = self.entries[0][part.start : part.stop + 1], self.entries[1]
        row_E = np.repeat(np.arange(len(offset) - 1), np.diff(offset))
        return torch.from_numpy(row_E).to(ids.device), ids[int(offset[0]) : int(offset[-1])]


class Read(NamedTuple):
    """Of a range of positions: log p (_n,), entropies (_n,) and the entries' log p (_e,) where asked for."""

    logp: torch.Tensor
    entropy: torch.Tensor | None = None
    top: torch.Tensor | None = None


class Slopes(NamedTuple):
    """d loss by each of `Read`; None: the loss does not depend on it."""

    logp: torch.Tensor
    entropy: torch.Tensor | None = None
    top: torch.Tensor | None = None


Gradient = Callable[[slice, Read], Slopes]


@dataclass
class Head:
    """Projection `weight` (_V, hidden) and optional `bias` (_V,), `chunk` positions at a time.

    `dtype`: of the products; results are at least float32. The chunk buffers are made once and kept.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    chunk: int
    dtype: torch.dtype
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.weight):
            raise ValueError("the vocabulary projection has no rows")
        self.set_chunk(self.chunk)

    def set_chunk(self, positions: int) -> None:
        """At least `positions` at a time: a small vocabulary takes more, since calls cost too."""
        chunk = max(positions, _SMALL_VOCABULARY // len(self.weight))
        if chunk != self.chunk:
            self.release()
        self.chunk = chunk

    @property
    def wide(self) -> torch.dtype:
        """What log-probabilities are kept in."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _buffer(self, name: str, rows: int, most: int) -> torch.Tensor:
        """A kept (rows, _V) matrix: fresh pages for every chunk would cost more than its arithmetic."""
        have = self._buffers.get(name)
        if have is None or len(have) < rows:
            have = torch.empty(
                min(self.chunk, most), len(self.weight), dtype=self.wide, device=self.weight.device
            )
            self._buffers[name] = have
        return have[:rows]

    def release(self) -> None:
        """Give the buffers back (while an engine samples, say)."""
        self._buffers.clear()

    @torch.no_grad()
    def logprobs(self, hidden_P: torch.Tensor, at: Positions, *, entropy: bool = False) -> Read:
        """log p (_N,), the entropy (_N,) if asked for, log p of entries where there are some; no gradient."""
        logp = torch.empty(len(at), dtype=self.wide, device=hidden_P.device)
        spread = torch.empty_like(logp) if entropy else None
        top: list[torch.Tensor] = []
        matrix = self._matrix()
        for start in range(0, len(at), self.chunk):
            part = slice(start, min(start + self.chunk, len(at)))
            scaled = self._scaled(hidden_P, at, part)
            read, _, _ = self._forward(scaled, at, part, matrix, entropy)
            logp[part] = read.logp
            if spread is not None and read.entropy is not None:
                spread[part] = read.entropy
            if read.top is not None:
                top.append(read.top)
        return Read(logp, spread, torch.cat(top) if top else None)

    @torch.no_grad()
    def backward(
        self,
        hidden_P: torch.Tensor,
        at: Positions,
        gradient: Gradient,
        *,
        entropy: bool = False,
        keep: bool = False,
    ) -> torch.Tensor:
        """One pass forward and back: adds to the gradients of weight and bias; returns d loss / d hidden.

        `gradient` is called once for each chunk, in order, with what was read there (entropies with
        `entropy`). Only with `keep` may it return a derivative by the entropy: the logits are then kept
        beside p.
        """
        d_hidden = torch.zeros(hidden_P.shape, dtype=self.wide, device=hidden_P.device)
        matrix = self._matrix()
        for start in range(0, len(at), self.chunk):
            part = slice(start, min(start + self.chunk, len(at)))
            scaled = self._scaled(hidden_P, at, part)
            read, z, p = self._forward(scaled, at, part, matrix, entropy, keep)
            g, g_entropy, g_top = gradient(part, read)
            entries = at.entries_of(part) if g_top is not None else None
            pull = g if g_top is None or entries is None else g.index_add(0, entries[0], g_top)
            if g_entropy is not None:
                if z is None or read.entropy is None:
                    raise ValueError("a gradient by the entropy needs `entropy` and `keep`")
                self._weigh(p, z, read.logp, read.entropy, pull, g_entropy, at.target_N[part])
            elif entries is not None:
                p.mul_(pull.to(p.dtype)[:, None])
            if g_top is not None and entries is not None:
                p.view(-1).index_add_(0, entries[0] * p.shape[1] + entries[1], g_top.to(p.dtype), alpha=-1)
            weighed = g_entropy is not None or entries is not None
            self._accumulate(d_hidden, scaled, p, g, at, part, matrix, weighed=weighed)
        return d_hidden

    def _matrix(self) -> torch.Tensor:
        return self.weight.detach().to(self.dtype)

    def _scaled(self, hidden_P: torch.Tensor, at: Positions, part: slice) -> torch.Tensor:
        """h / T (_n, hidden): dividing here spares a pass over the logits."""
        rows = hidden_P.index_select(0, at.source_N[part]).to(self.wide)
        return rows.div_(at.temperature_N[part, None])

    def _forward(
        self,
        scaled: torch.Tensor,
        at: Positions,
        part: slice,
        matrix: torch.Tensor,
        entropy: bool,
        keep: bool = False,
    ) -> tuple[Read, torch.Tensor | None, torch.Tensor]:
        """What is asked for, z (only with `keep`), p (_n, _V) of one chunk."""
        n, target = len(scaled), at.target_N[part, None]
        z = self._buffer("logits", n, len(at))
        self._logits(scaled, at.temperature_N[part], matrix, z)
        p = self._buffer("probabilities", n, len(at)) if keep else z
        picked = z.gather(1, target).squeeze(1)
        entries = at.entries_of(part)
        top = None if entries is None else z[entries]
        mean = self._softmax(z, p, entropy)
        chosen = p.gather(1, target).squeeze(1)
        logp = chosen.log()
        rare = (chosen < _TINY).nonzero().squeeze(1)
        if len(rare):  # too improbable for p itself: from the logits, these rows only
            again = z.new_empty(len(rare), z.shape[1])
            self._logits(scaled[rare], at.temperature_N[part][rare], matrix, again)
            logp[rare] = picked[rare] - again.logsumexp(-1)
        log_sum = picked - logp
        top = None if top is None or entries is None else top - log_sum[entries[0]]
        return Read(logp, None if mean is None else log_sum - mean, top), z if keep else None, p

    def _softmax(self, z: torch.Tensor, p: torch.Tensor, mean: bool) -> torch.Tensor | None:
        """p = softmax(z), in place where they are one; the mean of z under p (_n,) if asked for.

        A few rows at a time, so that what the second look needs is still in the cache.
        """
        rows = max(_CACHED // z.shape[1], 1) if z.device.type == "cpu" else len(z)
        out = z.new_empty(len(z)) if mean else None
        for start in range(0, len(z), rows):
            block = z[start : start + rows]
            own = block.clone() if mean else None
            part = torch.softmax(block, -1, out=p[start : start + rows])
            if out is not None and own is not None:
                out[start : start + rows] = own.mul_(part).sum(-1)
        return out

    def _logits(
        self, scaled: torch.Tensor, temperature: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor
    ) -> None:
        if matrix.dtype == out.dtype:
            torch.mm(scaled, matrix.t(), out=out)
        else:
            out.copy_(torch.mm(scaled.to(matrix.dtype), matrix.t()))
        if self.bias is not None:
            out.addr_(temperature.reciprocal(), self.bias.detach().to(out.dtype))

    def _weigh(
        self,
        p: torch.Tensor,
        z: torch.Tensor,
        logp: torch.Tensor,
        spread: torch.Tensor,
        g: torch.Tensor,
        g_entropy: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """p becomes p (g + g_H (log p + H)): with the entropy's gradient, dz = g onehot(y) - that."""
        log_sum = z.gather(1, target[:, None]).squeeze(1) - logp
        z.add_((spread - log_sum)[:, None]).mul_(g_entropy[:, None]).add_(g[:, None])
        p.mul_(z)

    def _accumulate(
        self,
        d_hidden: torch.Tensor,
        scaled: torch.Tensor,
        p: torch.Tensor,
        g: torch.Tensor,
        at: Positions,
        part: slice,
        matrix: torch.Tensor,
        *,
        weighed: bool,
    ) -> None:
        """Gradients of one chunk; `weighed`: p already carries the row's factors."""
        g, target = g.to(self.wide)[:, None], at.target_N[part]
        p = p.to(matrix.dtype)
        back = torch.mm(p, matrix).to(self.wide)
        picked = self.weight.detach().index_select(0, target).to(self.wide)
        back = picked.mul_(g).sub_(back) if weighed else picked.sub_(back).mul_(g)
        d_hidden.index_add_(0, at.source_N[part], back.div_(at.temperature_N[part, None]))
        if self.weight.requires_grad:
            grad, pulled = gradient_of(self.weight), scaled * g
            right = (scaled if weighed else pulled).to(matrix.dtype)
            if matrix.dtype == grad.dtype:
                grad.addmm_(p.t(), right, alpha=-1)
            else:
                grad.sub_(torch.mm(p.t(), right))
            add_rows(grad, target, pulled)
        if self.bias is not None and self.bias.requires_grad:
            grad, rate = gradient_of(self.bias), at.temperature_N[part].reciprocal()
            grad.sub_(p.t().to(self.wide).mv(rate if weighed else rate * g[:, 0]).to(grad.dtype))
            grad.index_add_(0, target, (rate * g[:, 0]).to(grad.dtype))
