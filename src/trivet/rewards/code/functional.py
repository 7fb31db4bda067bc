"""Functions under test: the program runs behind one wall, tests that need Python behind another, the host
between them relays calls and compares. Blocking; to be run in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from trivet.rewards.code.compare import How, number, same
from trivet.rewards.code.inside.trivet_codec import CodecError
from trivet.rewards.code.plan import Pair, Plan, PlanError
from trivet.sandbox import ChannelClosed, Limits, Program, ZygotePool
from trivet.sandbox.client import Scope

_DRIVER = "import trivet_driver; trivet_driver.main()"
_EXAMINER_S = 5.0  # longer than the program may
_EXAMINER = "import trivet_examiner; trivet_examiner.main()"
# How much longer than its processor time a test may take by the clock: verdicts are made at the lowest
# priority, beside training, and a right program must not fail because others were busy.
CLOCK = 4.0
# What ended a program, as parts of a score.
ENDED = {"timeout": "timed_out", "memory": "out_of_memory", "output": "too_much_output"}


@dataclass(slots=True)
class Verdict:
    """What an answer came to: tests that passed, and what is worth a part of the score (1 each)."""

    tests: int
    passed: int = 0
    flags: set[str] = field(default_factory=set)


class _Over(Exception):
    """No further test can be run: the rest have failed."""


class _Session:
    """A loaded program that answers requests."""

    def __init__(self, program: Program, test_s: float, verdict: Verdict) -> None:
        self._program, self._test_s, self._verdict = program, test_s, verdict

    def load(self, plan: Plan, source: str, pairs: list[Pair]) -> None:
        """Load the program. It then makes the pairs' calls; `replies` gives what comes of them."""
        calls = [_call(plan.entry, pair) for pair in pairs]
        self._send({"before": plan.before, "program": source, "seconds": self._test_s, "calls": calls})
        if plan.before:
            self._prepared()
        if "ready" not in self._recv():
            self._verdict.flags.add("not_loaded")
            raise _Over

    def _prepared(self) -> None:
        """No line of the program has run yet: what fails here are the tests."""
        try:
            self._program.recv(within_s=CLOCK * self._test_s)
        except ChannelClosed as error:
            cause = self._program.finish().cause
            raise PlanError("bad_tests", f"payload.tests.setup does not come to an end: {cause}") from error

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        return self._recv()

    def replies(self, count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            yield self._recv()

    def _send(self, message: Any) -> None:
        try:
            self._program.send(message)
        except ChannelClosed as error:
            self._ended(error)

    def _recv(self) -> dict[str, Any]:
        """The program's next reply, whatever wrote it. _Over when there is none or it came late."""
        try:
            reply = self._program.recv(within_s=CLOCK * self._test_s)
        except ChannelClosed as error:
            self._ended(error)
        if not isinstance(reply, dict) or "late" in reply:
            self._verdict.flags.add("timed_out" if isinstance(reply, dict) else "ended_early")
            raise _Over
        if isinstance(reply.get("e"), list) and "MemoryError" in reply["e"]:
            self._verdict.flags.add("out_of_memory")
        return reply

    def _ended(self, error: ChannelClosed) -> NoReturn:
        cause = self._program.finish().cause
        self._verdict.flags.add(ENDED.get(cause, "ended_early"))
        raise _Over from error


def _call(entry: str, pair: Pair) -> dict[str, Any]:
    return {"do": "call", "of": {"n": entry}, "args": pair.args, "named": pair.named}


class Functional:
    """Judges programs by one plan's tests, within `limits` in all and `test_s` processor seconds a call."""

    def __init__(self, pool: ZygotePool, scope: Scope, plan: Plan, limits: Limits, test_s: float) -> None:
        self._pool, self._scope, self._plan = pool, scope, plan
        self._limits, self._test_s = limits, test_s

    def expectations(self) -> list[Pair]:
        """The plan's pairs, with what the reference solution gives; calls that it refuses are left out.

        Raises PlanError (bad_reference) when it accepts none, and there are no other tests.
        """
        wanted = [pair for pair in self._plan.pairs if pair.want == "reference"]
        found = [pair for pair in self._plan.pairs if pair.want != "reference"]
        if not wanted:
            return found
        verdict = Verdict(0)
        try:
            with self._loaded(self._plan.reference, wanted, verdict) as session:
                for pair, reply in zip(wanted, session.replies(len(wanted)), strict=True):
                    if "v" in reply and _plain(reply["v"]):
                        found.append(replace(pair, want="equal", expected=reply["v"]))
        except _Over:
            pass  # it ran out of its limits: what it gave until then are good tests
        if not found and not self._plan.scripts:
            raise PlanError(
                "bad_reference", f"the reference solution gives nothing ({sorted(verdict.flags)})"
            )
        return found

    def examine(self, source: str, pairs: list[Pair], stop_early: bool) -> Verdict:
        """Run the tests on a program. Raises PlanError when the tests are at fault, SandboxError."""
        verdict = Verdict(len(pairs) + len(self._plan.scripts))
        try:
            with self._loaded(source, pairs, verdict) as session:
                for pair, reply in zip(pairs, session.replies(len(pairs)), strict=True):
                    _count(verdict, "v" in reply and holds(pair, reply["v"]), stop_early)
                if self._plan.scripts:
                    self._run_scripts(session, verdict, stop_early)
        except _Over:
            pass
        return verdict

    @contextmanager
    def _loaded(self, source: str, pairs: list[Pair], verdict: Verdict) -> Iterator[_Session]:
        """A program that has loaded and makes the pairs' calls."""
        with self._pool.program(_DRIVER, b"", self._limits, talks=True, scope=self._scope) as program:
            session = _Session(program, self._test_s, verdict)
            session.load(self._plan, source, pairs)
            yield session

    def _run_scripts(self, session: _Session, verdict: Verdict, stop_early: bool) -> None:
        plan = self._plan
        tests = [{"source": one.source, "check": one.check} for one in plan.scripts]
        order = {"setup": plan.setup, "names": plan.names, "entry": plan.entry, "tests": tests}
        limits = replace(self._limits, wall_s=self._limits.wall_s + _EXAMINER_S)
        asked = False
        with self._pool.program(_EXAMINER, b"", limits, talks=True, scope=self._scope) as examiner:
            try:
                examiner.send(order)
                while True:
                    message = examiner.recv()
                    if "ask" in message:
                        asked = True
                        examiner.send(session.ask(message["ask"]))
                    elif "setup" in message:
                        if asked:  # what the tests begin with fails on this program
                            return
                        raise PlanError("bad_tests", f"the tests' setup raises {message['setup']}")
                    elif "done" in message:
                        return
                    else:
                        _script_done(verdict, message, stop_early)
            except ChannelClosed as error:
                cause = examiner.finish().cause
                if not asked:
                    raise PlanError("bad_tests", f"the tests do not run: {cause}") from error
                # They were given this program's results, and could not cope with them.
                verdict.flags.add("tests_ended")


def _script_done(verdict: Verdict, message: dict[str, Any], stop_early: bool) -> None:
    if "unsupported" in message:
        raise PlanError("unsupported_tests", f"a test cannot be run apart: {message['unsupported']}")
    if message["passed"] and message["weak"]:
        verdict.flags.add("weak")
    _count(verdict, message["passed"] is True, stop_early)


def _count(verdict: Verdict, passed: bool, stop_early: bool) -> None:
    verdict.passed += passed
    if stop_early and not passed:
        raise _Over


def _plain(code: Any) -> bool:
    """Whether the value is one that two runs can be compared by."""
    stack = [code]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack += one
        elif isinstance(one, dict):
            if "o" in one or "I" in one:
                return False
            stack += one.values()
    return True


# -- comparing -------------------------------------------------------------------------------------


def holds(pair: Pair, got: Any) -> bool:
    """Whether a coded result is what the test wants."""
    match pair.want:
        case "equal":
            return same(pair.expected, got, pair.how)
        case "unequal":
            return not same(pair.expected, got, pair.how)
        case "is":
            return got is pair.expected  # None, True or False
        case "true":
            return _true(got)
        case "false":
            return not _true(got)
        case "near":
            return _near(pair.expected, got, pair.how)
    raise AssertionError(f"a pair that wants {pair.want}")


def _true(code: Any) -> bool:
    """As `bool` has it. Objects that stayed on the other side are true."""
    if code is None or isinstance(code, str | list):
        return bool(code)
    try:
        value = number(code)
        if value is None and isinstance(code, dict):
            ((tag, inner),) = code.items()
            return bool(range(*map(int, inner))) if tag == "r" else tag in ("o", "I") or bool(inner)
    except (CodecError, TypeError, ValueError, LookupError, ArithmeticError):
        return False
    return bool(value)


def _near(expected: Any, got: Any, how: How) -> bool:
    assert how.tolerance is not None
    try:
        value = number(got)
        return isinstance(value, int | float) and abs(value - expected) < how.tolerance
    except (CodecError, TypeError, ValueError, LookupError, ArithmeticError):
        return False
