"""The asyncio face of the embedded engine: one thread steps the scheduler, event loops wait for it.

The thread never waits for a loop and no loop ever runs a forward pass. Results of a step go back with one
call_soon_threadsafe per event loop. Everything that touches the model (updates, probes, sleeping) is a job
run by the same thread between two steps, so that there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from trivet.engine.base import EngineError, EngineTimeout, Generation, Sampling
from trivet.engine.torch import model as paths
from trivet.engine.torch.scheduler import Outcome, Scheduler
from trivet.engine.torch.slots import Request
from trivet.engine.torch.update import check, load_in_place
from trivet.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
log = logging.getLogger(__name__)
_CLOSE_S = 60.0
_PROBE_ROWS = 256  # positions per pass through the vocabulary in `logprobs`


class TorchEngine:
    """Samples from a transformers causal LM in this process; keeps the contract of `engine.base.Engine`.

    model: directory or hub name, or a module (copied: the engine never aliases weights that are trained).
    slots: sequences decoded at once. context: tokens per sequence, prompt included.
    deterministic: rounds of `expect`ed sessions, admission in `Sampling.order`, fixed shapes: two runs with
    the same seeds give the same bits however the requests arrive.
    fused: use our own forward where the architecture allows; otherwise and elsewhere transformers' own.
    request_timeout_s: deadline of one `generate`, and of every job (update, logprobs, sleep, wake).
    version: of the weights it starts with.

    Raises EngineError when the model cannot hold `context` tokens or no path reproduces its forward.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        slots: int = 32,
        context: int = 1024,
        deterministic: bool = False,
        fused: bool = True,
        device: str = "auto",
        dtype: str = "float32",
        request_timeout_s: float = 600.0,
        version: int = 0,
        routes: bool = False,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.slots, self.context, self.deterministic = slots, context, deterministic
        self.request_timeout_s = request_timeout_s
        self._model = paths.build(
            model,
            slots=slots,
            context=context,
            device=torch.device(device),
            dtype=getattr(torch, dtype),
            fused=fused,
        )
        self._scheduler = Scheduler(self._model, slots, context, deterministic, version)
        if routes:
            self._scheduler.recorder = paths.recorder(self._model)
        self._wake = threading.Condition()
        # All of the following are guarded by _wake's lock.
        self._arrivals: list[Request] = []
        self._cancelled = False
        self._settled: set[str] = set()
        self._expected: set[str] = set()
        self._missing: set[str] = set()  # expected, and neither queued nor settled yet
        self._jobs: list[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = []
        self._refusal = ""  # why nothing is generated now
        self._asleep = False
        self._closing = False
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trivet-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Of the weights new tokens are sampled with."""
        return self._scheduler.version

    @property
    def path(self) -> str:
        """Which forward is used: FusedModel, CachedModel or RecomputeModel."""
        return type(self._model).__name__

    # -- generation ------------------------------------------------------------------------------

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, media: Any = None
    ) -> Generation:
        """Continue `prompt`. Raises ValueError, EngineTimeout, EngineError; cancelling frees the slot."""
        prompt = self._checked(prompt, sampling, media)
        loop = asyncio.get_running_loop()
        request = Request(prompt, sampling, session, reply=(loop, loop.create_future()))
        with self._wake:
            self._refuse()
            self._arrivals.append(request)
            self._arrived(session)
        try:
            async with asyncio.timeout(self.request_timeout_s):
                return await request.reply[1]
        except TimeoutError:
            raise EngineTimeout(
                f"session {session!r} waited {self.request_timeout_s:g} s for its generation: "
                f"{self._progress(request)}"
            ) from None
        finally:
            if not request.reply[1].done() or request.reply[1].cancelled():
                request.cancelled = True
                with self._wake:
                    self._cancelled = True
                    self._wake.notify()

    def _checked(self, prompt: Tokens, sampling: Sampling, media: Any) -> np.ndarray:
        if media is not None:
            raise ValueError("this engine reads text only: media cannot be given to it")
        ids = np.asarray(prompt, np.int32)
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(f"the prompt must be a non-empty row of token ids, got shape {ids.shape}")
        if len(ids) + 1 > self.context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context}: "
                "raise engine.context or shorten the prompt"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0:
            raise ValueError(f"max_tokens must be at least 1 and temperature at least 0, got {sampling}")
        vocab = self._model.vocab
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise ValueError(f"the prompt has ids outside 0..{vocab - 1}: wrong tokenizer for this model?")
        return ids

    def _refuse(self) -> None:
        """Raise if nothing can be generated now; the lock is held."""
        if self._closing:
            raise EngineError("the engine is closed: make a new one")
        if self._dead is not None:
            raise EngineError(f"the engine's thread died: {self._dead!r}") from self._dead
        if self._refusal:
            raise EngineError(self._refusal)
        if self._asleep:
            raise EngineError("the engine is asleep: call wake() before generate()")

    def _progress(self, request: Request) -> str:
        """Where an overdue request stands. Read without stopping the thread: only for a message."""
        asked = f"prompt of {len(request.prompt)} tokens, up to {request.sampling.max_tokens} more"
        scheduler, slot = self._scheduler, request.slot
        if slot >= 0:
            done = int(scheduler.slots.size[slot] - scheduler.slots.start[slot])
            return f"{done} tokens are there ({asked})"
        with self._wake:
            there = {r.session for r in scheduler.waiting} | {r.session for r in self._arrivals}
            missing = sorted(self._expected - there)
        if self.deterministic and missing:  # without a slot it is in the round that cannot begin
            names = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            return (
                f"its round cannot begin, {len(self._expected) - len(missing)} of {len(self._expected)} "
                f"expected sessions are there; missing: {names} ({asked})"
            )
        return (
            f"it is still queued, {int(scheduler.slots.busy.sum())} of {self.slots} slots are busy ({asked})"
        )

    def expect(self, sessions: Iterable[str]) -> None:
        """Deterministic: the next round waits until each of these has queued a request or settled."""
        if self.deterministic:
            with self._wake:
                new = set(sessions)
                self._expected |= new
                self._missing |= new

    def settle(self, session: str) -> None:
        """`session` is over: nobody waits for it, what is kept for it is freed."""
        with self._wake:
            self._expected.discard(session)
            self._settled.add(session)
            self._arrived(session)

    def _arrived(self, session: str) -> None:
        """Wake the thread, but not once for each of a round's sessions; the lock is held."""
        self._missing.discard(session)
        if not self._missing:
            self._wake.notify()

    # -- weights and memory ----------------------------------------------------------------------

    def update(self, tensors: Mapping[str, Any], version: int) -> dict[str, str]:
        """Load weights in place between two steps; the checksums of what is held afterwards.

        Refused (and nothing changed) when names or shapes do not fit. A failure half way leaves the engine
        off the line: it generates nothing until a whole update has succeeded. Raises EngineError.
        """

        def job() -> dict[str, str]:
            check(self._model, tensors)
            try:
                sums = load_in_place(self._model, tensors)
            except BaseException as error:  # whatever it was, the weights are half new
                raise self._off_the_line(version, error) from error
            with self._wake:
                self._refusal = ""
            self._scheduler.version = version
            self._scheduler.invalidate()
            return sums

        return self._do(f"update to version {version}", job)

    def _off_the_line(self, version: int, cause: BaseException) -> EngineError:
        """Refuse and fail every request; the error to raise."""
        refusal = (
            f"the update to version {version} failed half way ({cause!r}): the weights are a mixture; "
            "nothing is generated until a whole update has succeeded"
        )
        with self._wake:
            self._refusal = refusal
            arrivals, self._arrivals = self._arrivals, []
        self._fail(arrivals + self._scheduler.take_all(), EngineError(refusal))
        return EngineError(refusal)

    def logprobs(self, ids: Tokens) -> np.ndarray:
        """Log-probabilities (_T - 1,) float32 of ids[1:], by the engine's own forward; temperature 1."""
        ids_T = torch.from_numpy(np.array(ids, np.int64))
        if ids_T.ndim != 1 or not 2 <= len(ids_T) <= self.context:
            raise ValueError(
                f"logprobs needs 2 to {self.context} ids (the context), got shape {tuple(ids_T.shape)}"
            )

        def job() -> np.ndarray:
            device_ids = ids_T.to(self._model.cache.device)
            logits, target = self._model.full(device_ids)[:-1], device_ids[1:, None]
            rows = [
                logits[i : i + _PROBE_ROWS].log_softmax(-1).gather(1, target[i : i + _PROBE_ROWS])[:, 0]
                for i in range(0, len(target), _PROBE_ROWS)
            ]
            return torch.cat(rows).cpu().numpy()

        return self._do("logprobs", job)

    def sleep(self) -> None:
        """Free the caches until `wake`. Refused while requests run. Weights stay where they are."""

        def job() -> None:
            with self._wake:
                if self._scheduler.working or self._scheduler.waiting or self._arrivals:
                    raise EngineError("the engine cannot sleep while requests are running or queued")
                self._asleep = True
            self._scheduler.invalidate()
            self._model.release()

        self._do("sleep", job)

    def wake(self) -> None:
        """Make the caches again; idempotent."""

        def job() -> None:
            if self._asleep:
                self._model.allocate()
                with self._wake:
                    self._asleep = False

        self._do("wake", job)

    def metrics(self) -> dict[str, float]:
        """Counters since the last call.

        decoded_tokens, prefilled_tokens, reused_tokens (copied or kept, not computed), recomputed_tokens
        (prefilled again because of an update), steps; busy_s = prefill_s + decode_s, decode_s = forward_s +
        sample_s + bookkeeping; occupancy (mean share of slots in use), decode_tokens_per_s; now: cache_bytes,
        asleep (0 or 1), version.
        """

        def job() -> dict[str, float]:
            counted, self._scheduler.metrics = self._scheduler.metrics, defaultdict(float)
            return dict(counted)

        names = ("decoded_tokens", "prefilled_tokens", "reused_tokens", "recomputed_tokens", "steps")
        times = ("busy_s", "prefill_s", "decode_s", "forward_s", "sample_s")
        counted = self._do("metrics", job)
        out = {name: counted.get(name, 0.0) for name in (*names, *times, "moved_rows")}
        out["occupancy"] = counted.get("busy_slots", 0.0) / max(1.0, out["steps"] * self.slots)
        out["decode_tokens_per_s"] = out["decoded_tokens"] / max(1e-9, out["decode_s"])
        out["cache_bytes"] = float(self._model.cache.bytes)
        out["asleep"], out["version"] = float(self._asleep), float(self.version)
        return out

    def close(self) -> None:
        """End the thread; requests still running fail with EngineError. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise EngineTimeout(f"close waited {_CLOSE_S:g} s for the engine's current step")
        self._model.release()

    # -- the thread ------------------------------------------------------------------------------

    def _do(self, what: str, job: Callable[[], T]) -> T:
        """Run `job` in the engine's thread between two steps and wait for its result."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._wake:
            if self._closing:
                raise EngineError(f"{what}: the engine is closed")
            if self._dead is not None:
                raise EngineError(f"{what}: the engine's thread died: {self._dead!r}") from self._dead
            self._jobs.append((job, future))
            self._wake.notify()
        try:
            return future.result(self.request_timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise EngineTimeout(
                f"{what} waited {self.request_timeout_s:g} s for the engine's current step to end"
            ) from None

    def _run(self) -> None:
        cause: BaseException = EngineError("the engine was closed while this request was running")
        try:
            with torch.inference_mode():
                while self._next():
                    self._deliver(self._scheduler.step())
        except BaseException as error:  # the thread ends: all who wait are told why
            cause = EngineError(f"the engine's thread died: {error!r}")
            cause.__cause__ = error
            with self._wake:
                self._dead = error
        with self._wake:
            left, self._arrivals = self._arrivals, []
            jobs, self._jobs = self._jobs, []
        for _, future in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(cause)
        self._fail(left + self._scheduler.take_all(), cause)

    def _next(self) -> bool:
        """Wait until there is a step to take, doing what comes in meanwhile; False when closing."""
        scheduler = self._scheduler
        while True:
            with self._wake:
                arrivals, self._arrivals = self._arrivals, []
                jobs, self._jobs = self._jobs, []
                cancelled, self._cancelled = self._cancelled, False
                settled = self._take_settled()
                if self._closing:
                    self._arrivals, self._jobs = arrivals, jobs
                    return False
            for request in arrivals:
                scheduler.add(request)
            if cancelled:
                scheduler.drop_cancelled()
            for job, future in jobs:
                self._perform(job, future)
            with self._wake:
                if self.deterministic and scheduler.begin_round(self._expected):
                    settled |= self._take_settled(at_round=True)
                scheduler.forget(settled)
                if self._arrivals or self._jobs or self._cancelled:
                    continue
                if scheduler.working:
                    return True
                self._wake.wait()

    def _take_settled(self, at_round: bool = False) -> set[str]:
        """Sessions to forget now. In a deterministic engine only between rounds: when exactly a coroutine
        said that it is done must not decide which slot the next request gets."""
        if self.deterministic and not at_round:
            return set()
        settled, self._settled = self._settled, set()
        return settled

    @staticmethod
    def _perform(job: Callable[[], Any], future: concurrent.futures.Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except BaseException as error:  # the job's owner gets it, the engine goes on
            future.set_exception(error)

    # -- answers ---------------------------------------------------------------------------------

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Hand a step's results over: one call per event loop."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]]
        by_loop = defaultdict(list)
        for request, outcome in outcomes:
            loop, future = request.reply
            by_loop[loop].append((future, outcome))
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_answer, answers)
            except RuntimeError:  # the loop was closed meanwhile: nobody waits there any more
                log.debug("%d results had nobody to go to", len(answers))

    def _fail(self, requests: list[Request], cause: BaseException) -> None:
        error = cause if isinstance(cause, EngineError) else EngineError(str(cause))
        self._deliver([(request, error) for request in requests])


def _answer(answers: list[tuple[asyncio.Future[Any], Generation | BaseException]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
