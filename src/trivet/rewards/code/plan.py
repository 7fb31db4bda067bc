"""A problem's tests, read and sorted by where they are decided. Nothing here runs any of them.

A call of the program with plain arguments whose result is compared with a plain value (most tests of most
sets) becomes a `Pair`: the host compares. All else is a `Script`, which runs in a sandbox that holds the
tests and not the program: data sets' code is somebody's code, and evaluating it here under a list of
allowed syntax would be a wall to maintain, with time and memory unbounded.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trivet.rewards.code.compare import How
from trivet.rewards.code.inside.trivet_codec import CodecError, Encoder

_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_BUILT_IN = frozenset(dir(builtins))
EQUAL = How()


class PlanError(Exception):
    """The tests cannot be used: `cause` for `Unscored`, and the detail."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Pair:
    """A call, and what its result must be. `expected` is coded; a `reference` pair has none before the
    reference solution gave it."""

    args: list[Any]
    named: dict[str, Any]
    want: Literal["equal", "unequal", "is", "true", "false", "near", "reference"]
    expected: Any = None
    how: How = EQUAL


@dataclass(frozen=True, slots=True)
class Script:
    """Python source that raises where the program is wrong. With `check` it defines that function."""

    source: str
    check: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """What a program reads, and what it is to print."""

    input: bytes
    output: str


@dataclass(slots=True)
class Plan:
    """What is to be done for every answer to one problem.

    `before` runs before the program, `setup` in the examiner, where `names` stand for the program's. `total`
    counts the problem's tests before the choice.
    """

    kind: Literal["functional", "stdio"]
    total: int
    entry: str = ""
    before: str = ""
    reference: str = ""
    checker: str = ""
    pairs: list[Pair] = field(default_factory=list)
    scripts: list[Script] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    setup: str = ""
    names: list[str] = field(default_factory=list)
    test_s: float | None = None
    memory_mb: int | None = None
    tolerance: float | None = None


def make_plan(tests: Any, problem: str, max_tests: int) -> Plan:
    """The plan of `payload.tests`. Raises PlanError: no_tests, unknown_modality, bad_tests."""
    if not isinstance(tests, Mapping) or not tests:
        raise PlanError("no_tests", "payload.tests is missing or empty")
    kind = tests.get("kind")
    if kind == "stdio":
        return _stdio(tests, problem, max_tests)
    if kind == "functional":
        return _functional(tests, problem, max_tests)
    raise PlanError("unknown_modality", f"payload.tests.kind is {kind!r}; it is functional or stdio")


def chosen(count: int, problem: str, at_most: int) -> list[int]:
    """The tests that are run, in their order: those with the smallest SHA-256 of problem and index."""
    if count <= at_most:
        return list(range(count))
    ranks = sorted((hashlib.sha256(f"{problem}\0{index}".encode()).digest(), index) for index in range(count))
    return sorted(index for _, index in ranks[:at_most])


# -- programs --------------------------------------------------------------------------------------


def _stdio(tests: Mapping[str, Any], problem: str, max_tests: int) -> Plan:
    cases = _listed(tests, "cases")
    if not cases:
        raise PlanError("no_tests", "payload.tests.cases is missing or empty")
    checker = _text(tests, "checker")
    _parse(checker, "checker")
    found = []
    for index in chosen(len(cases), problem, max_tests):
        case = cases[index]
        given = case.get("input") if isinstance(case, Mapping) else None
        wanted = case.get("output", "" if checker else None) if isinstance(case, Mapping) else None
        if not isinstance(given, str) or not isinstance(wanted, str):
            raise PlanError("bad_tests", f"payload.tests.cases[{index}] needs input and output, both text")
        found.append(Case(given.encode("utf-8", "surrogatepass"), wanted))
    return Plan(
        "stdio",
        len(cases),
        cases=found,
        checker=checker,
        test_s=_positive(tests, "time_limit_s"),
        memory_mb=None if (memory := _positive(tests, "memory_mb")) is None else int(memory),
        tolerance=_positive(tests, "tolerance"),
    )


# -- functions -------------------------------------------------------------------------------------


def _functional(tests: Mapping[str, Any], problem: str, max_tests: int) -> Plan:
    entry = tests.get("entry_point")
    if not isinstance(entry, str) or not all(part.isidentifier() for part in entry.split(".")):
        raise PlanError("bad_tests", f"payload.tests.entry_point is {entry!r}; it is a function's name")
    before, check = _text(tests, "setup"), _text(tests, "check")
    tolerance = _positive(tests, "tolerance")
    _parse(before, "setup")
    readers = _Readers(entry)
    sources: list[Any] = [
        *readers.asserts(_listed(tests, "asserts")),
        *readers.check(check),
        *readers.cases(_listed(tests, "cases"), How(tolerance, True, tests.get("wrapped") is True)),
        *readers.inputs(_listed(tests, "inputs"), How(tolerance or 1e-6)),
    ]
    if not sources:
        raise PlanError("no_tests", "payload.tests holds no test")
    reference = _text(tests, "reference")
    if tests.get("inputs") and not reference:
        raise PlanError("bad_tests", "payload.tests has inputs, but no reference")
    picked = [sources[index] for index in chosen(len(sources), problem, max_tests)]
    plan = Plan("functional", len(sources), entry, before, reference)
    plan.pairs = [one for one in picked if isinstance(one, Pair)]
    plan.scripts = [one for one in picked if isinstance(one, Script)]
    if plan.scripts:
        plan.setup = "\n".join([before, *readers.setup])
        known = {entry.split(".")[0]} if "." not in entry else set()
        trees = [_parse(source, "tests") for source in (plan.setup, *(one.source for one in plan.scripts))]
        free = _free(trees) - known
        modules = {name for name in free if name in sys.stdlib_module_names} - _called(trees)
        plan.setup = "\n".join([*(f"import {name}" for name in sorted(modules)), plan.setup])
        plan.names = sorted(free - modules)
    return plan


class _Readers:
    """The forms that tests of functions come in."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.setup: list[str] = []  # what stands around a check
        self._called = {entry}

    def asserts(self, values: list[Any]) -> Iterator[Pair | Script]:
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise PlanError("bad_tests", f"payload.tests.asserts[{index}] is no text")
            tree = _parse(value, f"asserts[{index}]")
            yield from self._read(tree.body, value)

    def _read(self, body: list[ast.stmt], source: str) -> Iterator[Pair | Script]:
        if len(body) == 1 and isinstance(body[0], ast.Assert):
            if not any(isinstance(node, ast.Name) for node in ast.walk(body[0].test)):
                return  # `assert True`: no test of anything
            pair = self._pair(body[0].test)
            if pair is not None:
                yield pair
                return
        yield Script(source)

    def check(self, source: str) -> Iterator[Pair | Script]:
        """A function of asserts alone gives a test for each; any other is one test."""
        if not source:
            return
        tree = _parse(source, "check")
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
        if len(found) != 1 or len(found[0].args.args) != 1:
            raise PlanError("bad_tests", "payload.tests.check must define check(candidate)")
        (function,) = found
        body = [node for node in function.body if not _says_nothing(node)]
        if "." in self.entry or not all(isinstance(node, ast.Assert) for node in body):
            yield Script(source, check=True)
            return
        name = function.args.args[0].arg
        self._called = {self.entry, name}
        rest = ast.Module([node for node in tree.body if node is not function], [])
        self.setup.append(ast.unparse(rest))
        alias = f"{name} = {self.entry}\n" if name != self.entry else ""
        for node in body:
            yield from self._read([node], alias + ast.unparse(node))

    def cases(self, values: list[Any], how: How) -> Iterator[Pair]:
        for index, value in enumerate(values):
            if not isinstance(value, Mapping) or "expected" not in value:
                raise PlanError("bad_tests", f"payload.tests.cases[{index}] needs args and expected")
            args = value.get("args", [])
            if not isinstance(args, list):
                raise PlanError("bad_tests", f"payload.tests.cases[{index}].args is no list")
            yield Pair(_coded(args), {}, "equal", _coded(value["expected"]), how)

    def inputs(self, values: list[Any], how: How) -> Iterator[Pair]:
        for index, value in enumerate(values):
            if not isinstance(value, list):
                raise PlanError("bad_tests", f"payload.tests.inputs[{index}] is no list of arguments")
            yield Pair(_coded(value), {}, "reference", how=how)

    # -- asserts that the host decides -------------------------------------------------------------

    def _pair(self, test: ast.expr) -> Pair | None:
        """`f(1)`, `not f(1)`, `f(1) == 2`, `f(1) != 2`, `f(1) is None`, `abs(f(1) - 2) < 0.1`."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._call(test.operand, "false")
        if isinstance(test, ast.Call):
            return self._call(test, "true")
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return None
        left, op, right = test.left, test.ops[0], test.comparators[0]
        if isinstance(op, ast.Lt | ast.LtE):
            return self._near(left, right)
        if isinstance(op, ast.Is):
            single = isinstance(right, ast.Constant) and (
                right.value is None or isinstance(right.value, bool)
            )
            return self._call(left, "is", right) if single else None
        if isinstance(op, ast.Eq):
            return self._call(left, "equal", right) or self._call(right, "equal", left)
        return self._call(left, "unequal", right) if isinstance(op, ast.NotEq) else None

    def _near(self, left: ast.expr, bound: ast.expr) -> Pair | None:
        match left:
            case ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), wanted)], []):
                pass
            case _:
                return None
        number, limit = _literal(wanted), _literal(bound)
        if not (number and limit and type(number[0]) in (int, float) and type(limit[0]) in (int, float)):
            return None
        found = self._call(call, "near", wanted)
        return found and Pair(found.args, found.named, "near", found.expected, How(float(limit[0])))

    def _call(self, call: ast.expr, want: Any, wanted: ast.expr | None = None) -> Pair | None:
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in self._called:
            return None
        args = [_literal(one) for one in call.args]
        named = {word.arg: _literal(word.value) for word in call.keywords if word.arg is not None}
        expected = [] if wanted is None else [_literal(wanted)]
        if None in (*args, *named.values(), *expected) or len(named) != len(call.keywords):
            return None
        try:
            return Pair(
                [_coded(one[0]) for one in args if one],
                {key: _coded(one[0]) for key, one in named.items() if one},
                want,
                _coded(expected[0][0]) if expected and expected[0] else None,
            )
        except PlanError:
            return None


def _says_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, in a tuple; None for any other expression."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return None


def _coded(value: Any) -> Any:
    try:
        return Encoder(given=True)(value)
    except CodecError as error:
        raise PlanError("bad_tests", str(error)) from error


def _free(trees: Sequence[ast.AST]) -> set[str]:
    """Names that are used and nowhere given a value."""
    used, bound = set(), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound - _BUILT_IN


def _called(trees: Sequence[ast.AST]) -> set[str]:
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {node.func.id for node in calls if isinstance(node.func, ast.Name)}


# -- reading ---------------------------------------------------------------------------------------


def _text(tests: Mapping[str, Any], key: str) -> str:
    value = tests.get(key) or ""
    if not isinstance(value, str):
        raise PlanError("bad_tests", f"payload.tests.{key} is no text")
    return value if value.strip() else ""


def _listed(tests: Mapping[str, Any], key: str) -> list[Any]:
    value = tests.get(key) or []
    if not isinstance(value, list):
        raise PlanError("bad_tests", f"payload.tests.{key} is no list")
    return value


def _positive(tests: Mapping[str, Any], key: str) -> float | None:
    value = tests.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise PlanError("bad_tests", f"payload.tests.{key} is {value!r}; it is a positive number")
    return float(value)


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except _UNREADABLE as error:
        raise PlanError("bad_tests", f"payload.tests.{what}: {type(error).__name__}: {error}") from error
