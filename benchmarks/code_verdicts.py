"""Verdicts on programs per second, warm, against a plain subprocess for each program; two callers each.

    python benchmarks/code_verdicts.py [--programs 300] [--callers 2] [--rounds 3]

Arms take turns within a round, on the same cores and at the same priority (nice 19). `subprocess` is what a
verifier without walls does: `python program.py` for each program, its output compared; `subprocess -I -S` is
the fastest an interpreter starts. `stdio` is the code verifier on the same programs; `functional` calls a
function behind the wall and compares on this side (three asserts); `scripts` also runs such asserts behind a
wall of their own. Then `overlap`: how late the event loop is while a thousand verdicts are made.
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
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trivet.rewards.code import CodeVerifier
from trivet.types import Scored

PROGRAM = "n = int(input())\nprint(sum(d for d in range(1, n) if n % d == 0))\n"
FUNCTION = "def f(n):\n    return sum(d for d in range(1, n) if n % d == 0)\n"
STDIO = {"kind": "stdio", "cases": [{"input": "28\n", "output": "28\n"}]}
FUNCTIONAL = {
    "kind": "functional",
    "entry_point": "f",
    "asserts": ["assert f(28) == 28", "assert f(6) == 6", "assert f(12) == 16"],
}
SCRIPTS = {
    **FUNCTIONAL,
    "asserts": ["assert f(28) == sum([28])", "assert f(f(6)) == 6", "assert f(12) in (16,)"],
}
Arm = Callable[[], Coroutine[Any, Any, None]]


def plain(path: str, *flags: str) -> None:
    command = [sys.executable, *flags, path]
    done = subprocess.run(command, input=b"28\n", capture_output=True, timeout=10, check=True)
    assert done.stdout.split() == [b"28"]


async def rate(count: int, callers: int, one: Arm) -> float:
    left = iter(range(count))

    async def caller() -> None:
        for _ in left:
            await one()

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return count / (time.perf_counter() - begun)


async def lags(verifier: CodeVerifier, count: int) -> list[float]:
    """Milliseconds that a callback due every 5 ms came late, while `count` verdicts are made."""
    found: list[float] = []

    async def tick() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            found.append((time.perf_counter() - begun - 0.005) * 1000)

    ticking = asyncio.create_task(tick())
    kinds = [(f"```python\n{FUNCTION}```", FUNCTIONAL), (f"```python\n{PROGRAM}```", STDIO)]
    await asyncio.gather(*(verifier.verify(*kinds[n % 2], problem="p") for n in range(count)))
    ticking.cancel()
    return sorted(found)


async def run(programs: int, callers: int, rounds: int) -> None:
    threads = ThreadPoolExecutor(callers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(PROGRAM)
        await compared(programs, callers, rounds, threads, path)


async def compared(programs: int, callers: int, rounds: int, threads: ThreadPoolExecutor, path: Path) -> None:
    async with CodeVerifier(workers=callers) as verifier:
        await verifier.warm()

        def judged(program: str, tests: dict[str, Any]) -> Arm:
            async def one() -> None:
                reward = await verifier.verify(f"```python\n{program}```", tests, "p")
                assert isinstance(reward, Scored) and reward.value == 1.0, reward

            return one

        def started(*flags: str) -> Arm:
            async def one() -> None:
                await asyncio.get_running_loop().run_in_executor(threads, plain, str(path), *flags)

            return one

        arms: dict[str, Arm] = {
            "subprocess": started(),
            "subprocess -I -S": started("-I", "-S"),
            "stdio": judged(PROGRAM, STDIO),
            "functional": judged(FUNCTION, FUNCTIONAL),
            "scripts": judged(FUNCTION, SCRIPTS),
        }
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, one in arms.items():
                rates[name].append(await rate(programs, callers, one))
        base = statistics.median(rates["subprocess"])
        for name, found in rates.items():
            middle = statistics.median(found)
            shown = " ".join(f"{one:.0f}" for one in found)
            print(f"{name:16} {middle:6.0f}/s  ({shown})  {middle / base:.2f} x subprocess")
        late = await lags(verifier, 1000)
        print(
            f"{'overlap':16} 1000 verdicts, {len(late)} ticks: lag p50 {late[len(late) // 2]:.1f} ms, "
            f"p99 {late[int(0.99 * len(late))]:.1f} ms, most {late[-1]:.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=300, help="per arm and round")
    parser.add_argument("--callers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.nice(19 - os.nice(0))
    asyncio.run(run(args.programs, args.callers, args.rounds))


if __name__ == "__main__":
    main()
