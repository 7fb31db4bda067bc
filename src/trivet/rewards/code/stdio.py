"""Programs that read standard input and print, a run for each case. Blocking; to be run in a thread."""

from __future__ import annotations

from trivet.rewards.code.compare import same_output
from trivet.rewards.code.functional import ENDED, Verdict
from trivet.rewards.code.plan import Case, Plan, PlanError
from trivet.sandbox import ExecResult, Limits, ZygotePool
from trivet.sandbox.client import Scope

_CHECK = """\
import sys
files = {files!r}
for name, text in files.items():
    with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)
sys.argv = ["checker.py", *files]
exec(compile({checker!r}, "checker.py", "exec"))
"""


class Judge:
    """Judges programs by one plan's cases."""

    def __init__(
        self, pool: ZygotePool, scope: Scope, plan: Plan, limits: Limits, tolerance: float | None
    ) -> None:
        self._pool, self._scope, self._plan, self._limits = pool, scope, plan, limits
        self._tolerance = tolerance if plan.tolerance is None else plan.tolerance

    def examine(self, source: str, total_s: float, stop_early: bool) -> Verdict:
        """Run the program on every case, until one takes too long or too much. Raises PlanError when the
        checker is at fault, SandboxError."""
        verdict = Verdict(len(self._plan.cases))
        spent = 0.0
        for case in self._plan.cases:
            result = self._run(source, case.input)
            spent += result.seconds
            text = _text(result, verdict)
            if text is not None and self._right(case, text):
                verdict.passed += 1
            elif result.cause in ENDED or stop_early:
                break
            if spent > total_s:
                verdict.flags.add("timed_out")
                break
        return verdict

    def _run(self, source: str, stdin: bytes) -> ExecResult:
        with self._pool.program(source, stdin, self._limits, talks=False, scope=self._scope) as program:
            return program.finish()

    def _right(self, case: Case, text: str) -> bool:
        if not self._plan.checker:
            return same_output(case.output, text, self._tolerance)
        found, why = self._check(case, text)
        if found is None:
            # It may have stumbled over what the program printed. If it takes the expected output, it did.
            accepted, why = self._check(case, case.output) if case.output else (None, why)
            if not accepted:
                raise PlanError("bad_checker", f"the checker does not judge: {why}")
        return found is True

    def _check(self, case: Case, text: str) -> tuple[bool | None, str]:
        """(verdict, why there is none). Checkers print a number last (over 0: right), or exit with 0 or 1."""
        given = case.input.decode("utf-8", "surrogatepass")
        files = {"input.txt": given, "expected.txt": case.output, "output.txt": text}
        result = self._run(_CHECK.format(files=files, checker=self._plan.checker), b"")
        printed = result.stdout.decode("utf-8", "replace").split()
        if result.cause not in ("ok", "exit") or b"Traceback (most recent call last)" in result.stderr:
            return None, result.stderr.decode("utf-8", "replace").strip()[-300:] or result.cause
        if printed:
            try:
                return float(printed[-1]) > 0, ""
            except ValueError:
                pass
        return (
            (result.exit_code == 0, "")
            if result.exit_code in (0, 1, 2)
            else (None, f"exit {result.exit_code}")
        )


def _text(result: ExecResult, verdict: Verdict) -> str | None:
    """What a program printed; None, and a flag, when it failed or printed no text."""
    if not result.ok:
        verdict.flags.add(ENDED.get(result.cause, "ended_early"))
        return None
    try:
        return result.stdout.decode()
    except UnicodeDecodeError:
        verdict.flags.add("binary_output")
        return None
