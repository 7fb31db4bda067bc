"""A deadline for a step, and what every thread was doing when it passed."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator
from pathlib import Path


class StepTimeout(RuntimeError):
    """A step took longer than `runtime.step_timeout_s`; names what it was doing."""


@contextlib.contextmanager
def watching(timeout_s: float, dump: Path) -> Iterator[None]:
    """Write the stacks of all threads to `dump` if the block is still running after `timeout_s` seconds.

    It works also when the event loop itself is blocked: the dump comes from a thread of the interpreter.
    """
    with open(dump, "a", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(timeout_s, repeat=False, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    if dump.stat().st_size == 0:
        dump.unlink()
