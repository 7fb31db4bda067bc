"""A program that runs somewhere else: its pipes, its lifeline, its bounds. One thread serves one program."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from typing import Any, cast

from trivet.sandbox.base import Cause, ExecResult, SandboxError

_CHUNK = 1 << 16
_GRACE_S = 15.0  # for the keeper to report a death that was ordered; it runs at nice 19
_MEMORY_ERROR = b"MemoryError"


def pipes(stdin: bool = True) -> tuple[list[int], list[int]]:
    """Three pipes for 0, 1 and 2: (the program's ends, ours). Without `stdin` ours[0] is -1: /dev/null."""
    theirs, ours = [], []
    if stdin:
        read, write = os.pipe()
        theirs.append(read)
        ours.append(write)
    else:
        theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        ours.append(-1)
    for _ in range(2):
        read, write = os.pipe()
        theirs.append(write)
        ours.append(read)
    for fd in ours:
        if fd >= 0:
            os.set_blocking(fd, False)
    return theirs, ours


def close_all(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def readable(sock: socket.socket, limit_s: float = 0.0) -> bool:
    """Whether a read would not block, within the limit. (`select` fails in owners with over 1,024 files.)"""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


class Running:
    """Feeds stdin, collects stdout and stderr up to `output_bytes` each, hears events on the lifeline."""

    def __init__(
        self, line: socket.socket, ours: list[int], stdin: bytes, output_bytes: int, wall_s: float
    ) -> None:
        self._line = line
        self._in, self._out, self._err = ours
        self._stdin = memoryview(stdin)
        self._cap = output_bytes
        self._wall_s = wall_s
        self._begun = time.monotonic()
        self._deadline = self._begun + wall_s
        self._buffers: dict[int, bytearray] = {self._out: bytearray(), self._err: bytearray()}
        self._cause: Cause | None = None  # why we had it killed
        self._event: dict[str, Any] | None = None
        self.result: ExecResult | None = None
        self._cpu_limit = 0
        self._ordered = False  # the kill
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)
        for fd in (self._out, self._err):
            self._poll.register(fd, select.POLLIN)
        self._open = {self._out, self._err}
        if self._in >= 0:
            if stdin:
                self._poll.register(self._in, select.POLLOUT)
                self._open.add(self._in)
            else:
                os.close(self._in)
                self._in = -1

    # -- from any thread ---------------------------------------------------------------------------

    def kill(self, cause: Cause = "killed") -> None:
        """Have the whole tree killed; `wait` then returns soon."""
        self._cause = self._cause or cause
        if self._ordered:
            return
        self._ordered = True
        with contextlib.suppress(OSError):
            self._line.send(b"k", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # -- from the thread that serves it ------------------------------------------------------------

    def first_event(self, kind: str, limit_s: float) -> dict[str, Any]:
        """Wait for the event `kind`. SandboxError when the job ends or the time passes before."""
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            event = self._turn(limit)
            if event is not None and event["event"] == kind:
                return event
            if self._event is not None:
                self._drain()
                raise SandboxError(f"a sandbox ended while starting: {self.why()}")
        self.kill()
        raise SandboxError(f"a sandbox did not start within {limit_s:g} s")

    def first_output(self, wanted: bytes, limit_s: float) -> None:
        """Wait until stdout begins with `wanted`."""
        limit = time.monotonic() + limit_s
        while not self._buffers[self._out].startswith(wanted):
            if self._event is not None:
                self._drain()
                raise SandboxError(f"a sandbox ended while starting: {self.why()}")
            if time.monotonic() > limit:
                self.kill()
                raise SandboxError(f"a sandbox did not start within {limit_s:g} s")
            self._turn(limit)

    def wait(self) -> ExecResult:
        """Until the program has ended or was killed at its deadline; pipes held by others are not awaited."""
        try:
            while self._event is None:
                self._turn(self._deadline)
                self._check()
            self._drain()
        finally:
            self.close()
        self.result = self._result(self._event)
        return self.result

    def close(self) -> None:
        close_all([*self._open])
        self._open.clear()
        self._line.close()

    def _check(self) -> None:
        now = time.monotonic()
        if self._cause is None and now >= self._deadline:
            self.kill("timeout")
        if self._cause is not None and now >= self._deadline + _GRACE_S:
            raise SandboxError(f"a program could not be killed within {_GRACE_S:g} s ({self._cause})")
        if self._cause is not None and self._deadline > now:
            self._deadline = now  # killed earlier: the grace counts from here

    def _turn(self, until: float) -> dict[str, Any] | None:
        """Serve the descriptors once; an event if one came. Waits at most until `until`, in bounded naps."""
        nap = 0.2 if self._cause else min(max(0.0, until - time.monotonic()), 5.0)
        event = None
        for fd, _ in self._poll.poll(nap * 1000 + 1):
            if fd == self._line.fileno():
                event = self._hear()
            elif fd == self._in:
                self._feed()
            elif fd in self._buffers:
                self._collect(fd)
            else:
                self._serve(fd)
        return event

    def _serve(self, fd: int) -> None:
        """Further descriptors of a subclass."""

    def _hear(self) -> dict[str, Any]:
        data = b""
        for _ in range(2):  # a reset says that our word crossed its end; what it said is still there
            with contextlib.suppress(OSError):
                data = self._line.recv(1 << 16)
                break
        if not data:
            raise SandboxError("the process that keeps the sandboxes ended; was it killed?")
        event = json.loads(data)
        if event["event"] == "error":
            raise SandboxError(f"a sandbox could not run a program: {event['text']}")
        if event["event"] == "exit":
            self._event = event
        return event

    def _feed(self) -> None:
        try:
            sent = os.write(self._in, self._stdin[:_CHUNK])
            self._stdin = self._stdin[sent:]
        except BlockingIOError:
            return
        except OSError:  # the program closed its stdin
            self._stdin = memoryview(b"")
        if not self._stdin:
            self._shut(self._in)
            self._in = -1

    def _collect(self, fd: int) -> bool:
        """Read once; False at the end or when nothing is there."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._shut(fd)
            return False
        buffer = self._buffers[fd]
        room = self._cap - len(buffer)
        buffer += data[:room]
        if len(data) > room:
            self.kill("output")
            return False
        return True

    def _drain(self) -> None:
        for fd in (self._out, self._err):
            while fd in self._open and self._collect(fd):
                pass

    def _shut(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._open.discard(fd)
        os.close(fd)

    def _result(self, event: dict[str, Any]) -> ExecResult:
        code, seconds = int(event["code"]), time.monotonic() - self._begun
        stdout, stderr = bytes(self._buffers[self._out]), bytes(self._buffers[self._err])
        cause = self._cause or cast(Cause, event["cause"]) or None
        if cause is None:
            cause = self._own_cause(code, float(event.get("cpu", 0.0)), stderr)
        return ExecResult(stdout, stderr, code, cause, seconds)

    def _own_cause(self, code: int, cpu_s: float, stderr: bytes) -> Cause:
        if code == 0:
            return "ok"
        # SIGXCPU, or SIGKILL at the hard limit. What is accounted lags behind what the limit goes by.
        if code == 152 or (code == 137 and self._cpu_limit and cpu_s >= 0.75 * self._cpu_limit):
            return "timeout"
        # Python says so in its last line; a program that forges this gains nothing.
        if code == 1 and stderr.rstrip().rpartition(b"\n")[2].startswith(_MEMORY_ERROR):
            return "memory"
        return "killed" if 128 < code < 128 + 65 else "exit"

    def limited_to(self, cpu_s: int) -> None:
        """Tell which processor limit the program has, so that its death by it is known as that."""
        self._cpu_limit = cpu_s

    def why(self) -> str:
        """What stderr says so far, for messages."""
        with contextlib.suppress(SandboxError):
            self._turn(time.monotonic() + 0.5)
        return bytes(self._buffers[self._err]).decode(errors="replace").strip()[-500:] or "it gave no reason"
