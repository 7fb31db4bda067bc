"""Tests as tasks give them: read, sorted, chosen; answers' blocks."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.rewards.code.answer import last_block
from trivet.rewards.code.plan import Pair, PlanError, chosen, make_plan


def functional(**rest: Any) -> dict[str, Any]:
    return {"kind": "functional", "entry_point": "f", **rest}


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("```python\na = 1\n```\nor\n```python\na = 2\n```\nthe end", "a = 2"),
        ("```python\na = 1\n```\nprints\n```\n1\n```", "a = 1"),
        ("```\na = 1\n```", "a = 1"),
        ("```Python3\r\na = 1\r\n```\r\n", "a = 1"),
        ("~~~py\na = '''\n```\n'''\n~~~", "a = '''\n```\n'''"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''"),
        ("1. like so:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ('```python title="x"\na = 1\n```', "a = 1"),
        ("```python\n```", ""),
        ("```javascript\nlet a\n```", None),
        ("```python\na = 1", None),
        ("use `python` here", None),
        ("", None),
    ],
)
def test_the_last_block(text: str, found: str | None) -> None:
    assert last_block(text) == found


@given(st.text(alphabet="`~ \npythona=1", max_size=200))
def test_any_text_has_a_block_or_none(text: str) -> None:
    found = last_block(text)
    assert found is None or isinstance(found, str)


def test_a_megabyte_of_fences_is_read_in_time_that_grows_with_it() -> None:
    assert last_block("```python\n" * 100_000 + "a\n" + "```") is not None
    assert last_block("`" * 1_000_000) is None


# -- the choice ------------------------------------------------------------------------------------


def test_the_chosen_tests_are_fixed_by_the_problem() -> None:
    assert chosen(3, "p", 50) == [0, 1, 2]
    first = chosen(400, "p", 50)
    assert first == chosen(400, "p", 50) == sorted(first) and len(set(first)) == 50
    assert first != chosen(400, "q", 50)
    # One more test exchanges one of the chosen at most.
    assert len(set(first) & set(chosen(401, "p", 50))) >= 49


@given(st.integers(0, 300), st.text(max_size=5), st.integers(1, 60))
def test_a_choice_has_its_size(count: int, problem: str, at_most: int) -> None:
    found = chosen(count, problem, at_most)
    assert len(found) == min(count, at_most) and set(found) <= set(range(count))


def test_at_most_fifty_tests_are_planned() -> None:
    plan = make_plan(functional(asserts=[f"assert f({n}) == {n}" for n in range(80)]), "p", 50)
    assert plan.total == 80 and len(plan.pairs) == 50
    plan = make_plan(
        {"kind": "stdio", "cases": [{"input": str(n), "output": ""} for n in range(80)]}, "p", 50
    )
    assert [int(case.input) for case in plan.cases] == chosen(80, "p", 50)


# -- who decides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "want"),
    [
        ("assert f(1) == 2", "equal"),
        ("assert 2 == f(1), 'wrong'", "equal"),
        ("assert f([1, {2: (3,)}], key={4}) == {'a': -1.5}", "equal"),
        ("assert f(1) != 2", "unequal"),
        ("assert f(1) is None", "is"),
        ("assert f(1)", "true"),
        ("assert not f(1)", "false"),
        ("assert abs(f(1) - 2.5) < 1e-6", "near"),
    ],
)
def test_plain_asserts_are_decided_by_the_host(statement: str, want: str) -> None:
    plan = make_plan(functional(asserts=[statement]), "p", 50)
    assert [pair.want for pair in plan.pairs] == [want] and not plan.scripts


@pytest.mark.parametrize(
    "statement",
    [
        "assert sorted(f(1)) == [2]",
        "assert f(1) == f(2)",
        "assert f(x) == 2",
        "assert f(*[1]) == 2",
        "assert f(**{'a': 1}) == 2",
        "assert f(1) == g(1)",
        "assert f(1) == 2 == f(1)",
        "assert f(1) is x",
        "assert f(1) in (1, 2)",
        "assert f(1).a == 2",
        "assert abs(f(1) - f(2)) < 1e-6",
        "x = f(1)\nassert x == 2",
        "for n in (1, 2):\n    assert f(n) == n",
    ],
)
def test_all_else_runs_behind_a_wall(statement: str) -> None:
    plan = make_plan(functional(asserts=[statement]), "p", 50)
    assert len(plan.scripts) == 1 and not plan.pairs


def test_a_check_of_asserts_gives_a_test_each() -> None:
    source = (
        "import math\nK = 3\n\ndef check(candidate):\n    'x'\n    assert True\n"
        "    assert candidate(1) == 2\n"
        "    assert candidate(K) == math.floor(3.5)\n"
    )
    plan = make_plan(functional(check=source), "p", 50)
    assert len(plan.pairs) == 1 and len(plan.scripts) == 1 and plan.total == 2
    assert "K = 3" in plan.setup and "import math" in plan.setup
    looped = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n\n"
    plan = make_plan(functional(check=looped), "p", 50)
    assert [one.check for one in plan.scripts] == [True]


def test_names_of_the_program_and_of_the_library() -> None:
    statement = "assert f(Node(1)) == sys.maxsize + len([y for y in f(2)])"
    plan = make_plan(functional(asserts=[statement]), "p", 50)
    assert plan.names == ["Node"] and plan.setup.startswith("import sys")


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "cause"),
    [
        (None, "no_tests"),
        ({}, "no_tests"),
        ([], "no_tests"),
        ("assert f(1) == 2", "no_tests"),
        (functional(), "no_tests"),
        (functional(asserts=[]), "no_tests"),
        (functional(asserts=["assert True", "assert 1 == 1"]), "no_tests"),
        (functional(check="def check(candidate):\n    pass\n"), "no_tests"),
        ({"kind": "stdio"}, "no_tests"),
        ({"kind": "stdio", "cases": []}, "no_tests"),
        ({"kind": "jvm", "cases": [{}]}, "unknown_modality"),
        ({"cases": [{}]}, "unknown_modality"),
        ({"kind": ["stdio"], "cases": [{}]}, "unknown_modality"),
        (functional(asserts=["assert f(1) =="]), "bad_tests"),
        (functional(asserts=["assert f(1\0) == 2"]), "bad_tests"),
        (functional(asserts=["assert " + "(" * 3000]), "bad_tests"),
        (functional(asserts=[7]), "bad_tests"),
        (functional(asserts="assert f(1) == 2"), "bad_tests"),
        (functional(check="def chek(candidate): pass"), "bad_tests"),
        (functional(check="def check(): pass"), "bad_tests"),
        (functional(cases=[{"args": [1]}]), "bad_tests"),
        (functional(cases=[{"args": 1, "expected": 1}]), "bad_tests"),
        (functional(inputs=[[1]]), "bad_tests"),
        (functional(inputs=[1], reference="def f(x): pass"), "bad_tests"),
        (functional(asserts=["assert f(1) == 2"], setup="import"), "bad_tests"),
        (functional(asserts=["assert f(1) == 2"], tolerance="x"), "bad_tests"),
        ({"kind": "functional", "asserts": ["assert f(1) == 2"]}, "bad_tests"),
        ({"kind": "functional", "entry_point": "f(1)", "asserts": ["assert f(1) == 2"]}, "bad_tests"),
        ({"kind": "stdio", "cases": [{"input": "1"}]}, "bad_tests"),
        ({"kind": "stdio", "cases": [{"input": 1, "output": "1"}]}, "bad_tests"),
        ({"kind": "stdio", "cases": ["1"]}, "bad_tests"),
        ({"kind": "stdio", "cases": [{"input": "1", "output": "1"}], "checker": "if"}, "bad_tests"),
        ({"kind": "stdio", "cases": [{"input": "1", "output": "1"}], "time_limit_s": 0}, "bad_tests"),
    ],
)
def test_tests_at_fault_have_a_cause(tests: Any, cause: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(tests, "p", 50)
    assert caught.value.cause == cause


_LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(_LITERALS, _LITERALS)
def test_any_literals_make_a_pair(argument: Any, expected: Any) -> None:
    statement = f"assert f({argument!r}) == {expected!r}"
    ast.parse(statement)
    plan = make_plan(functional(asserts=[statement]), "p", 50)
    assert len(plan.pairs) == 1 and isinstance(plan.pairs[0], Pair)
