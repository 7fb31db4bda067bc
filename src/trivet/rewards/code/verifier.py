"""The code verifier: does the program in an answer pass the problem's tests?"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from trivet.rewards.code.answer import last_block
from trivet.rewards.code.functional import CLOCK, Functional, Verdict
from trivet.rewards.code.plan import Pair, Plan, PlanError, make_plan
from trivet.rewards.code.stdio import Judge
from trivet.sandbox import Limits, SandboxError, Tag, Template, ZygotePool
from trivet.sandbox.client import Scope, served
from trivet.types import Reward, Scored, Unscored

_INSIDE = Path(__file__).parent / "inside"
_PRELOAD = ("trivet_codec", "trivet_driver", "trivet_examiner")
_KEPT = 512
_LONGEST = 1 << 18  # letters of a program


class CodeVerifier:
    """Scores 1 when all tests that are run pass, else 0; unscored where tests or sandbox are at fault.

    `workers` verdicts at once. Limits of one program: `test_s` (processor seconds of one test, where the
    task names none; the clock allows four times as much), `total_s` (seconds by the clock of all tests of
    an answer), `memory_mb` and `output_bytes`. `max_tests` are run of each problem, always the same.
    `tolerance`: of numbers that are printed. `stop_early`: not beyond the first test that fails; the part
    `fraction` is then a lower bound. `packages`: folders that programs may import from; `preload`: modules
    loaded before any program (starting takes longer, each program less).

    Parts: `answered`, `tests`, `passed`, `fraction`, and 1 where it applies: `too_long`, `not_loaded`,
    `timed_out`, `out_of_memory`, `too_much_output`, `ended_early`, `binary_output`, `tests_ended` (by
    values of the program's), `weak` (the verdict rests on names and objects of the program's own). `counters`
    counts verdicts, flags and causes.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        test_s: float = 6.0,
        total_s: float = 30.0,
        memory_mb: int = 512,
        output_bytes: int = 1 << 20,
        max_tests: int = 50,
        tolerance: float | None = None,
        stop_early: bool = False,
        packages: Sequence[str | Path] = (),
        preload: Sequence[str] = (),
        label: str = "code",
    ) -> None:
        if workers < 1 or max_tests < 1:
            raise ValueError(f"workers {workers} and max_tests {max_tests} must be 1 or more")
        if not 0 < test_s <= total_s < 3600:
            raise ValueError(f"test_s {test_s} must be above 0 and at most total_s {total_s} (under an hour)")
        if tolerance is not None and not 0 < tolerance < 1:
            raise ValueError(f"tolerance {tolerance} must be between 0 and 1")
        self.test_s, self.total_s, self.max_tests = test_s, total_s, max_tests
        self.tolerance, self.stop_early = tolerance, stop_early
        self.limits = Limits(
            wall_s=total_s, cpu_s=math.ceil(total_s), memory_mb=memory_mb, output_bytes=output_bytes
        )
        self.counters: Counter[str] = Counter()
        self._template = Template(packages=(_INSIDE, *map(Path, packages)))
        self._preload, self._workers, self._tag = (*_PRELOAD, *preload), workers, Tag(label)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trivet-code")
        self._lock = threading.Lock()
        self._pool: ZygotePool | None = None
        self._plans: OrderedDict[tuple[int, str], tuple[Any, Plan | PlanError, list[Pair]]] = OrderedDict()

    @property
    def pool(self) -> ZygotePool:
        """The warm interpreters, started when first needed: a program's and an examiner's for each worker."""
        with self._lock:
            if self._pool is None:
                self._pool = ZygotePool(
                    2 * self._workers,
                    template=self._template,
                    preload=self._preload,
                    limits=self.limits,
                    tag=self._tag,
                )
            return self._pool

    async def verify(self, text: str, tests: Any, problem: str) -> Reward:
        """The reward of an answer. `tests`: `payload.tests`; `problem`: the task's id."""
        reward = await self._verify(text, tests, problem)
        self.counters["verdicts"] += 1
        if isinstance(reward, Unscored):
            self.counters[f"unscored/{reward.cause}"] += 1
        elif isinstance(reward, Scored):
            flags = reward.parts.keys() - {"answered", "tests", "passed", "fraction"}
            self.counters.update(flags)
            self.counters["right"] += reward.value == 1.0
        return reward

    async def _verify(self, text: str, tests: Any, problem: str) -> Reward:
        def work(scope: Scope) -> Reward:
            plan, pairs = self._planned(tests, problem, scope)
            source = last_block(text)
            if source is None or not source.strip():
                return Scored(0.0, {"answered": 0.0})
            if len(source) > _LONGEST:
                return Scored(0.0, {"answered": 1.0, "too_long": 1.0})
            return _score(self._run(plan, pairs, source, scope))

        try:
            return await served(work, self._threads)
        except PlanError as error:
            return Unscored(error.cause, f"task {problem}: {error}")
        except SandboxError as error:
            return Unscored("sandbox_failed", str(error))

    def _planned(self, tests: Any, problem: str, scope: Scope) -> tuple[Plan, list[Pair]]:
        key = (id(tests), problem)  # the entry holds the object, so that its id stays its own
        with self._lock:
            known = self._plans.get(key)
        if known is None:
            try:
                plan = make_plan(tests, problem, self.max_tests)
                pairs = self._functional(plan, scope).expectations() if plan.pairs else []
            except PlanError as error:
                plan, pairs = error, []
            known = (tests, plan, pairs)
            with self._lock:
                self._plans[key] = known
                while len(self._plans) > _KEPT:
                    self._plans.popitem(last=False)
        if isinstance(known[1], PlanError):
            raise PlanError(known[1].cause, str(known[1]))
        return known[1], known[2]

    def _functional(self, plan: Plan, scope: Scope) -> Functional:
        return Functional(self.pool, scope, plan, self.limits, self.test_s)

    def _run(self, plan: Plan, pairs: list[Pair], source: str, scope: Scope) -> Verdict:
        if plan.kind == "functional":
            return self._functional(plan, scope).examine(source, pairs, self.stop_early)
        seconds = min(plan.test_s or self.test_s, self.total_s)
        most = self.limits.memory_mb
        limits = replace(
            self.limits,
            wall_s=min(CLOCK * seconds, self.total_s),
            cpu_s=math.ceil(seconds),
            memory_mb=max(64, min(plan.memory_mb or most, most)),
        )
        judge = Judge(self.pool, scope, plan, limits, self.tolerance)
        return judge.examine(source, self.total_s, self.stop_early)

    async def warm(self) -> None:
        """Start the interpreters. SandboxError when they cannot be had."""
        await self.pool.warm()

    async def close(self) -> None:
        """End the interpreters; verdicts that are being made are finished first."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _score(verdict: Verdict) -> Scored:
    passed = verdict.tests > 0 and verdict.passed == verdict.tests
    parts = {
        "answered": 1.0,
        "tests": float(verdict.tests),
        "passed": float(verdict.passed),
        "fraction": verdict.passed / verdict.tests if verdict.tests else 0.0,
    }
    return Scored(float(passed), {**parts, **dict.fromkeys(sorted(verdict.flags), 1.0)})
