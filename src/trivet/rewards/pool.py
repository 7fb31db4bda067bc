"""Killable worker processes for verifiers that may hang, crash or eat all memory.

Each worker is served by one daemon thread of the owner, which sends a call, waits for the answer up to the
time limit, and otherwise kills the worker's process group and has a fresh one forked (about 10 ms: the
libraries are loaded in the zygote). Any thread and any event loop may call; nothing here blocks a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Self

from trivet.rewards import frames

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_CONTROL_LIMIT_S = 60.0  # a fork at nice 19 on a busy machine


class PoolError(RuntimeError):
    """The pool cannot work: its target does not load, it did not start in time, or it is closed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call.

    `value`: the function returned (JSON-able) `value`. `timed_out`: it was killed at the limit. `crashed`:
    its process ended, `detail` says how. `raised`: `detail` is the exception's text.
    """

    kind: Literal["value", "timed_out", "crashed", "raised"]
    value: Any = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Worker:
    pid: int
    sock: socket.socket


@dataclass(slots=True)
class _Zygote:
    process: subprocess.Popen[bytes]
    control: socket.socket


class WorkerPool:
    """`workers` processes that run `target` ("module:function" or "file.py:function").

    Arguments and results are JSON. With `init`, `target(*init)` makes the function once per worker.
    `preload` names modules (or "module:function", which is called) loaded once before workers are forked.
    `limit_s` bounds one call from its start, `memory_bytes` the address space beyond what was preloaded,
    `start_limit_s` the loading of libraries. Processes start with the first call (or `warm`).
    """

    def __init__(
        self,
        target: str,
        workers: int = 2,
        *,
        limit_s: float = 5.0,
        memory_bytes: int = 2 << 30,
        preload: Sequence[str] = (),
        init: Sequence[Any] | None = None,
        nice: int = 19,
        start_limit_s: float = 120.0,
    ) -> None:
        if workers < 1 or limit_s <= 0 or memory_bytes <= 0:
            raise ValueError("a worker pool needs workers >= 1, limit_s > 0 and memory_bytes > 0")
        self.target = target
        self.workers = workers
        self.limit_s = limit_s
        self._start_limit_s = start_limit_s
        self._config = {
            "target": target,
            "init": None if init is None else list(init),
            "preload": list(preload),
            "memory_bytes": memory_bytes,
            "nice": nice,
        }
        self._queue: queue.SimpleQueue[tuple[Future[Outcome], tuple[Any, ...] | None] | None] = (
            queue.SimpleQueue()
        )
        self._control = threading.Lock()  # one order to the zygote at a time; held while it starts
        self._lock = threading.Lock()  # of what follows; never held while waiting
        self._zygote: _Zygote | None = None
        self._threads: list[threading.Thread] = []
        self._live: dict[int, _Worker] = {}
        self._closed = False
        self._broken = ""  # why the target does not load: found once, told to every caller

    # -- calling ---------------------------------------------------------------------------------

    def submit(self, *args: Any) -> Future[Outcome]:
        """Queue one call. The future fails with PoolError when the pool cannot work."""
        return self._submit(args)

    async def call(self, *args: Any) -> Outcome:
        """One call, awaited; see Outcome. Raises PoolError. Cancelling drops a call that has not begun."""
        return await asyncio.wrap_future(self._submit(args))

    async def warm(self) -> None:
        """Have every worker loaded. Raises PoolError when the target does not load."""
        await asyncio.gather(*(asyncio.wrap_future(self._submit(None)) for _ in range(self.workers)))

    def alive(self) -> list[int]:
        """Process ids of the workers that are loaded."""
        with self._lock:
            return [pid for pid, worker in self._live.items() if not frames.hung_up(worker.sock)]

    def _submit(self, args: tuple[Any, ...] | None) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            if self._closed:
                raise PoolError(f"the worker pool of {self.target!r} is closed")
            while len(self._threads) < self.workers:
                name = f"trivet-pool-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put((future, args))
        return future

    # -- one thread per worker -------------------------------------------------------------------

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (job := self._queue.get()) is not None:
            future, args = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None or frames.dirty(worker.sock):
                    self._drop(worker)
                    worker = None
                    worker = self._spawn()
                outcome, sound = (Outcome("value"), True) if args is None else self._run(worker, args)
            except Exception as error:  # to the caller, whose error it is; this thread goes on
                future.set_exception(error)
                continue
            if not sound:
                ended = self._drop(worker)
                worker = None
                if outcome.kind == "crashed":
                    detail = f"the process of {self.target!r} ended: {ended}"
                    outcome = Outcome("crashed", None, detail, outcome.seconds)
            future.set_result(outcome)
            if worker is None and not self._closed:
                with contextlib.suppress(PoolError, OSError):  # told to the next caller, who tries again
                    worker = self._spawn()
        self._drop(worker)

    def _run(self, worker: _Worker, args: tuple[Any, ...]) -> tuple[Outcome, bool]:
        """(outcome, whether the worker can go on)."""
        begin = time.monotonic()
        deadline = begin + self.limit_s
        try:
            frames.send(worker.sock, args, deadline)
            reply = frames.receive(worker.sock, deadline)
        except frames.FrameTimeout:
            detail = f"{self.target!r} took over {self.limit_s:g} s"
            return Outcome("timed_out", None, detail, time.monotonic() - begin), False
        except frames.FrameClosed:
            if self._closed:
                raise PoolError(f"the worker pool of {self.target!r} was closed") from None
            return Outcome("crashed", seconds=time.monotonic() - begin), False
        seconds = time.monotonic() - begin
        if "raised" in reply:
            return Outcome("raised", None, reply["raised"], seconds), "last" not in reply
        return Outcome("value", reply["value"], "", seconds), True

    # -- processes -------------------------------------------------------------------------------

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with self._control, theirs:
                zygote = self._ensure_zygote()
                order = json.dumps({"op": "spawn"}).encode()
                try:
                    socket.send_fds(zygote.control, [order], [theirs.fileno()])
                except OSError as error:
                    raise PoolError(f"the zygote of {self.target!r} is gone ({error})") from error
                worker = _Worker(self._reply(zygote)["pid"], ours)
                with self._lock:
                    self._live[worker.pid] = worker
            self._await_ready(ours, f"a worker of {self.target!r}")
        except BaseException:  # nobody else holds this end
            ours.close()
            raise
        return worker

    def _await_ready(self, sock: socket.socket, what: str) -> None:
        try:
            reply = frames.receive(sock, time.monotonic() + self._start_limit_s)
        except frames.FrameTimeout as error:
            raise PoolError(f"{what} was not ready within {self._start_limit_s:g} s") from error
        except frames.FrameClosed as error:
            raise PoolError(f"{what} ended while it was starting ({error})") from error
        if "failed" in reply:
            self._broken = f"{what} cannot start: {reply['failed']}"
            raise PoolError(self._broken)

    def _ensure_zygote(self) -> _Zygote:
        """Holding `_control`: the process that forks workers, started where there is none (any more)."""
        if self._broken:
            raise PoolError(self._broken)
        with self._lock:
            if self._closed:
                raise PoolError(f"the worker pool of {self.target!r} is closed")
            if self._zygote is not None:
                if self._zygote.process.poll() is None:
                    return self._zygote
                self._zygote.control.close()
            zygote = self._zygote = self._start_zygote()
        try:
            path = [entry or os.getcwd() for entry in sys.path]
            frames.send(zygote.control, {**self._config, "path": path}, time.monotonic() + _CONTROL_LIMIT_S)
            self._await_ready(zygote.control, f"the worker pool of {self.target!r}")
        except BaseException as error:  # cancelled or failed: no process stays behind
            zygote.process.kill()
            zygote.process.wait()
            if isinstance(error, frames.FrameClosed | frames.FrameTimeout):
                raise PoolError(f"the zygote of {self.target!r} did not start ({error!r})") from error
            raise
        return zygote

    def _start_zygote(self) -> _Zygote:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "trivet.rewards.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries print; the owner's terminal shows progress
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return _Zygote(process, ours)

    def _reply(self, zygote: _Zygote) -> dict[str, Any]:
        """Holding `_control`."""
        try:
            return frames.receive(zygote.control, time.monotonic() + _CONTROL_LIMIT_S)
        except (frames.FrameTimeout, frames.FrameClosed) as error:
            zygote.process.kill()  # out of step with us: the next call starts a new one
            zygote.process.wait()
            raise PoolError(f"the zygote of {self.target!r} gave no answer ({error!r})") from error

    def _drop(self, worker: _Worker | None) -> str:
        """Kill a worker and have it collected; how it ended."""
        if worker is None:
            return ""
        with self._lock:
            known = self._live.pop(worker.pid, None) is not None
            zygote = self._zygote
        worker.sock.close()
        if not known or zygote is None or zygote.process.poll() is not None:
            return "its zygote is gone"  # and has taken it along
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)  # not collected yet: the number is still its own
        with self._control:
            try:
                order = json.dumps({"op": "reap", "pid": worker.pid}).encode()
                zygote.control.sendall(order, socket.MSG_NOSIGNAL)
                return str(self._reply(zygote)["ended"])
            except (OSError, PoolError) as error:
                return f"its zygote is gone ({error})"

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill all workers. Calls under way and queued fail with PoolError. Never waits for a verifier."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            zygote, threads, live = self._zygote, list(self._threads), list(self._live.values())
            self._live.clear()
        self._fail_queued()
        for _ in threads:
            self._queue.put(None)
        for sock in [worker.sock for worker in live] + ([zygote.control] if zygote else []):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it, and the zygote
        if zygote is not None:
            try:
                zygote.process.wait(5.0)  # it kills and collects its workers
            except subprocess.TimeoutExpired:
                zygote.process.kill()  # its workers die with it (PDEATHSIG)
                zygote.process.wait()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(5.0)
        if zygote is not None:
            zygote.control.close()

    def _fail_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None and job[0].set_running_or_notify_cancel():
                    job[0].set_exception(PoolError(f"the worker pool of {self.target!r} was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)
