"""One step of the engine: admit, prefill a bounded piece, decode one token for every ready slot.

Continuous batching: requests join and leave between steps. Prompts never go through the vocabulary: prefill
computes keys and values of all but the last token, and decoding starts with that one. A prompt's prefix is
computed once: a request takes over what another slot holds (or is about to hold) of it, so a group's prompt
is prefilled for its first member and copied for the others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch

from trivet.engine.base import EngineError, Generation
from trivet.engine.torch.cache import decode_spans, prefill_span
from trivet.engine.torch.model import Model
from trivet.engine.torch.sample import Drawn, Plan, sample
from trivet.engine.torch.slots import Request, Slots
from trivet.weights.moe import Recorder

PREFILL_TOKENS = 512
"""Prompt tokens per step: bounds how long running requests wait for a newcomer."""
CHUNK = 256
"""Prompt tokens per row and pass."""
GROUP_ROWS, GROUP_BYTES = 8, 1024
"""Rows are decoded in groups of similar length where a token's keys and values have at least this many bytes
a layer: below, the calls cost more than the reading they save."""

Outcome = tuple[Request, Generation | EngineError]


class Scheduler:
    """Runs a `Model` for many requests. Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: Model, slots: int, context: int, deterministic: bool, version: int) -> None:
        self.model, self.deterministic, self.version = model, deterministic, version
        self.slots = Slots(slots, context)
        self.waiting: list[Request] = []  # of the next round (deterministic only)
        self.queue: list[Request] = []
        self.metrics: defaultdict[str, float] = defaultdict(float)
        self.recorder: Recorder | None = None  # of the experts each decoded token goes through
        self._serial = 0
        self._plan: Plan | None = None  # None: rows joined, left or moved since the last step
        self._planned = 0  # rows of the plan
        self._groups: list[tuple[int, int]] = []
        self._poisoned = False  # a forward gave NaN: what it left in the cache would spread

    # -- requests in and out ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        (self.waiting if self.deterministic else self.queue).append(request)

    def forget(self, sessions: Iterable[str]) -> None:
        """Free what is kept for sessions that are over."""
        gone = set(sessions)
        for slot, session in enumerate(self.slots.session):
            if session in gone and not self.slots.busy[slot]:
                self.slots.forget(slot)

    def begin_round(self, expected: set[str]) -> bool:
        """Deterministic mode: take in the waiting requests, in their order, once nobody is missing."""
        if self.queue or self.slots.busy.any() or not self.waiting:
            return False
        if expected - {request.session for request in self.waiting}:
            return False
        self.queue = sorted(self.waiting, key=lambda r: (r.sampling.order, r.session, r.sampling.seed))
        self.waiting = []
        return True

    def drop_cancelled(self) -> None:
        self.waiting = [r for r in self.waiting if not r.cancelled]
        self.queue = [r for r in self.queue if not r.cancelled]
        for slot, request in enumerate(self.slots.request):
            if request is not None and request.cancelled:
                self._leave(slot)

    def take_all(self) -> list[Request]:
        """Remove and return every request, running or not: the engine is closing or broken."""
        running = [r for r in self.slots.request if r is not None]
        for request in running:
            self._leave(request.slot)
        everyone = running + self.queue + self.waiting
        self.queue, self.waiting = [], []
        return everyone

    @property
    def working(self) -> bool:
        return bool(self.queue) or bool(self.slots.busy.any())

    def invalidate(self) -> None:
        """The weights changed: nothing cached is valid, running requests are prefilled again."""
        slots = self.slots
        slots.filled[:] = 0
        if self._poisoned:
            self.model.cache.clear()
            self._poisoned = False
        for slot in range(slots.count):
            request = slots.request[slot]
            if request is None:
                slots.forget(slot)
            else:
                request.source = None
                request.recomputed += int(slots.size[slot]) - 1
                self.metrics["recomputed_tokens"] += int(slots.size[slot]) - 1
        done = np.zeros(slots.count, np.bool_)
        for request in sorted((r for r in slots.request if r is not None), key=lambda r: r.serial):
            source, shared = slots.match(slots.ids[request.slot, : slots.size[request.slot]], done)
            self._share(request, source, shared)
            done[request.slot] = True
        self._plan = None

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> list[Outcome]:
        """Admit, prefill, decode; what finished."""
        begun = time.perf_counter()
        self._admit()
        left = PREFILL_TOKENS
        while left > 0:
            self._copy_shared()
            tokens = self._prefill(left)
            if tokens == 0:
                break
            left -= tokens
        prefilled = time.perf_counter()
        outcomes = self._decode()
        metrics = self.metrics
        metrics["steps"] += 1
        metrics["prefill_s"] += prefilled - begun
        metrics["decode_s"] += time.perf_counter() - prefilled
        metrics["busy_s"] += time.perf_counter() - begun
        metrics["busy_slots"] += float(self.slots.busy.sum()) + len(outcomes)
        return outcomes

    def _admit(self) -> None:
        slots = self.slots
        while self.queue and not slots.busy.all():
            request = self.queue.pop(0)
            request.serial = self._serial = self._serial + 1
            source, shared = slots.match(request.prompt, np.ones(slots.count, np.bool_))
            if not self._worth_sharing(shared, len(request.prompt)):
                shared = 0
            target = slots.target(request, source, shared)
            in_place = target == source and shared > 0
            slots.occupy(target, request, shared if in_place else 0)
            if in_place:
                self.metrics["reused_tokens"] += shared
            else:
                self._share(request, source, shared)
            self._plan = None

    @staticmethod
    def _worth_sharing(shared: int, prompt: int) -> bool:
        """A copy costs a few operations a layer: not for a stray common first token."""
        return shared >= 64 or 2 * shared >= prompt - 1 > 0

    def _share(self, request: Request, source: int, shared: int) -> None:
        """Copy a prefix from a slot now, or note it where the source has not computed it yet."""
        if not shared or not self._worth_sharing(shared, len(request.prompt)):
            return
        request.source, request.shared = self.slots.request[source], shared
        if self.slots.filled[source] >= shared:
            self._copy(source, [request])

    def _copy(self, source: int, requests: list[Request]) -> None:
        shared = requests[0].shared
        self.model.cache.copy(source, [r.slot for r in requests], shared)
        for request in requests:
            self.slots.filled[request.slot] = shared
            request.source, request.reused = None, request.reused + shared
        self.metrics["reused_tokens"] += shared * len(requests)

    def _copy_shared(self) -> None:
        """Serve those whose source has got far enough; those whose source is gone look for another."""
        while True:
            ready: defaultdict[tuple[int, int], list[Request]] = defaultdict(list)
            for request in self.slots.request:
                if request is None or request.source is None:
                    continue
                source = request.source.slot
                if source < 0:
                    self._adopt(request)
                elif self.slots.filled[source] >= request.shared:
                    ready[source, request.shared].append(request)
            if not ready:
                return
            for (source, _), requests in ready.items():
                self._copy(source, requests)

    def _adopt(self, request: Request) -> None:
        """A new source among slots that wait for nobody themselves: no circles."""
        slots = self.slots
        free = np.array([r is None or r.source is None for r in slots.request])
        request.source = None
        source, shared = slots.match(slots.ids[request.slot, : slots.size[request.slot]], free)
        self._share(request, source, shared)

    def _prefill(self, budget: int) -> int:
        """One pass over a batch of prompt chunks of similar length, oldest first; its size in tokens."""
        slots = self.slots
        todo = [r for r in slots.request if r and r.source is None and not slots.ready[r.slot]]
        if not todo:
            return 0
        todo.sort(key=lambda r: r.serial)
        need = {r.slot: min(int(slots.size[r.slot] - 1 - slots.filled[r.slot]), CHUNK) for r in todo}
        columns = need[todo[0].slot]
        batch = [r for r in todo if columns < 2 * need[r.slot] <= 2 * columns][: max(1, budget // columns)]
        rows = np.array([r.slot for r in batch])
        start, count = slots.filled[rows], np.array([need[r.slot] for r in batch])
        self._forward_chunk(rows, start, count)
        slots.filled[rows] += count
        for request, tokens in zip(batch, count.tolist(), strict=True):
            request.prefilled += tokens
        self.metrics["prefilled_tokens"] += float(count.sum())
        return int(columns * len(batch))

    def _forward_chunk(self, rows: np.ndarray, start: np.ndarray, count: np.ndarray) -> None:
        columns, length = int(count.max()), int((start + count).max())
        ids = np.zeros((len(rows), columns), np.int64)
        for i, slot in enumerate(rows):
            ids[i, : count[i]] = self.slots.ids[slot, start[i] : start[i] + count[i]]
        if self.deterministic:  # fixed shapes; the added rows are the cache's spare one, which nobody reads
            more, wider = _power(len(rows)) - len(rows), -columns % 16
            ids = np.pad(ids, ((0, more), (0, wider)))
            rows = np.pad(rows, (0, more), constant_values=self.slots.count)
            start, count = np.pad(start, (0, more)), np.pad(count, (0, more))
            columns, length = columns + wider, self._bucket(length)
        span = prefill_span(self.model.cache, rows, start, count, columns, length)
        self.model.prefill(torch.from_numpy(ids).to(self.model.cache.device), span)

    def _bucket(self, length: int) -> int:
        """A length to read up to: exact, or one of few in deterministic mode."""
        return min(-(-length // 32) * 32, self.slots.context) if self.deterministic else length

    def _decode(self) -> list[Outcome]:
        slots = self.slots
        n = int(slots.ready.sum())
        if n == 0:
            return []
        begun = time.perf_counter()
        plan = self._arrange(n)
        device = self.model.cache.device
        shape = self._groups[-1][1]
        position = np.zeros(shape, np.int64)
        position[:n] = slots.size[:n] - 1
        ids = np.zeros(shape, np.int64)
        ids[:n] = slots.ids[np.arange(n), position[:n]]
        groups = [(a, b, self._bucket(int(position[a:b].max()) + 1)) for a, b in self._groups]
        spans = decode_spans(self.model.cache, position, n, groups)
        logits = self.model.decode(torch.from_numpy(ids).to(device), spans)[:n]
        if self.recorder is not None:
            self._keep_routes(self.recorder.take()[:n].cpu().numpy())
        uniform = torch.from_numpy(slots.uniform[np.arange(n), slots.size[:n]]).to(device)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        forwarded = time.perf_counter()
        drawn = sample(logits, uniform, plan)
        done = slots.record(n, drawn, self.version)
        self.metrics["forward_s"] += forwarded - begun
        self.metrics["sample_s"] += time.perf_counter() - forwarded
        self.metrics["decoded_tokens"] += n
        if plan.top:
            self._keep_top(n, drawn)
        bad = ~np.isfinite(drawn.logprob_B)
        return [self._finish(int(slot), bool(bad[slot])) for slot in np.flatnonzero(done | bad)]

    def _keep_routes(self, routes_BLK: np.ndarray) -> None:
        for request, routes_LK in zip(self.slots.request, routes_BLK, strict=False):
            if request is not None:
                request.routes.append(routes_LK)

    def _keep_top(self, n: int, drawn: Drawn) -> None:
        assert drawn.top_id_BK is not None and drawn.top_p_BK is not None
        for request, ids_K, p_K in zip(self.slots.request[:n], drawn.top_id_BK, drawn.top_p_BK, strict=True):
            if request is not None and request.sampling.top:
                request.top.append((ids_K[: request.sampling.top], p_K[: request.sampling.top]))

    def _finish(self, slot: int, bad: bool) -> Outcome:
        request = self.slots.request[slot]
        assert request is not None
        if bad:
            outcome = EngineError(
                f"the logits of weight version {self.version} are not finite: the update before it went "
                "wrong; lower the learning rate or restart from a checkpoint"
            )
        else:
            outcome = self.slots.generation(slot)
        self._leave(slot)
        if bad:
            self.slots.forget(slot)
            self._poisoned = True
        return request, outcome

    def _leave(self, slot: int) -> None:
        self.slots.vacate(slot)
        self._plan = None

    # -- row order -------------------------------------------------------------------------------

    def _arrange(self, n: int) -> Plan:
        """Bring the ready slots to rows 0..n-1, the longest first where that saves reading."""
        if self._plan is not None and self._planned == n and bool(self.slots.ready[:n].all()):
            return self._plan
        slots, size = self.slots, self._group_rows()
        # Only membership of a group matters: the order inside it is left as it is.
        rank = np.where(slots.ready, slots.size if size < slots.count else 1, 0)
        wanted = np.argsort(-rank, kind="stable")
        bounds = [(a, min(a + size, n)) for a in range(0, n, size)]
        for lo, hi in bounds:
            members = set(wanted[lo:hi].tolist())
            homes = [row for row in range(lo, hi) if row not in members]
            for row, home in zip([m for m in wanted[lo:hi].tolist() if not lo <= m < hi], homes, strict=True):
                self._exchange(row, home)
                wanted = _renamed(wanted, row, home)
        if self.deterministic:
            bounds = [*bounds[:-1], (bounds[-1][0], self._rows(n))]
        self._groups = bounds
        asked = [r.sampling for r in slots.request[:n] if r is not None]
        asked = [(s.temperature, s.top_p, s.top_k, s.top) for s in asked]
        self._plan, self._planned = Plan.of(asked, self.model.cache.device), n
        return self._plan

    def _group_rows(self) -> int:
        cache = self.model.cache
        if not self.model.grouped or cache.device.type != "cpu":
            return self.slots.count
        token = cache.tensors[0][0, 0]
        large = token.numel() * token.element_size() >= GROUP_BYTES
        return GROUP_ROWS if large else self.slots.count

    def _rows(self, n: int) -> int:
        """Rows computed in deterministic mode: all slots, or a half or quarter of them when few are left."""
        count = self.slots.count
        for rows in (count // 4, count // 2):
            if rows >= n:
                return rows
        return count

    def _exchange(self, a: int, b: int) -> None:
        filled = self.slots.filled
        self.model.cache.exchange(a, b, int(filled[a]), int(filled[b]))
        self.slots.exchange(a, b)
        self.metrics["moved_rows"] += 1


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _renamed(order: np.ndarray, a: int, b: int) -> np.ndarray:
    """`order` after rows a and b changed places."""
    out = order.copy()
    out[order == a], out[order == b] = b, a
    return out
