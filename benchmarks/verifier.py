"""Verdicts a second of the mathematics verifier: its exact fast path against the algebra in its processes.

    python benchmarks/verifier.py [--fast 20000] [--algebra 400] [--workers 2]

Plain numbers are decided exactly in the caller; everything else goes to math-verify in killable processes at
nice 19. Pairs are all different, so that the cache of verdicts does not enter, and the workers are warm. Also
printed: what math-verify alone needs for the same plain numbers in this process (its own timers on), and what
one verdict that never comes costs the others.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from trivet.rewards import MathVerifier
from trivet.types import Scored, Unscored


def numbers(n: int, style: str) -> list[tuple[str, str]]:
    return [(rf"The sum is \boxed{{{i:{style}}}}", str(i + i % 2)) for i in range(n)]


def expressions(n: int) -> list[tuple[str, str]]:
    forms = [
        (r"\boxed{{{a}\sqrt{{{b}}}}}", r"\sqrt{{{c}}}"),
        (r"\boxed{{(x+{a})^2}}", r"x^2+{d}x+{e}"),
        (r"\boxed{{\frac{{{a}\pi}}{{{b}}}}}", r"{a}\pi/{b}"),
        (r"\boxed{{({a},{b}]}}", r"{a}<x\le {b}"),
    ]
    out = []
    for i in range(n):
        a, b = i + 2, i + 7
        text, gold = forms[i % len(forms)]
        values = {"a": a, "b": b, "c": a * a * b, "d": 2 * a, "e": a * a}
        out.append((text.format(**values), gold.format(**values)))
    return out


async def rate(verifier: MathVerifier, pairs: list[tuple[str, str]]) -> tuple[float, int]:
    """(verdicts a second, how many scored 1); all asked for at once, as a step's rollouts are."""
    begin = time.perf_counter()
    rewards = await asyncio.gather(*(verifier.verify(text, gold) for text, gold in pairs))
    seconds = time.perf_counter() - begin
    unscored = [reward for reward in rewards if not isinstance(reward, Scored)]
    if unscored:
        raise SystemExit(f"{len(unscored)} verdicts are missing; the first: {unscored[0]}")
    return len(pairs) / seconds, sum(r.value == 1.0 for r in rewards if isinstance(r, Scored))


def alone(pairs: list[tuple[str, str]]) -> float:
    """Verdicts a second of math-verify itself, called here one after the other."""
    import math_verify

    math_verify.verify(math_verify.parse("1"), math_verify.parse("1"))
    begin = time.perf_counter()
    for text, gold in pairs:
        math_verify.verify(math_verify.parse(gold), math_verify.parse(text))
    return len(pairs) / (time.perf_counter() - begin)


async def hang(workers: int) -> float:
    """Seconds for 20 ordinary verdicts behind one that never comes (limit 1 s)."""
    async with MathVerifier(workers=workers, limit_s=1.0) as verifier:
        await verifier.pool.warm()
        begin = time.perf_counter()
        endless = asyncio.ensure_future(verifier.verify(r"\boxed{(x+y+z+1)^{300}}", "x+1"))
        await asyncio.gather(*(verifier.verify(text, gold) for text, gold in expressions(20)))
        seconds = time.perf_counter() - begin
        assert isinstance(await endless, Unscored)
    return seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fast", type=int, default=20_000, help="plain numbers")
    parser.add_argument("--algebra", type=int, default=400, help="expressions")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    async with MathVerifier(workers=args.workers) as verifier:
        begin = time.perf_counter()
        await verifier.pool.warm()
        start = time.perf_counter() - begin
        pairs, warm = expressions(args.algebra + 4 * args.workers), 4 * args.workers
        await rate(verifier, pairs[:warm])
        plain, _ = await rate(verifier, numbers(args.fast, "d"))
        fast, _ = await rate(verifier, numbers(args.fast, ","))
        slow, slow_right = await rate(verifier, pairs[warm:])
    single = alone(numbers(300, "d"))
    print(f"workers ready after        {start:8.2f} s")
    print(f"plain digits               {plain:8.0f} verdicts/s")
    print(f"numbers in other spellings {fast:8.0f} verdicts/s")
    print(f"algebra, {args.workers} workers         {slow:8.0f} verdicts/s   ({slow_right} right)")
    print(f"math-verify alone, numbers {single:8.0f} verdicts/s")
    print(f"plain digits : algebra            {plain / slow:8.1f}")
    print(f"plain digits : math-verify alone  {plain / single:8.1f}")
    print(f"20 verdicts beside one that hangs (limit 1 s): {await hang(args.workers):.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
