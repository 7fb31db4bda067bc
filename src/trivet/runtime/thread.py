"""One thread for all of the trainer's work, which nobody waits for longer than told."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class WorkThread:
    """Runs work one piece after the other, always on the same thread: torch keeps its own worker threads with
    the thread that calls it.

    Unlike an executor's it is a daemon: work that never ends can be left behind, and the process still ends.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it is, it belongs to the one who waits
                future.set_exception(error)

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work()`. Cancelling ends the waiting, not what has begun."""
        future: Future[_Result] = Future()
        self._queue.put((future, work))
        return await asyncio.wrap_future(future)

    def close(self, wait_s: float) -> bool:
        """End once the work under way is done; False when that takes longer than `wait_s` seconds."""
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()
