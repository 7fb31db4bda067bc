"""Short Python programs a second: warm interpreters against a subprocess each, and against a sandbox each.

    python benchmarks/sandbox.py [--programs 300] [--cold 40] [--callers 2] [--rounds 3]

The program adds the numbers on its stdin, as answers to competition problems do. Arms take turns within a
round, on the same cores and at the same priority (nice 19). `subprocess` is what a verifier without a sandbox
does: `python program.py`, one thread per caller; `subprocess -I -S` is the fastest an interpreter starts,
without site packages. Neither has walls, limits, or a time limit for what it leaves behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from trivet.sandbox import Bubblewrap, Limits, ZygotePool, shut_down

PROGRAM = "import sys\nprint(sum(int(word) for word in sys.stdin.read().split()))\n"
STDIN, EXPECTED = b"1 2 3 4 5 6 7 8 9 10\n" * 20, b"1100\n"
PYTHON = f"python3.{sys.version_info[1]}"


def check(stdout: bytes) -> None:
    if stdout != EXPECTED:
        raise SystemExit(f"a program printed {stdout!r}, not {EXPECTED!r}")


async def rate(one: Callable[[], Awaitable[None]], programs: int, callers: int) -> float:
    """Programs a second, asked for by `callers` that each wait for their answer."""

    async def caller() -> None:
        for _ in range(programs // callers):
            await one()

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return programs // callers * callers / (time.perf_counter() - begin)


async def plain(*options: str) -> None:
    def run() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "program.py")
            path.write_text(PROGRAM)
            argv = [sys.executable, *options, str(path)]
            return subprocess.run(argv, input=STDIN, capture_output=True, timeout=10, check=True).stdout

    check(await asyncio.to_thread(run))


async def lag(stop: asyncio.Event) -> list[float]:
    """Milliseconds by which the loop wakes up late."""
    late = []
    while not stop.is_set():
        begin = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append(1000 * (time.perf_counter() - begin - 0.005))
    return late


async def measure(programs: int, cold: int, callers: int, rounds: int) -> None:
    walls = Bubblewrap()

    async def one_sandbox() -> None:
        async with await walls.start() as sandbox:
            check((await sandbox.exec([PYTHON, "-I", "-S", "-c", PROGRAM], stdin=STDIN)).stdout)

    async with ZygotePool(callers, limits=Limits(wall_s=10.0)) as pool, await walls.start() as kept:

        async def warm() -> None:
            check((await pool.run(PROGRAM, STDIN)).stdout)

        async def same_sandbox() -> None:
            check((await kept.exec([PYTHON, "-I", "-S", "-c", PROGRAM], stdin=STDIN)).stdout)

        arms = {
            "subprocess": (plain, programs),
            "subprocess -I -S": (lambda: plain("-I", "-S"), programs),
            "warm interpreter": (warm, programs),
            "one sandbox for all": (same_sandbox, cold),
            "a sandbox each": (one_sandbox, cold),
        }
        await pool.warm()
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, (one, count) in arms.items():
                rates[name].append(await rate(one, count, callers))
        stop = asyncio.Event()
        watching = asyncio.create_task(lag(stop))
        await asyncio.gather(*(warm() for _ in range(1000)))
        stop.set()
        late = sorted(await watching)
    print(f"{callers} callers, median of {rounds} rounds, programs a second (ratio to subprocess)")
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates["subprocess"], strict=True)]
        print(f"  {name:22} {statistics.median(values):7.1f}   {statistics.median(ratios):5.2f}")
    p99 = late[int(0.99 * len(late))]
    print(f"1,000 programs at once: the event loop wakes up late by {p99:.1f} ms at the 99th percentile")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--cold", type=int, default=40)
    parser.add_argument("--callers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.nice(19)
    asyncio.run(measure(args.programs, args.cold, args.callers, args.rounds))
    shut_down()


if __name__ == "__main__":
    main()
