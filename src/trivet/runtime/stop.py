"""Ctrl-C and SIGTERM: the first asks for a safe point, the second ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from typing import TypeVar

_Result = TypeVar("_Result")
_CLEAN_S = 30.0  # for cancelled work to give back what it holds


class Stopped(Exception):
    """The run was asked to stop and has reached a safe point."""


class StopRequest:
    """Set by a signal; awaited beside long waits: sampling ends at once, training after its step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __bool__(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop. May be called from a signal handler or any thread."""
        self.reason = reason
        if self._loop is not None and self._event is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Install handlers, put the old ones back. Outside the main thread signals are the caller's."""
        old: dict[int, object] = {}

        def handle(number: int, frame: object) -> None:
            if self.reason is not None:  # the second time: now
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            self.request(signal.Signals(number).name)

        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError):  # not in the main thread
                    old[number] = signal.signal(number, handle)
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    async def guard(self, work: Awaitable[_Result]) -> _Result:
        """Await `work`, or cancel it and raise Stopped when a stop is asked for first."""
        self._loop, self._event = asyncio.get_running_loop(), self._event or asyncio.Event()
        if self.reason is not None:
            self._event.set()
        job, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({job, stop}, return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                return job.result()
            raise Stopped(f"stopped by {self.reason}")
        finally:
            stop.cancel()
            if not job.done():
                job.cancel()
                await asyncio.wait({job}, timeout=_CLEAN_S)
