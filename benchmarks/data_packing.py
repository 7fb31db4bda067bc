"""Packing a million lengths: seconds, the ratio to best-fit decreasing written plainly, fill, cost per step.

    python benchmarks/data_packing.py [--examples 1000000] [--window 10000] [--repeats 3]

Lengths are log-normal. Both arms pack the same windows; the plain one keeps one sorted list of (room, row)
and places example by example. Seconds are of this process's own computing, the best of the repeats. With the
bound on, rows with examples above 32,768 tokens get fewer companions. A row's cost is L + L^2 / 49,152 summed
over its examples. A step is 8 rows, one a rank, and lasts as long as its costliest row: `waiting` is the sum
of those over the sum of the means, so an epoch's time is in proportion to it; with rows in random order, and
with similar rows together.
"""

from __future__ import annotations

import argparse
import resource
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import numpy as np

from trivet.data.packing import PackingOptions, Plan, epoch_order, pack

RANKS = 8
# name: capacity, median, sigma of the log, longest
MIXES = {
    "chat": (32_768, 1_480, 0.9, 32_768),
    "short": (32_768, 245, 0.8, 32_768),
    "agent": (131_072, 4_900, 1.3, 120_000),
}


def plain(lengths: list[int], capacity: int, window: int) -> int:
    """Rows of best-fit decreasing, window by window."""
    total = 0
    for start in range(0, len(lengths), window):
        rooms: list[tuple[int, int]] = []
        rows: list[list[int]] = []
        numbers = range(start, min(start + window, len(lengths)))
        for number in sorted(numbers, key=lengths.__getitem__, reverse=True):
            length = lengths[number]
            at = bisect_left(rooms, (length, -1))
            if at < len(rooms):
                room, row = rooms.pop(at)
            else:
                room, row = capacity, len(rows)
                rows.append([])
            rows[row].append(number)
            insort(rooms, (room - length, row))
        total += len(rows)
    return total


def best(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    times, out = [], None
    for _ in range(repeats):
        begin = time.process_time()
        out = call()
        times.append(time.process_time() - begin)
    return min(times), out


def waiting(plan: Plan, together: int) -> float:
    order = epoch_order(plan, seed=0, epoch=0, together=together)
    cost = plan.cost_B[order[: len(order) - len(order) % RANKS]].reshape(-1, RANKS)
    return float(cost.max(1).sum() / cost.mean(1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.examples} lengths, windows of {given.window}")
    print(
        f"{'lengths':8} {'bound':6} {'s':>6} {'plain, s':>9} {'ratio':>6} {'fill':>8} {'plain':>8} "
        f"{'rows/least':>10} {'max/mean':>9} {'p95/p50':>8} {'cv':>6} {'waiting':>8} {'similar':>8}"
    )
    for name, (capacity, median, sigma, longest) in MIXES.items():
        rng = np.random.default_rng(0)
        length_N = np.clip(median * np.exp(sigma * rng.standard_normal(given.examples)), 16, longest)
        length_N = length_N.astype(np.int64)
        lengths = length_N.tolist()
        slow, rows = best(lambda: plain(lengths, capacity, given.window), given.repeats)  # noqa: B023
        for long_from in (None, 32_768):
            options = PackingOptions(capacity, window=given.window, long_from=long_from)
            quick, plan = best(lambda: pack(length_N, options), given.repeats)  # noqa: B023
            spread = plan.spread()
            print(
                f"{name:8} {'off' if long_from is None else 'on':6} {quick:6.2f} {slow:9.2f} "
                f"{slow / quick:5.1f}x {plan.fill:8.3%} {length_N.sum() / (rows * capacity):8.3%} "
                f"{len(plan) / plan.bound:10.4f} {spread['max_over_mean']:9.2f} "
                f"{spread['p95_over_p50']:8.2f} {spread['cv']:6.3f} "
                f"{waiting(plan, 1):8.3f} {waiting(plan, RANKS):8.3f}",
                flush=True,
            )
    print(f"memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")


if __name__ == "__main__":
    main()
