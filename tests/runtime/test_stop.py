"""Stopping: a signal reaches a safe point, long waits end at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from trivet.runtime.stop import Stopped, StopRequest
from trivet.runtime.watchdog import watching


def test_a_signal_cancels_the_guarded_work_and_is_named() -> None:
    stop = StopRequest()
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    async def main() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        await stop.guard(work())

    begin = time.monotonic()
    with stop.handling(), pytest.raises(Stopped, match="SIGTERM"):
        asyncio.run(main())
    assert cleaned == [True]
    assert time.monotonic() - begin < 30
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_signal_ends_at_once() -> None:
    stop = StopRequest()
    with stop.handling():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_work_that_is_done_is_returned_and_errors_pass_through() -> None:
    async def value() -> int:
        return 3

    async def failing() -> None:
        raise ValueError("own")

    async def main() -> None:
        stop = StopRequest()
        assert await stop.guard(value()) == 3
        with pytest.raises(ValueError, match="own"):
            await stop.guard(failing())
        stop.request("a test")
        with pytest.raises(Stopped, match="a test"):
            await stop.guard(asyncio.sleep(60))

    asyncio.run(main())


def test_the_watchdog_writes_the_stacks_of_a_blocked_step(tmp_path: Path) -> None:
    dump = tmp_path / "stacks.txt"
    with watching(0.1, dump):
        time.sleep(0.4)
    assert "test_the_watchdog_writes_the_stacks" in dump.read_text()
    other = tmp_path / "none.txt"
    with watching(60, other):
        pass
    assert not other.exists()
