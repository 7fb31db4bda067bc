"""What processes there are below one, and how much memory they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from os import listdir


def descendants(pid: int) -> list[int]:
    """`pid` and all below it, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for task in listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found


def exceeds(pids: Iterable[int], memory: int) -> bool:
    """Whether the processes hold more than `memory` bytes, apart from files that can be dropped.

    The cheap count takes shared pages once for each process; only if that is too much, they are counted by
    share, which walks page tables.
    """
    pids = list(pids)
    if _sum(pids, "status", ("RssAnon:", "RssShmem:")) <= memory:
        return False
    return _sum(pids, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) > memory


def _sum(pids: list[int], name: str, rows: tuple[str, ...]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/{name}") as file:
            total += sum(int(row.split()[1]) << 10 for row in file if row.startswith(rows))
    return total
