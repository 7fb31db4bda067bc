"""The code verifier: forms of tests, parts, what is a program's failure and what is ours."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.code.conftest import Judge

from trivet.rewards.code import CodeVerifier
from trivet.types import Reward, Scored, Unscored

CLASS = """
class Node:
    def __init__(self, value, rest=None):
        self.value, self.rest = value, rest
    def __eq__(self, other):
        return isinstance(other, Node) and self.value == other.value
    def __len__(self):
        return 1 + (len(self.rest) if self.rest else 0)
    def __iter__(self):
        yield self.value
        yield from self.rest or ()
    def __getitem__(self, n):
        return list(self)[n]
    def __lt__(self, other):
        return self.value < other.value
def f(node):
    node.value += 1
    return node
"""

OWN = """
class np:
    allclose = staticmethod(lambda *a: True)
def f(x): return None
"""
YES = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __len__(self): return 0
    def __iter__(self): return iter([])
    def __getitem__(self, key): return Yes()
def f(x): return Yes()
"""


def functional(*asserts: str, **rest: Any) -> dict[str, Any]:
    return {"kind": "functional", "entry_point": "f", "asserts": list(asserts), **rest}


def value(reward: Reward) -> float:
    assert isinstance(reward, Scored), reward
    return reward.value


def part(reward: Reward, name: str) -> float | None:
    assert isinstance(reward, Scored), reward
    return reward.parts.get(name)


# -- functions -------------------------------------------------------------------------------------


def test_reward_is_binary_and_the_fraction_a_part(judge: Judge) -> None:
    tests = functional(
        "assert f(1) == 1", "assert f(2) == 2", "assert sorted([f(3)]) == [3]", "assert f(-4) == 4"
    )
    half = judge("def f(x): return x if x < 2 or x == 3 else 0", tests)
    assert half == Scored(0.0, {"answered": 1.0, "tests": 4.0, "passed": 2.0, "fraction": 0.5})
    assert value(judge("def f(x): return abs(x)", tests)) == 1.0


@pytest.mark.parametrize(
    ("program", "statement"),
    [
        ("def f(x): return [x, (x,), {x}, {x: x}]", "assert f('a') == ['a', ('a',), {'a'}, {'a': 'a'}]"),
        ("def f(x): return 2 ** 100_000", "assert f(0) == 2 ** 100_000"),
        ("def f(x): return x", "assert f(b'\\x00\\xff') == b'\\x00\\xff'"),
        ("def f(x): return x", "assert f('\\ud800') == '\\ud800'"),
        ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2']"),
        ("def f(x):\n    yield x", "assert next(f(3)) == 3"),
        ("def f(x): return int(x)", "try:\n    f('a')\n    assert False\nexcept ValueError:\n    pass"),
        ("def f(x): return x[0]", "try:\n    f([])\nexcept LookupError:\n    pass"),
        ("def f(x): x.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
        ("def f(x): x[0].append(1); x[1].update(b=2)", "a = [[], {}]\nf(a)\nassert a == [[1], {'b': 2}]"),
        ("def f(x): return x(3)", "assert f(str) == '3'"),
        (
            "from fractions import Fraction\ndef f(x): return Fraction(x, 3)",
            "import fractions\nassert f(1) * 3 == 1",
        ),
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            "assert f('aab') == {'a': 2, 'b': 1}",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n    a: int\ndef f(x): return A(x).a",
            "assert f(1) == 1",
        ),
        ("def f(x):\n    print('noise')\n    return x", "assert f(1) == 1"),
        (
            "def f(x): return x\nif __name__ == '__main__':\n    raise SystemExit(f(input()))",
            "assert f(1) == 1",
        ),
        ("def f(*, a, b=2): return a + b", "assert f(a=1) == 3"),
    ],
)
def test_what_functions_may_take_and_give(judge: Judge, program: str, statement: str) -> None:
    reward = judge(program, functional(statement))
    assert value(reward) == 1.0 and part(reward, "weak") is None
    assert (
        value(judge("def f(*x, **k): return None", functional(statement))) == 0.0
        or "LookupError" in statement
    )


def test_large_arguments_and_results(judge: Judge) -> None:
    numbers = list(range(200_000))
    tests = {"kind": "functional", "entry_point": "f", "cases": [{"args": [numbers], "expected": numbers}]}
    assert value(judge("def f(x): return x", tests)) == 1.0
    assert value(judge("def f(x): return x[::-1]", tests)) == 0.0
    script = functional("x = list(range(200_000))\nassert f(x) == x")
    assert value(judge("def f(x): return x", script)) == 1.0
    reward = judge("def f(x): return x", functional("assert len(f([0] * 2_000_000)) == 2_000_000"))
    assert isinstance(reward, Unscored) and reward.cause == "unsupported_tests"


def test_objects_of_the_programs_own_classes_are_flagged(judge: Judge) -> None:
    tests = functional(
        "n = Node(1, Node(5))\nassert f(n).value == 2 and n.value == 2 and n.rest.value == 5",
        "assert len(Node(1, Node(2))) == 2 and list(Node(1, Node(2))) == [1, 2] and Node(7)[0] == 7",
        "assert Node(1) == Node(1) and Node(1) != Node(2) and Node(1) < Node(2)",
        "n = Node(1)\nn.value = 8\nassert f(n).value == 9",
        "assert f(Node(1)) != 2",
    )
    reward = judge(CLASS, tests)
    assert value(reward) == 1.0 and part(reward, "weak") == 1.0
    assert value(judge(CLASS.replace("+= 1", "+= 2"), tests)) == 0.0


def test_further_names_of_the_program_are_flagged(judge: Judge) -> None:
    """They are the program's, which may make of them what it likes; those of the library are the tests'."""
    assert part(judge(OWN, functional("assert np.allclose(f(1), [4])")), "weak") == 1.0
    tests = functional("assert math.isclose(f(1), 4)")
    assert value(judge(OWN.replace("class np", "class math").replace("allclose", "isclose"), tests)) == 0.0
    honest = judge("def f(x): return 4.0", tests)
    assert value(honest) == 1.0 and part(honest, "weak") is None


@pytest.mark.parametrize(
    "statement",
    [
        "assert f(1) == 4",
        "y = 4\nassert f(1) == y",
        "y = 4\nassert y == f(1)",
        "assert not f(1) != 4",
        "assert f(1) in [4]",
        "assert f(1) in {4: 1}",
        "assert 4 in f(1)",
        "assert [f(1)] == [4]",
        "assert set(f(1)) == {4}",
        "assert f(1)[0] == 4",
        "assert f(1) <= 4",
        "assert len(f(1)) == 4",
        "assert f(1) == f(2) == 4",
        "assert str(f(1)) == '4'",
        "assert f'{f(1)}' == '4'",
        "assert round(f(1), 2) == 4",
        "assert sum([f(1)]) == 4",
        "assert max(f(1), 3) == 4",
        "assert type(f(1)) is int",
        "assert isinstance(f(1), int)",
        "import math\nassert math.isclose(f(1), 4)",
    ],
)
def test_an_object_never_equals_a_plain_value(judge: Judge, statement: str) -> None:
    assert value(judge(YES, functional(statement))) == 0.0


def test_setup_runs_on_both_sides(judge: Judge) -> None:
    setup = "import math\ndef helper(x):\n    return x + 1"
    tests = functional("assert f(1) == helper(1)", "assert math.isclose(f(2), 3)", setup=setup)
    assert value(judge("def f(x): return helper(x)", tests)) == 1.0
    # The tests' helper is the tests' own, whatever the program calls by its name.
    assert value(judge("def helper(x): return 0\ndef f(x): return 0", tests)) == 0.0


def test_cases_of_json(judge: Judge) -> None:
    tests = {
        "kind": "functional",
        "entry_point": "Solution.pair",
        "cases": [{"args": [[1, 2]], "expected": [1, 2]}, {"args": [[]], "expected": [[]]}],
        "wrapped": True,
    }
    program = "class Solution:\n    def pair(self, x):\n        return (*x,) if x else []"
    assert value(judge(program, tests)) == 1.0
    assert value(judge(program.replace("pair", "other"), tests)) == 0.0


def test_inputs_are_judged_by_the_reference(judge: Judge) -> None:
    tests = {
        "kind": "functional",
        "entry_point": "f",
        "inputs": [[1], [2.5], ["refused"], [0]],
        "reference": "def f(x): return (x * 0.1, 'ok')",
    }
    good = judge("def f(x): return (x / 10, 'ok')", tests)
    assert value(good) == 1.0 and part(good, "tests") == 3.0
    assert part(judge("def f(x): return (x / 10, 'ok') if x else None", tests), "passed") == 2.0
    broken = judge("def f(x): return 1", {**tests, "reference": "def f(x): raise ValueError"})
    assert isinstance(broken, Unscored) and broken.cause == "bad_reference"


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        ("def f(x) return", "not_loaded"),
        ("import nothing_of_this_name", "not_loaded"),
        ("def f(x): return x" + "\n" * 300_000, "too_long"),
        ("def f(x):\n    while True: pass", "timed_out"),
        ("import time\ntime.sleep(60)", "timed_out"),
        ("def f(x): return bytearray(1 << 30)", "out_of_memory"),
        ("def f(x):\n    while True: print('x' * 1000)", "too_much_output"),
        ("import os\ndef f(x): os._exit(0)", "ended_early"),
        ("def f(x): return {n * ((1 << 61) - 1) for n in range(3000)}", None),
    ],
)
def test_failures_of_programs_are_named(judge: Judge, program: str, flag: str | None) -> None:
    for statement in ("assert f(1) == 1", "y = f(1)\nassert y == 1"):
        reward = judge(program, functional(statement))
        assert value(reward) == 0.0 and (flag is None or part(reward, flag) == 1.0), reward


def test_tests_that_choke_on_a_programs_values(judge: Judge) -> None:
    """The tests ran out of their limits after they were given a result: the result was at fault."""
    reward = judge("def f(x): return range(10**12)", functional("assert list(f(1)) == [1]"))
    assert value(reward) == 0.0


def test_tests_that_do_not_run_are_nobodys_verdict(judge: Judge) -> None:
    causes = {}
    for name, tests in {
        "setup raises": functional("assert sorted(f(1)) == 1", setup="raise ValueError('broken')"),
        "setup loops": functional("assert sorted(f(1)) == 1", setup="while True: pass"),
        "function handed over": functional("assert sorted(f(lambda x: x)) == 1"),
    }.items():
        reward = judge("def f(x): return x", tests)
        assert isinstance(reward, Unscored), (name, reward)
        causes[name] = reward.cause
    assert causes == {
        "setup raises": "bad_tests",
        "setup loops": "bad_tests",
        "function handed over": "unsupported_tests",
    }


# -- programs --------------------------------------------------------------------------------------


def stdio(*cases: tuple[str, str], **rest: Any) -> dict[str, Any]:
    return {"kind": "stdio", "cases": [{"input": one, "output": other} for one, other in cases], **rest}


def test_programs_that_print(judge: Judge) -> None:
    tests = stdio(("1 2\n", "3\n"), ("5 5\n", "10"))
    assert value(judge("print(sum(map(int, input().split())), end=' \\n\\n')", tests)) == 1.0
    half = judge("print(3)", tests)
    assert value(half) == 0.0 and part(half, "fraction") == 0.5
    assert value(judge("import sys\nprint(eval(sys.stdin.read().replace(' ', '+')))", tests)) == 1.0
    assert (
        value(
            judge(
                "def main():\n    print(sum(map(int, input().split())))\n"
                "if __name__ == '__main__':\n    main()",
                tests,
            )
        )
        == 1.0
    )


def test_tolerance_of_printed_numbers(judge: Judge) -> None:
    tests = stdio(("", "0.3333333 ok\n"))
    assert value(judge("print(1 / 3, 'ok')", tests)) == 0.0
    assert value(judge("print(1 / 3, 'ok')", {**tests, "tolerance": 1e-6})) == 1.0


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')", "binary_output"),
        ("while True: print('x' * 1000)", "too_much_output"),
        ("while True: pass", "timed_out"),
        ("a = bytearray(1 << 30)", "out_of_memory"),
        ("raise ValueError", "ended_early"),
        ("print(", "ended_early"),
    ],
)
def test_failures_of_printing_programs_are_named(judge: Judge, program: str, flag: str) -> None:
    reward = judge(program, stdio(("1", "1"), time_limit_s=1.0))
    assert value(reward) == 0.0 and part(reward, flag) == 1.0, reward


CHECKER = """
import sys
given, wanted, got = (open(name).read() for name in sys.argv[1:])
a, b = map(int, got.split())
print(int(a + b == int(given)))
"""


def test_checkers_judge_answers_of_which_many_are_right(judge: Judge) -> None:
    tests = stdio(("7", "3 4"), checker=CHECKER)
    assert value(judge("print(1, 6)", tests)) == 1.0
    assert value(judge("print(1, 5)", tests)) == 0.0
    # It raises on this; since it accepts the expected output, the program is at fault.
    assert value(judge("print('import os; os._exit(0)')", tests)) == 0.0
    assert value(judge("print()", tests)) == 0.0
    exits = CHECKER.replace("print(int(a + b == int(given)))", "sys.exit(a + b != int(given))")
    assert value(judge("print(1, 6)", {**tests, "checker": exits})) == 1.0
    assert value(judge("print(1, 5)", {**tests, "checker": exits})) == 0.0


@pytest.mark.parametrize(
    "checker", ["raise ValueError", "while True: pass", "import os; os.abort()", "exit(77)"]
)
def test_checkers_at_fault_are_nobodys_verdict(judge: Judge, checker: str) -> None:
    reward = judge("print(1)", stdio(("1", "1"), checker=checker, time_limit_s=1.0))
    assert isinstance(reward, Unscored) and reward.cause == "bad_checker", reward


# -- ours ------------------------------------------------------------------------------------------


def test_answers_without_a_program(verifier: CodeVerifier) -> None:
    tests = functional("assert f(1) == 1")
    for text in ("", "none", "```python\n\n```", "x" * 1_000_000, "\ud800\x00" * 1000):
        reward = asyncio.run(verifier.verify(text, tests, "p"))
        assert reward == Scored(0.0, {"answered": 0.0})
    # Tests at fault come first: they would be at fault for any answer.
    reward = asyncio.run(verifier.verify("", None, "p"))
    assert isinstance(reward, Unscored) and reward.cause == "no_tests"


def test_programs_that_are_no_text_for_a_compiler(judge: Judge) -> None:
    for program in (
        "\x00",
        "a = '\ud800'\ndef f(x): return",
        "(" * 5000,
        "-" * 100_000 + "1",
        "\ufeff\u202e",
    ):
        assert value(judge(program, functional("assert f(1) == 1"))) == 0.0


def test_a_sandbox_that_fails_is_nobodys_verdict(tmp_path: Path) -> None:
    async def run() -> Reward:
        async with CodeVerifier(packages=[tmp_path / "absent"]) as verifier:
            reward = await verifier.verify("```python\npass\n```", functional("assert f(1) == 1"), "p")
            assert verifier.counters["unscored/sandbox_failed"] == 1
            return reward

    reward = asyncio.run(run())
    assert isinstance(reward, Unscored) and reward.cause == "sandbox_failed"


def test_packages_may_be_imported(tmp_path: Path, verifier: CodeVerifier) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # programs run as another user
    (tmp_path / "lent.py").write_text("ANSWER = 42\n")

    async def run() -> Reward:
        async with CodeVerifier(workers=1, packages=[tmp_path], preload=["lent"]) as other:
            text = "```python\nimport lent\ndef f(x): return lent.ANSWER\n```"
            return await other.verify(text, functional("assert f(1) == 42"), "p")

    assert value(asyncio.run(run())) == 1.0


def test_stopping_early(verifier: CodeVerifier) -> None:
    async def run(program: str, tests: dict[str, Any]) -> Reward:
        async with CodeVerifier(workers=1, stop_early=True) as other:
            return await other.verify(f"```python\n{program}\n```", tests, "p")

    tests = functional("assert f(1) == 0", "assert f(2) == 2")
    assert part(asyncio.run(run("def f(x): return x", tests)), "passed") == 0.0
    cases = stdio(("1", "0"), ("2", "2"))
    assert part(asyncio.run(run("print(input())", cases)), "passed") == 0.0


@pytest.mark.parametrize(
    "arguments",
    [{"workers": 0}, {"test_s": 0}, {"test_s": 9.0, "total_s": 3.0}, {"tolerance": 2.0}, {"memory_mb": 1}],
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        CodeVerifier(**arguments)


def test_many_verdicts_from_several_loops_agree(verifier: CodeVerifier) -> None:
    tests = functional("assert f(1) == 1", "assert sorted([f(2)]) == [2]")
    answers = ["```python\ndef f(x): return x\n```", "```python\ndef f(x): return 1\n```"]

    async def run() -> list[Reward]:
        return await asyncio.gather(*(verifier.verify(answers[n % 2], tests, "p") for n in range(40)))

    first = asyncio.run(run())
    assert [value(one) for one in first] == [1.0, 0.0] * 20
    assert asyncio.run(run()) == first


def test_cancelling_frees_the_worker(verifier: CodeVerifier) -> None:
    slow = "```python\ndef f(x):\n    while True: pass\n```"

    async def run() -> float:
        waits = [
            asyncio.create_task(verifier.verify(slow, functional("assert f(1) == 1"), "p")) for _ in range(2)
        ]
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        for one in waits:
            one.cancel()
        done = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)
        quick = "```python\ndef f(x): return x\n```"
        assert value(await verifier.verify(quick, functional("assert f(1) == 1"), "p")) == 1.0
        return time.monotonic() - begun

    assert asyncio.run(run()) < 1.9  # they were killed, not waited for: their limit is 2 s
