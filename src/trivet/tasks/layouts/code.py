"""Programming problems: HumanEval, MBPP and MBPP+, LiveCodeBench, APPS and TACO, Codeforces, CodeContests.

All become `payload.tests`, in one form whatever the source:

    {"kind": "functional", "entry_point": "area",     # or "Solution.area": a method of a class
     "asserts": ["assert area(2) == 4"],              # one assert or more statements: each text a test
     "check": "def check(candidate): ...",            # or a function that is called with the entry point
     "cases": [{"args": [2], "expected": 4}],         # or calls; "wrapped": true says that an expected value
                                                      # may also stand in a list of one
     "inputs": [[2], [3]], "reference": "def ...",    # or calls that are to give what the reference gives
     "setup": "import math",                          # source before the program and before the tests
     "contract": "...", "tolerance": 1e-6}            # asserts on the arguments; of numbers in results
    {"kind": "stdio",
     "cases": [{"input": "2\\n", "output": "4\\n"}],
     "checker": "...",                                # a Python program: input, expected, output (files)
     "time_limit_s": 2.0, "memory_mb": 256}

There is at least one of asserts, check, cases and inputs. Nothing here runs any of it.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import io
import json
import pickle
import re
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

from trivet.tasks.layouts.base import Dropped, Layout, Made, Row, decoded, labels, needed, own_id, text
from trivet.types import canonical_json

FUNCTIONAL_PROMPT = (
    "Solve the task in Python 3. Think as long as you need, then answer with one ```python block that holds "
    "the complete definition of what the task names, with all imports it needs. Do not call it, read input "
    "or print."
)
STDIO_PROMPT = (
    "Solve the task in Python 3. Think as long as you need, then answer with one ```python block that holds "
    "a complete program. It reads the input from standard input and prints the output, and nothing else, to "
    "standard output."
)
PROMPTS = {"functional": FUNCTIONAL_PROMPT, "stdio": STDIO_PROMPT}

_LARGEST = 512 << 20  # bytes of one problem's tests after decompression
_NAMES = frozenset(dir(builtins))


def _code(source: str) -> str:
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _block(source: str) -> str:
    return f"```python\n{_code(source).strip()}\n```"


def _made(prompt: str, tests: dict[str, Any], solution: str = "", **rest: Any) -> Made:
    if not any(tests.get(key) for key in ("asserts", "check", "cases", "inputs")):
        raise Dropped("no_tests")
    payload: dict[str, Any] = {"tests": {key: one for key, one in tests.items() if one not in (None, "", [])}}
    if solution.strip():
        payload["response"] = _block(solution)
    return Made(_code(prompt).strip(), system=PROMPTS[tests["kind"]], payload=payload, **rest)


# -- functions -------------------------------------------------------------------------------------


def _humaneval(row: Row) -> Made:
    prompt, name = _code(needed(row, "prompt")), needed(row, "entry_point", cause="no_entry_point")
    place = prompt.rfind(f"def {name}(")
    if place < 0:
        raise Dropped("no_entry_point")
    # Imports, and helpers that a few of the checks call.
    tests = {
        "kind": "functional",
        "entry_point": name,
        "check": _code(text(row, "test")),
        "setup": prompt[:place].strip(),
    }
    canonical = _code(text(row, "canonical_solution"))
    return _made(
        f"Complete the function `{name}`:\n\n```python\n{prompt.rstrip()}\n```",
        tests,
        prompt + canonical if canonical else "",
        id=own_id("humaneval", row.get("task_id")),
    )


def called(asserts: Sequence[str], solution: str = "") -> str | None:
    """The function that asserts are about: of those that the solution defines (or, without one, that are no
    built-ins) the one that most of them call; of equals the outermost of the first assert."""
    defined = {node.name for node in ast.walk(_parse(solution)) if isinstance(node, ast.FunctionDef)}
    votes: dict[str, int] = {}
    for one in asserts:
        calls = [node.func for node in ast.walk(_parse(one)) if isinstance(node, ast.Call)]
        for name in dict.fromkeys(func.id for func in calls if isinstance(func, ast.Name)):
            if name in defined if defined else name not in _NAMES:
                votes[name] = votes.get(name, 0) + 1
    return max(votes, key=lambda name: votes[name]) if votes else None


def _parse(source: str) -> ast.AST:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in a data set's strings
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _statements(source: str, kind: type[ast.stmt] | tuple[type[ast.stmt], ...]) -> list[str]:
    """The statements of these kinds, one text each."""
    tree = _parse(source)
    nodes = tree.body if isinstance(tree, ast.Module) else []
    found = [ast.get_source_segment(source, node) for node in nodes if isinstance(node, kind)]
    return [one for one in found if one]


_IMPORTS = (ast.Import, ast.ImportFrom)


def _asserts(value: Any) -> list[str]:
    if isinstance(value, str):
        return _statements(_code(value), ast.Assert)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise Dropped("bad_tests")
    return [_code(one).strip() for one in value if one.strip()]


def _mbpp(row: Row) -> Made:
    prompt, solution = needed(row, "text", "prompt"), _code(text(row, "code"))
    asserts = _asserts(row.get("test_list") or row.get("test") or [])
    if not asserts:
        raise Dropped("no_tests")
    name = called(asserts, solution)
    if name is None:
        raise Dropped("no_entry_point")
    imports = row.get("test_imports")
    setup = "\n".join(map(str, imports)) if isinstance(imports, list) else text(row, "test_setup_code")
    setup = _code(setup).strip()
    tests = {"kind": "functional", "entry_point": name, "asserts": asserts, "setup": setup}
    if setup and len(_statements(setup, _IMPORTS)) != len(_statements(setup, ast.stmt)):
        # It builds what the tests use, maybe of the program's own classes: it belongs to each test.
        tests |= {"asserts": [f"{setup}\n{one}" for one in asserts], "setup": ""}
    # One test is shown, since nothing else says how the function is called; the others stay hidden.
    shown = f"{prompt.strip()}\n\nThe function is `{name}`. For example:\n\n```python\n{asserts[0]}\n```"
    return _made(shown, tests, solution, id=own_id("mbpp", row.get("task_id")))


def _finite(value: Any) -> bool:
    """JSON without NaN and infinities, which are equal to nothing or written in no standard way."""
    try:
        canonical_json(value)
    except ValueError:
        return False
    return True


def _mbpp_plus(row: Row) -> Made:
    prompt, name = needed(row, "prompt"), needed(row, "entry_point", cause="no_entry_point")
    reference = _code(needed(row, "canonical_solution", cause="no_reference"))
    inputs = [*(row.get("base_input") or []), *(row.get("plus_input") or [])]
    if not all(isinstance(one, list) for one in inputs):
        raise Dropped("bad_tests")
    tolerance, assertion = row.get("atol"), _code(text(row, "assertion"))
    if "math." in assertion and "import math" not in assertion:  # one row forgets it
        assertion = f"import math\n{assertion}"
    tests = {
        "kind": "functional",
        "entry_point": name,
        "asserts": _statements(assertion, ast.Assert),
        "setup": "\n".join(_statements(assertion, _IMPORTS)),
        "inputs": [one for one in inputs if _finite(one)],
        "reference": reference.strip(),
        "contract": text(row, "contract").strip(),
        "tolerance": float(tolerance) if isinstance(tolerance, int | float) and tolerance else None,
    }
    shown = _code(prompt).strip().strip('"').strip()
    return _made(
        f"{shown}\n\nThe function is `{name}`.", tests, reference, id=own_id("mbpp_plus", row.get("task_id"))
    )


# -- programs, and functions given as calls --------------------------------------------------------


class _TextOnly(pickle.Unpickler):
    """Reads plain values; whatever names a class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def private_cases(value: Any) -> list[Any]:
    """LiveCodeBench's hidden tests: JSON, or base64 of zlib of a pickled JSON text. Raises Dropped."""
    if not isinstance(value, str) or not value.strip():
        return []
    if not value.lstrip().startswith("["):
        try:
            reader = zlib.decompressobj()
            plain = reader.decompress(base64.b64decode(value, validate=True), _LARGEST)
            if reader.unconsumed_tail:
                raise Dropped("tests_too_large")
            value = _TextOnly(io.BytesIO(plain)).load()
        except (
            binascii.Error,
            zlib.error,
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            IndexError,
        ) as error:
            raise Dropped("bad_tests") from error
    return _list(decoded(value, "bad_tests"))


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Dropped("bad_tests")
    return value


def _json_lines(value: str) -> list[Any]:
    return [decoded(line, "bad_tests") for line in value.split("\n") if line.strip()]


def _livecodebench(row: Row) -> Made:
    found = _list(decoded(row.get("public_test_cases"), "bad_tests"))
    found = [*found, *private_cases(row.get("private_test_cases"))]
    if not all(isinstance(one, dict) and isinstance(one.get("input"), str) for one in found):
        raise Dropped("bad_tests")
    starter, facts = _code(text(row, "starter_code")), decoded(row.get("metadata") or "{}", "bad_metadata")
    prompt = needed(row, "question_content")
    rest = {
        "id": own_id("livecodebench", row.get("question_id")),
        "tags": labels(row.get("platform"), row.get("difficulty")),
    }
    name = facts.get("func_name") if isinstance(facts, dict) else None
    if name or any(one.get("testtype") == "functional" for one in found):
        if not isinstance(name, str) or not name:
            raise Dropped("no_entry_point")
        cases = [
            {"args": _json_lines(one["input"]), "expected": decoded(one["output"], "bad_tests")}
            for one in found
        ]
        entry = f"Solution.{name}" if "class Solution" in starter else name
        return _made(
            _started(prompt, starter), {"kind": "functional", "entry_point": entry, "cases": cases}, **rest
        )
    cases = [{"input": one["input"], "output": str(one.get("output", ""))} for one in found]
    return _made(prompt, {"kind": "stdio", "cases": cases}, **rest)


def _started(prompt: str, starter: str) -> str:
    return (
        f"{prompt.strip()}\n\nBegin with:\n\n```python\n{starter.rstrip()}\n```"
        if starter.strip()
        else prompt
    )


def _first_solution(value: Any) -> str:
    """The first of the solutions, a list or JSON of one; "" where there is none, as for some problems."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return ""
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""


def _lines(value: Any) -> str:
    """Input or output of a program: text, or lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else str(value)


def _apps(row: Row) -> Made:
    given = decoded(row.get("input_output") or "{}", "bad_tests")
    if not isinstance(given, dict):
        raise Dropped("bad_tests")
    inputs, outputs = _list(given.get("inputs")), _list(given.get("outputs"))
    if len(inputs) != len(outputs):
        raise Dropped("bad_tests")
    prompt, starter = needed(row, "question"), _code(text(row, "starter_code"))
    rest = {
        "id": own_id("apps", row.get("problem_id", row.get("id"))),
        "tags": labels(row.get("difficulty"), row.get("source")),
    }
    solution, name = _first_solution(row.get("solutions")), given.get("fn_name")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise Dropped("bad_tests")
        entry = f"Solution.{name}" if "class Solution" in (starter or solution) else str(name)
        cases = [{"args": arguments, "expected": expected} for arguments, expected in pairs]
        tests = {"kind": "functional", "entry_point": entry, "cases": cases, "wrapped": True}
        shown = _started(prompt, starter) if starter.strip() else f"{prompt}\n\nThe function is `{entry}`."
        return _made(shown, tests, solution, **rest)
    cases = [{"input": _lines(one), "output": _lines(other)} for one, other in pairs]
    limits = {"time_limit_s": _seconds(row.get("time_limit")), "memory_mb": _mb(row.get("memory_limit"))}
    return _made(prompt, {"kind": "stdio", "cases": cases, **limits}, solution, **rest)


_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(\w*)")
_MEGABYTES = {"": 1.0, "b": 2.0**-20, "bytes": 2.0**-20, "kb": 2.0**-10, "gb": 2.0**10}


def _seconds(value: Any) -> float | None:
    """2, 2.0, "2.0 seconds", "1500 ms", {"seconds": 2, "nanos": 0}."""
    if isinstance(value, dict):
        value = (value.get("seconds") or 0) + (value.get("nanos") or 0) / 1e9
    match = _AMOUNT.match(str(value))
    if match is None:
        return None
    amount = float(match.group(1)) / (1000 if match.group(2).startswith("m") else 1)
    return amount or None


def _mb(value: Any) -> int | None:
    """256, 256.0, "256.0 megabytes"."""
    match = _AMOUNT.match(str(value))
    if match is None:
        return None
    return int(float(match.group(1)) * _MEGABYTES.get(match.group(2).lower(), 1.0)) or None


def _pairs(value: Any) -> list[dict[str, str]]:
    """Cases as rows of input and output, or as columns of them."""
    value = decoded(value, "bad_tests")
    if isinstance(value, dict):
        inputs, outputs = _list(value.get("input")), _list(value.get("output"))
        if len(inputs) != len(outputs):
            raise Dropped("bad_tests")
        value = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    found = _list(value)
    if not all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in found):
        raise Dropped("bad_tests")
    return [{"input": _lines(one["input"]), "output": _lines(one["output"])} for one in found]


def _codeforces(row: Row) -> Made:
    if text(row, "interaction_format"):
        raise Dropped("interactive")
    if row.get("input_mode") not in (None, "", "stdio"):
        raise Dropped("reads_files")
    if row.get("executable") is False:
        raise Dropped("not_executable")
    shown = [f"# {text(row, 'title')}".strip(), needed(row, "description").strip()]
    for head, column in (("Input", "input_format"), ("Output", "output_format")):
        if part := text(row, column):
            shown.append(f"## {head}\n{part.strip()}")
    examples = _pairs(row.get("examples"))
    for one in examples:
        given, wanted = one["input"].strip(), one["output"].strip()
        shown.append(f"## Example\nInput:\n```\n{given}\n```\nOutput:\n```\n{wanted}\n```")
    if note := text(row, "note"):
        shown.append(f"## Note\n{note.strip()}")
    tests = {
        "kind": "stdio",
        "cases": _pairs(row.get("official_tests")) or examples,
        "checker": _code(text(row, "generated_checker")),
        "time_limit_s": _seconds(row.get("time_limit")),
        "memory_mb": _mb(row.get("memory_limit")),
    }
    rest = {"id": own_id("codeforces", row.get("id")), "tags": labels(*_list(row.get("tags")))}
    return _made("\n\n".join(shown), tests, **rest)


def _code_contests(row: Row) -> Made:
    if text(row, "input_file") or text(row, "output_file"):
        raise Dropped("reads_files")
    cases = [
        one
        for column in ("public_tests", "private_tests", "generated_tests")
        if row.get(column)
        for one in _pairs(row[column])
    ]
    size = row.get("memory_limit_bytes")
    tests = {
        "kind": "stdio",
        "cases": cases,
        "time_limit_s": _seconds(row.get("time_limit")),
        "memory_mb": size >> 20 if isinstance(size, int) and size > 0 else None,
    }
    return _made(needed(row, "description"), tests, id=own_id("code_contests", row.get("name")))


_HOW = {"stdin": "stdio", "stdin_stdout": "stdio", "functional": "functional", "function_call": "functional"}


def _listed(row: Row) -> Made:
    """`tests`: [{"input", "output", "type" or "testtype", "fn_name"}]."""
    found = _list(decoded(row.get("tests"), "bad_tests"))
    if not all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in found):
        raise Dropped("bad_tests")
    kinds = {_HOW.get(one.get("type") or one.get("testtype") or "stdin") for one in found}
    if len(kinds) != 1:
        raise Dropped("mixed_modalities" if kinds else "no_tests")
    prompt, starter = needed(row, "problem", "prompt", "question"), _code(text(row, "starter_code"))
    if kinds == {"functional"}:
        named = {one.get("fn_name") for one in found}
        name = next(iter(named))
        if len(named) != 1 or not isinstance(name, str):
            raise Dropped("no_entry_point")
        cases = [
            {"args": one["input"] if isinstance(one["input"], list) else _json_lines(str(one["input"]))}
            | {"expected": decoded(one["output"], "bad_tests")}
            for one in found
        ]
        entry = f"Solution.{name}" if "class Solution" in starter else name
        tests = {"kind": "functional", "entry_point": entry, "cases": cases, "wrapped": True}
        return _made(
            _started(prompt, starter) if starter else f"{prompt}\n\nThe function is `{entry}`.", tests
        )
    return _made(prompt, {"kind": "stdio", "cases": _pairs(found)}, _first_solution(row.get("solutions")))


def _is_listed(row: Row) -> bool:
    value = row["tests"]
    return (isinstance(value, list) and bool(value) and isinstance(value[0], dict)) or (
        isinstance(value, str) and value.lstrip().startswith("[{")
    )


LAYOUTS = (
    Layout(
        "humaneval", "code", ("task_id", "prompt", "entry_point", "canonical_solution", "test"), _humaneval
    ),
    Layout(
        "mbpp_plus",
        "code",
        ("task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input"),
        _mbpp_plus,
    ),
    Layout("mbpp", "code", ("task_id", "code", ("text", "prompt"), ("test_list", "test")), _mbpp),
    Layout(
        "livecodebench", "code", ("question_content", "public_test_cases", "starter_code"), _livecodebench
    ),
    Layout("apps", "code", ("question", "input_output", "solutions"), _apps),
    Layout("codeforces", "code", ("description", "input_format", "output_format", "examples"), _codeforces),
    Layout("code_contests", "code", ("description", "public_tests", "private_tests"), _code_contests),
    Layout("listed_tests", "code", ("tests", ("problem", "prompt", "question")), _listed, test=_is_listed),
)
