"""Fault points: a test can kill the ledger between any two of its statements.

Off by default: a point is then one comparison with None. Points, in the order a write meets them:
`begin` (a batch is about to start its transaction), `statement` (before every SQL statement), `commit` (all
done, about to commit), `committed` (durable, but no caller has been told). A hook that raises `Crash` stops
the writer thread as a kill would: nothing is rolled back politely, every caller gets the Crash, and the
ledger object is dead. The attachment store has `attachment.written` (temporary file complete, not yet
renamed) and `attachment.unlink` (before a file is removed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_hook: Callable[[str], None] | None = None


class Crash(BaseException):
    """Stands for the death of the process; not an Exception, so that nothing handles it."""


def point(name: str) -> None:
    """A place where the process may die."""
    if _hook is not None:
        _hook(name)


@contextmanager
def injected(hook: Callable[[str], None]) -> Iterator[None]:
    """Call `hook(name)` at every point while the context is open. One hook at a time."""
    global _hook
    if _hook is not None:
        raise RuntimeError("a fault hook is already in place: close its context first")
    _hook = hook
    try:
        yield
    finally:
        _hook = None


def crash_at(n: int, *, only: str | None = None) -> Callable[[str], None]:
    """A hook that raises Crash at the n-th point reached (from 1), counting `only` one kind where given."""
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        if only is None or name == only:
            seen += 1
            if seen == n:
                raise Crash(f"{name} ({n})")

    return hook
