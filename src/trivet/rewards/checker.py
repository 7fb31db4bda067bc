"""Checkers written as programs: `def check(answer, data)`, run in a sandbox on what a policy answered.

A checker that was generated is nobody's trusted code, and an answer may be made to break it: both are behind
the sandbox's walls, and only the verdict comes out. What goes wrong with a checker leaves an answer unscored.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Self

from trivet.sandbox import ChannelClosed, Limits, Program, SandboxError, Tag, ZygotePool
from trivet.types import Reward, Scored, Unscored

_LONGEST = 1 << 20  # letters of an answer
# The verdict is a plain number: an object of the checker's own making cannot pass for one.
_DRIVER = """
import channel, inspect
given = channel.recv()
space = {"__name__": "checker"}
try:
    exec(compile(given["source"], "checker.py", "exec"), space)
    check = space["check"]
    two = len(inspect.signature(check).parameters) > 1
    value = check(given["answer"], given["data"]) if two else check(given["answer"])
    said = {"value": value} if type(value) in (bool, int, float) else {"kind": type(value).__name__}
except BaseException as error:  # a checker may raise anything, SystemExit too: it is no verdict
    said = {"raised": f"{type(error).__name__}: {error}"[:500]}
channel.send(said)
"""


class ProgramChecker:
    """Runs checkers in warm interpreters, `workers` at once, each for at most `limit_s` seconds and
    `memory_mb`. `counters` counts verdicts and causes."""

    def __init__(
        self, *, workers: int = 2, limit_s: float = 5.0, memory_mb: int = 256, label: str = "checker"
    ) -> None:
        if workers < 1 or not 0 < limit_s < 3600:
            raise ValueError(f"workers {workers} must be 1 or more and limit_s {limit_s} above 0")
        self.workers, self.limit_s = workers, limit_s
        self._limits = Limits(wall_s=limit_s, cpu_s=max(1, round(limit_s)), memory_mb=memory_mb)
        self._tag, self._lock = Tag(label), threading.Lock()
        self._pool: ZygotePool | None = None
        self.counters: Counter[str] = Counter()

    def _warm(self) -> ZygotePool:
        with self._lock:
            if self._pool is None:
                self._pool = ZygotePool(self.workers, limits=self._limits, tag=self._tag)
            return self._pool

    async def check(self, source: Any, answer: str, data: Any = None) -> Reward:
        """Scored with what `check` says of the answer: True, False, or a number from 0 to 1. Unscored where
        there is no checker, or it raised, took too long or said something else."""
        if not isinstance(source, str) or not source.strip():
            return self._unscored("no_checker", "there is no checker's source")
        if len(answer) > _LONGEST:
            return Scored(0.0, {"too_long": 1.0})
        given = {"source": source, "answer": answer, "data": data}

        def handler(program: Program) -> Any:
            program.send(given)
            return program.recv()

        try:
            said, _ = await self._warm().talk(_DRIVER, handler, self._limits)
        except ChannelClosed as error:
            result = error.result
            cause = result.cause if result is not None else "killed"
            name = "verifier_timeout" if cause == "timeout" else "verifier_crashed"
            return self._unscored(name, f"the checker ended without a verdict ({cause})")
        except SandboxError as error:
            return self._unscored("sandbox_failed", str(error))
        return self._verdict(said)

    def _verdict(self, said: Any) -> Reward:
        if not isinstance(said, dict) or not said.keys() & {"value", "raised", "kind"}:
            return self._unscored("verifier_invalid", "the checker spoke out of turn")
        if "raised" in said:
            return self._unscored("verifier_raised", f"the checker raised {said['raised']}")
        value = said.get("value")
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            what = said.get("kind", value)
            return self._unscored("verifier_invalid", f"the checker says {what!r}; it must be 0 to 1")
        self.counters["scored"] += 1
        return Scored(float(value), {"checked": float(value)})

    def _unscored(self, cause: str, detail: str) -> Unscored:
        self.counters[cause] += 1
        return Unscored(cause, detail)

    async def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
