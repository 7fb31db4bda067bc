"""Warm interpreters for short Python programs: a fork each instead of an interpreter each.

A pool holds `size` sandboxes with a preloaded interpreter (`inside/zygote.py`); each runs one program at a
time. It can be used from any thread and any event loop.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Self, TypeVar

from trivet.sandbox.base import Counters, ExecResult, Limits, SandboxError, Tag, Template
from trivet.sandbox.bubblewrap import START_S, Walls, environment, interpreter, mounted_packages
from trivet.sandbox.client import Scope, client, served
from trivet.sandbox.inside import channel, seccomp
from trivet.sandbox.running import Running, close_all, pipes, readable

T = TypeVar("T")
PRELOAD = (
    *("array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum"),
    *("fractions", "functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re"),
    *("statistics", "string", "threading", "time", "traceback", "typing"),
)
_TALK_BYTES = 16 << 20
_TALK_VALUES = 400_000  # parsing more would hold up every other thread for over a tenth of a second


class ChannelClosed(Exception):
    """The program has ended, ran out of its limits, or broke the framing: no further message will come.

    `result`: what the program came to, once `talk` has let it through.
    """

    result: ExecResult | None = None


class _Zygote:
    """One sandbox with a warm interpreter."""

    def __init__(self, template: Template, preload: Sequence[str], memory: Limits, tag: Tag) -> None:
        self.pid = os.getpid()
        self.ends = time.monotonic() + tag.lifetime_s
        keeper = client()
        walls = Walls(keeper, template, memory, False, tag)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends, pipe = pipes(stdin=False)
        walls.fds.append(theirs.detach())
        number = str(2 + len(walls.fds))
        paths = ["/run/trivet", *mounted_packages(template)]
        code = f"import sys; sys.path[:0] = {paths!r}; from inside.zygote import main; main()"
        python = str(interpreter()[0])
        command = [python, "-s", "-S", "-P", "-B", "-c", code, number, json.dumps(list(preload))]
        options = ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
        for name, value in environment(None).items():
            options += ["--setenv", name, value]
        try:
            order = walls.order(command, *options, lifetime_s=tag.lifetime_s)
            line = keeper.order(order, [*ends, *walls.fds])
        except BaseException:  # whatever it is, descriptors must not leak
            close_all(pipe)
            ours.close()
            raise
        finally:
            close_all([*ends, *walls.fds])
        self._job = Running(line, pipe, b"", 1 << 16, tag.lifetime_s)
        self.control = ours
        try:
            self.init = self._job.first_event("ready", START_S)["init"]
            self._greet()
        except BaseException:  # as above
            self.close()
            raise

    def _greet(self) -> None:
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            if readable(self.control, 0.2):
                data = self.control.recv(1 << 16)
                failed = json.loads(data)["failed"] if data else [self._job.why()]
                if failed:
                    raise SandboxError(f"a warm interpreter cannot be had: {'; '.join(failed)}")
                return
        raise SandboxError(f"a warm interpreter did not start within {START_S:g} s")

    def usable(self, wall_s: float) -> bool:
        """Alive, ours (not inherited by a fork), idle, and with enough of its lifetime left."""
        if self.pid != os.getpid() or time.monotonic() + wall_s + 30.0 > self.ends:
            return False
        return not readable(self.control)  # it never speaks unasked: that is its end

    def close(self) -> None:
        self.control.close()
        self._job.kill()
        if self.pid == os.getpid():
            with contextlib.suppress(SandboxError):
                self._job.wait()
        else:
            self._job.close()


class Program(Running):
    """A program in a warm interpreter, and its channel."""

    def __init__(self, zygote: _Zygote, source: str, stdin: bytes, limits: Limits, talks: bool) -> None:
        theirs, ours = pipes(stdin=bool(stdin))
        self._channel: socket.socket | None = None
        fd = os.memfd_create("source")
        line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [other.fileno(), *theirs, fd]
        end: socket.socket | None = None
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(source.encode("utf-8", "surrogatepass"))
            os.lseek(fd, 0, os.SEEK_SET)
            if talks:
                self._channel, end = socket.socketpair()
                self._channel.setblocking(False)
                fds.append(end.fileno())
            order = {"limits": asdict(limits), "filter": seccomp.program().hex()}
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            zygote.control.sendmsg([json.dumps(order).encode()], rights)
        except BaseException:  # whatever it is, descriptors must not leak
            close_all(ours)
            line.close()
            if self._channel is not None:
                self._channel.close()
            raise
        finally:
            close_all([*theirs, fd])
            other.close()
            if end is not None:
                end.close()
        super().__init__(line, ours, stdin, limits.output_bytes, limits.wall_s)
        self.limited_to(limits.cpu_s)
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._hung_up = False
        if self._channel is not None:
            self._poll.register(self._channel, select.POLLIN)

    def send(self, message: Any) -> None:
        """Send a JSON-able value to the program. ChannelClosed when it has ended."""
        self._outgoing += channel.pack(message)
        self._watch_channel()
        while self._outgoing:
            self._step(self._deadline)

    def recv(self, within_s: float | None = None) -> Any:
        """The program's next message, as JSON gives it. ChannelClosed when none will come.

        When none has come `within_s` seconds, the program is killed for its time.
        """
        limit = self._deadline if within_s is None else time.monotonic() + within_s
        while True:
            if len(self._incoming) >= channel.HEAD.size:
                (length,) = channel.HEAD.unpack_from(self._incoming)
                if length > _TALK_BYTES:
                    self.kill("output")
                    raise ChannelClosed(f"the program announced a message of {length} bytes")
                if len(self._incoming) >= channel.HEAD.size + length:
                    return self._message(length)
            self._step(limit)
            if within_s is not None and time.monotonic() >= limit:
                self.kill("timeout")

    def _message(self, length: int) -> Any:
        data = bytes(self._incoming[channel.HEAD.size : channel.HEAD.size + length])
        del self._incoming[: channel.HEAD.size + length]
        if sum(map(data.count, (b",", b"[", b"{"))) > _TALK_VALUES:
            self.kill("output")
            raise ChannelClosed(f"the program sent a message of over {_TALK_VALUES} values")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            self.kill()
            raise ChannelClosed(f"the program sent what is no message: {type(error).__name__}") from error

    def _step(self, until: float) -> None:
        if self._event is not None or self._hung_up or self._cause is not None:
            raise ChannelClosed(f"the program has ended ({self._cause or 'by itself'})")
        self._turn(min(until, self._deadline))
        self._check()

    def _watch_channel(self) -> None:
        if self._channel is not None and not self._hung_up:
            wanted = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
            self._poll.modify(self._channel, wanted)

    def _serve(self, fd: int) -> None:
        if self._channel is None:
            return
        try:
            if self._outgoing:
                with contextlib.suppress(BlockingIOError):
                    del self._outgoing[: self._channel.send(self._outgoing[: 1 << 16])]
            with contextlib.suppress(BlockingIOError):
                data = self._channel.recv(1 << 16)
                self._incoming += data
                if not data or len(self._incoming) > 2 * _TALK_BYTES:
                    self._hang_up()
        except OSError:
            self._hang_up()
        self._watch_channel()

    def _hang_up(self) -> None:
        if self._channel is not None and not self._hung_up:
            self._hung_up = True
            self._poll.unregister(self._channel)
            self._channel.close()

    def finish(self) -> ExecResult:
        """Hang up, wait for the program's end and return what it came to."""
        self._hang_up()
        return self.wait()

    def close(self) -> None:
        self._hang_up()
        super().close()


class ZygotePool:
    """`size` warm interpreters. Use as an asynchronous context manager, or call `close`.

    `limits` are the default of programs, and the most memory and disk that one may ask for.

    `preload` names further modules to load before programs are forked (found in the template's `packages`).
    Programs run with the template's packages importable, hashes fixed (PYTHONHASHSEED=0), and no network.
    """

    def __init__(
        self,
        size: int = 2,
        *,
        template: Template | None = None,
        preload: Sequence[str] = (),
        limits: Limits | None = None,
        tag: Tag | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one interpreter, not {size}")
        if template is not None and template.snapshot:
            raise ValueError(
                "programs in warm interpreters start in an empty folder: no snapshot can be given"
            )
        self.limits = limits or Limits()
        self.counters = Counters()
        self._how = (template or Template(), [*PRELOAD, *preload], self.limits, tag or Tag())
        self._slots: queue.LifoQueue[_Zygote | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)
        self._size = size
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="trivet-zygote")
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run a Python program. Cancelling kills it. SandboxError when the sandbox fails."""
        bounds = limits or self.limits

        def work(scope: Scope) -> ExecResult:
            with self.program(source, stdin, bounds, talks=False, scope=scope) as program:
                return program.finish()

        return await served(work, self._threads)

    async def talk(
        self, source: str, handler: Callable[[Program], T], limits: Limits | None = None
    ) -> tuple[T, ExecResult]:
        """Run a driver that exchanges messages with this side.

        The driver uses `import channel` (`recv()`, `send(value)`); `handler(program)` runs in a thread and
        uses `program.recv()` and `program.send(value)`. At the limits' `wall_s` these raise ChannelClosed.
        Returns the handler's value and what the program came to; what the handler raises is raised.
        """
        bounds = limits or self.limits

        def work(scope: Scope) -> tuple[T, ExecResult]:
            with self.program(source, b"", bounds, talks=True, scope=scope) as program:
                try:
                    value = handler(program)
                except ChannelClosed as error:
                    error.result = program.finish()
                    raise
                return value, program.finish()

        return await served(work, self._threads)

    @contextlib.contextmanager
    def program(
        self, source: str, stdin: bytes, limits: Limits, *, talks: bool, scope: Scope | None = None
    ) -> Iterator[Program]:
        """Start a program, for blocking use; it is killed when left without `finish`."""
        for name in ("memory_mb", "disk_mb"):
            if getattr(limits, name) > getattr(self.limits, name):
                most = getattr(self.limits, name)
                raise ValueError(f"a program asks for {name} {getattr(limits, name)}, its pool has {most}")
        zygote = self._take(limits.wall_s)
        kept: _Zygote | None = None
        try:
            program = Program(zygote, source, stdin, limits, talks)
        except OSError as error:
            zygote.close()
            self._slots.put(None)
            raise SandboxError(f"a warm interpreter did not take a program: {error}") from error
        try:
            if scope is not None:
                scope.add(program)
            yield program
            self._end(program)
            kept = zygote
        except SandboxError:
            raise
        except BaseException:  # the handler's failure; the interpreter is kept if the program ends
            self._end(program)
            kept = zygote
            raise
        finally:
            program.close()
            if kept is None:
                zygote.close()
            self._slots.put(kept)

    def _end(self, program: Program) -> None:
        if program.result is None:
            program.kill()
        self.counters.count((program.result or program.finish()).cause)

    def _take(self, wall_s: float) -> _Zygote:
        try:
            zygote = self._slots.get(timeout=wall_s + START_S)
        except queue.Empty:
            raise SandboxError("no warm interpreter became free in time") from None
        try:
            if self._closed:
                raise SandboxError("the pool of warm interpreters is closed")
            if zygote is not None and zygote.usable(wall_s):
                return zygote
            if zygote is not None:
                self.counters.restarts += 1
                zygote.close()
            return _Zygote(*self._how)
        except BaseException:  # whatever it is, the slot goes back
            self._slots.put(None)
            raise

    async def warm(self) -> None:
        """Start all interpreters now."""

        def work(_: Scope) -> None:
            held = []
            try:
                for _n in range(self._size):
                    held.append(self._take(0.0))
            finally:
                for zygote in held:
                    self._slots.put(zygote)

        await served(work, self._threads)

    async def close(self) -> None:
        """End the interpreters; programs that run are waited for, within their limits."""
        with self._lock:
            if self._closed:
                return
            self._closed = True

        def work(_: Scope) -> None:
            held = [self._slots.get() for _n in range(self._size)]
            for zygote in held:
                if zygote is not None:
                    zygote.close()
                self._slots.put(None)

        await served(work)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
