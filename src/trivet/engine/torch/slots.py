"""The table of slots: what each row of the cache holds, for whom, and which prefix a prompt can take over."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivet.engine.base import Finish, Generation, Sampling, Top
from trivet.engine.torch.sample import TOP_FLOOR, Drawn, uniforms


@dataclass(eq=False, slots=True)
class Request:
    """One call of `generate`. `reply` is the asyncio face's; times are of time.monotonic, in seconds."""

    prompt: np.ndarray
    sampling: Sampling
    session: str
    reply: Any = None
    serial: int = -1  # order of admission
    slot: int = -1
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    cancelled: bool = False
    source: Request | None = None  # whose prefix is copied as soon as it is computed
    shared: int = 0
    prefilled: int = 0
    reused: int = 0
    recomputed: int = 0
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # of fed tokens, from the prompt's last on


class Slots:
    """Arrays over slots (_S) and positions (_C, the context); row order is decode order.

    `size` tokens are known, of the first `filled` the cache holds keys and values. A slot is ready to decode
    when only its last token is missing there. A slot without request but with `filled` > 0 is kept for reuse.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.count, self.context = slots, context
        self.ids = np.zeros((slots, context), np.int32)
        self.logprob = np.zeros((slots, context), np.float32)
        self.version = np.zeros((slots, context), np.int32)
        self.uniform = np.zeros((slots, context), np.float64)
        self.size = np.zeros(slots, np.int64)
        self.filled = np.zeros(slots, np.int64)
        self.start = np.zeros(slots, np.int64)  # length of the prompt
        self.limit = np.zeros(slots, np.int64)  # size at which generation ends
        self.used = np.zeros(slots, np.int64)  # serial of the last request
        self.busy = np.zeros(slots, np.bool_)
        self.stop = np.full((slots, 1), -1, np.int32)
        self.request: list[Request | None] = [None] * slots
        self.session: list[str | None] = [None] * slots

    # -- occupancy -------------------------------------------------------------------------------

    @property
    def ready(self) -> np.ndarray:
        """Slots that can decode: (_S,) bool."""
        return self.busy & (self.filled == self.size - 1)

    def occupy(self, slot: int, request: Request, filled: int) -> None:
        """Give a slot to a request; the first `filled` positions of its cache already fit."""
        prompt, sampling = request.prompt, request.sampling
        start = len(prompt)
        limit = min(start + sampling.max_tokens, self.context)
        self.ids[slot, :start] = prompt
        self.uniform[slot, start:limit] = uniforms(sampling.seed, limit - start)
        self.size[slot], self.start[slot], self.limit[slot] = start, start, limit
        self.filled[slot], self.used[slot], self.busy[slot] = filled, request.serial, True
        stops = sampling.stop_ids
        if len(stops) > self.stop.shape[1]:
            wider = np.full((self.count, len(stops)), -1, np.int32)
            wider[:, : self.stop.shape[1]] = self.stop
            self.stop = wider
        self.stop[slot] = -1
        self.stop[slot, : len(stops)] = stops
        self.request[slot], self.session[slot] = request, request.session
        request.slot, request.reused, request.admitted = slot, filled, time.monotonic()

    def vacate(self, slot: int) -> None:
        """The request is gone; what the cache holds may be reused."""
        request = self.request[slot]
        assert request is not None
        request.slot = -1
        self.request[slot], self.busy[slot] = None, False
        self.size[slot] = self.filled[slot]

    def forget(self, slot: int) -> None:
        """Nothing is kept of a free slot."""
        self.size[slot] = self.filled[slot] = self.used[slot] = 0
        self.session[slot] = None

    def exchange(self, a: int, b: int) -> None:
        """Swap two rows of the table (the caller swaps the cache)."""
        arrays = (self.ids, self.logprob, self.version, self.uniform, self.size, self.filled)
        for array in (*arrays, self.start, self.limit, self.used, self.busy, self.stop):
            array[[a, b]] = array[[b, a]]
        self.request[a], self.request[b] = self.request[b], self.request[a]
        self.session[a], self.session[b] = self.session[b], self.session[a]
        for slot in (a, b):
            request = self.request[slot]
            if request is not None:
                request.slot = slot

    # -- prefixes --------------------------------------------------------------------------------

    def match(self, prompt: np.ndarray, allowed: np.ndarray) -> tuple[int, int]:
        """(slot, length) of the longest prefix of `prompt` that an allowed slot holds or is going to hold.

        At most len(prompt) - 1: the last token is always forwarded, its logits are needed.
        """
        valid = np.where(self.busy, self.size - 1, self.filled)
        n = len(prompt) - 1
        differs = np.ones((self.count, n + 1), np.bool_)
        np.not_equal(self.ids[:, :n], prompt[:n], out=differs[:, :n])
        length = np.minimum(differs.argmax(1), valid)
        length[~allowed] = 0
        best = int(length.argmax())
        return best, int(length[best])

    def target(self, request: Request, source: int, shared: int) -> int:
        """The free slot for a request whose best source is `source`; the source itself where that is best."""
        if shared and not self.busy[source] and self.session[source] == request.session:
            return source
        free = np.flatnonzero(~self.busy)
        others = free[free != source] if shared else free
        if len(others) == 0:
            return int(free[0])
        # Empty slots first, then the one unused for longest; of equals the lowest.
        return int(others[np.lexsort((others, self.used[others], self.filled[others] > 0))[0]])

    # -- results ---------------------------------------------------------------------------------

    def record(self, n: int, drawn: Drawn, version: int) -> np.ndarray:
        """Append one token to each of the first `n` slots; which of them are done, (_N,) bool."""
        rows, at = np.arange(n), self.size[:n]
        self.ids[rows, at] = drawn.ids_B
        self.logprob[rows, at] = drawn.logprob_B
        self.version[rows, at] = version
        self.filled[:n] += 1
        self.size[:n] += 1
        return (self.stop[:n] == drawn.ids_B[:, None]).any(1) | (self.size[:n] >= self.limit[:n])

    def generation(self, slot: int) -> Generation:
        """What the request of a finished slot gets."""
        request = self.request[slot]
        assert request is not None
        span = slice(int(self.start[slot]), int(self.size[slot]))
        ids = self.ids[slot, span].copy()
        finish: Finish = "length" if len(ids) >= request.sampling.max_tokens else "context"
        if ids[-1] in request.sampling.stop_ids:
            finish = "stop"
        counters = {
            "prefilled": float(request.prefilled),
            "reused": float(request.reused),
            "recomputed": float(request.recomputed),
            "queue_s": request.admitted - request.arrived,
        }
        top = ragged_top(request.top) if request.sampling.top else None
        return Generation(
            ids,
            np.minimum(self.logprob[slot, span], 0.0),
            self.version[slot, span].copy(),
            finish,
            top,
            stacked_routes(request.routes),
            counters=counters,
        )


def stacked_routes(fed: list[np.ndarray]) -> np.ndarray | None:
    """(_T, layers, _K) of the sampled tokens: each one's is known when it is fed, the last never is: its row
    holds the dtype's largest number. The first entry is the prompt's last token's.
    """
    if not fed:
        return None
    rows = np.stack(fed)
    dtype = np.uint8 if rows.max() < np.iinfo(np.uint8).max else np.uint16
    out = np.full(rows.shape, np.iinfo(dtype).max, dtype)
    out[:-1] = rows[1:]
    return out


def ragged_top(positions: list[tuple[np.ndarray, np.ndarray]]) -> Top:
    """From (ids, probabilities) per position, most probable first: kept are q >= 1e-4."""
    kept = [(ids[p >= TOP_FLOOR], p[p >= TOP_FLOOR]) for ids, p in positions]
    sizes = [len(ids) for ids, _ in kept]
    return Top(
        offset_T=np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint32),
        id_K=np.concatenate([ids for ids, _ in kept]).astype(np.uint32),
        logprob_K=np.log(np.concatenate([p for _, p in kept])).astype(np.float16),
        mass_T=np.array([p.sum() for _, p in kept], np.float32),
    )
