"""The usual layouts: recognised by their columns, read whole, odd rows dropped by cause."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.data.preference import pair_messages
from trivet.recipe import schema
from trivet.tasks import Taskset, TasksetError, load_tasks
from trivet.tasks.layouts import (
    FUNCTIONAL_PROMPT,
    LAYOUTS,
    STDIO_PROMPT,
    Dropped,
    hub_defaults,
    layout_names,
    recognise,
)
from trivet.tasks.layouts.code import called, private_cases


def load(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Taskset:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_tasks(schema.Tasks(source=str(path), **{"shuffle": False, **options}))


REAL = {
    "math/gsm8k/train.jsonl": ("gsm8k", "math", 7473, {}),
    "math/gsm8k/test.jsonl": ("gsm8k", "math", 1319, {}),
    "math/math500/math500.jsonl": ("math", "math", 500, {}),
    "math/math500/math500_stripped.jsonl": ("math", "math", 500, {}),
    "math/math_test_5000/math_test.json": ("math", "math", 5000, {}),
    "math/svamp_gsmhard/svamp_test.json": ("svamp", "math", 1000, {}),
    "code/humaneval/HumanEval.jsonl.gz": ("humaneval", "code", 164, {}),
    "code/mbpp/mbpp.jsonl": ("mbpp", "code", 974, {}),
    "code/mbpp/mbpp_test.jsonl": ("mbpp", "code", 500, {}),
    "code/mbpp_plus/MbppPlus.jsonl": ("mbpp_plus", "code", 378, {}),
    "if/ifeval/ifeval_input_data.jsonl": ("ifeval", "instruct", 541, {}),
    "if/ifbench/IFBench_test.jsonl": ("ifbench", "instruct", 294, {"unsupported_instruction": 6}),
    "chat/arena_hard/arena_hard_v0.1_question.jsonl": ("arena_hard", "chat", 500, {}),
    "chat/arena_hard/arena_hard_v2.0_question.jsonl": ("arena_hard", "chat", 750, {}),
    "preference/hh_rlhf/harmless_base_test.jsonl.gz": ("hh_rlhf", "chat", 2308, {"empty_answer": 4}),
    "preference/llamafactory_dpo_kto/dpo_en_demo.json": (
        "conversation_pairs",
        "chat",
        295,
        {"duplicate": 5},
    ),
    "preference/llamafactory_dpo_kto/v1_dpo_demo.jsonl": ("message_pairs", "chat", 10, {}),
    "preference/open_instruct_synth_pref/honesty-full.jsonl": ("judged_completions", "chat", 2, {}),
}
SHARED = Path(os.environ.get("TRIVET_SHARED", Path(__file__).parents[2].parent / "shared"))


@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str) -> None:
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"no {path}")
    taskset = load_tasks(schema.Tasks(source=str(path), shuffle=False))
    layout, env, count, dropped = REAL[name]
    assert (taskset.layout, taskset.layout_env) == (layout, env)
    assert (len(taskset), taskset.dropped) == (count, dropped)
    if env == "code":
        for task in taskset.tasks:
            tests = task.payload["tests"]
            assert tests["kind"] == "functional"
            assert f"def {tests['entry_point']}" in task.payload["response"]
            assert tests.get("asserts") or tests.get("check")
            assert [m.role for m in task.messages] == ["system", "user"]
            assert tests["entry_point"] in task.messages[1].text


def test_every_name_is_recognised_by_some_row() -> None:
    assert len(layout_names()) == len({layout.name for layout in LAYOUTS})
    assert recognise({"question": "q", "answer": "plain"}) is None
    assert recognise({}) is None
    assert {layout.env for layout in LAYOUTS} == {"math", "code", "instruct", "qa", "chat"}


def test_a_mapping_goes_before_any_layout(tmp_path: Path) -> None:
    row = {"Body": "A cat", "Question": "sits?", "Answer": 3.0, "Type": "Sum"}
    assert load(tmp_path, [row]).tasks[0].messages[0].text == "A cat. sits?"
    assert load(tmp_path, [row]).tasks[0].payload == {"answer": 3}
    mapped = load(tmp_path, [row], fields={"prompt": "Question", "answer": "Answer"})
    assert (mapped.layout, mapped.tasks[0].messages[0].text) == ("", "sits?")
    templated = load(tmp_path, [row], template="{prompt} Box it.")
    assert templated.tasks[0].messages[0].text == "A cat. sits? Box it."


def test_aime(tmp_path: Path) -> None:
    rows = [
        {"ID": "2031-I-1", "Problem": "p", "Solution": "s", "Answer": 33},
        {"ID": "2031-I-2", "Problem": "r", "Solution": "s", "Answer": None},
    ]
    taskset = load(tmp_path, rows)
    assert (taskset.layout, taskset.dropped) == ("aime", {"no_answer": 1})
    assert taskset.tasks[0].id == "aime/2031-I-1"
    assert taskset.tasks[0].payload == {"answer": 33, "response": "s"}
    lower = load(tmp_path, [{"problem_idx": 1, "problem": "p", "answer": 7}])
    assert (lower.layout, lower.tasks[0].payload) == ("aime", {"answer": 7})


def test_humaneval_keeps_helpers_and_hides_nothing_else(tmp_path: Path) -> None:
    prompt = "import math\n\ndef helper(x):\n    return x\n\ndef area(r):\n    '''of a circle'''\n"
    row = {
        "task_id": "HumanEval/900",
        "prompt": prompt,
        "entry_point": "area",
        "canonical_solution": "    return math.pi * helper(r) ** 2\n",
        "test": "def check(candidate):\n    assert candidate(0) == 0\n",
    }
    taskset = load(tmp_path, [row, {**row, "task_id": "HumanEval/901", "entry_point": "volume"}])
    assert taskset.dropped == {"no_entry_point": 1}
    (task,) = taskset.tasks
    tests = task.payload["tests"]
    assert tests["setup"] == "import math\n\ndef helper(x):\n    return x"
    assert (task.id, tests["entry_point"]) == ("humaneval/900", "area")
    assert "math.pi" not in task.messages[1].text and task.messages[0].text == FUNCTIONAL_PROMPT
    space: dict[str, Any] = {}
    exec(task.payload["response"].removeprefix("```python\n").removesuffix("\n```"), space)
    exec(tests["check"], space)
    space["check"](space["area"])


def test_mbpp_shows_one_test(tmp_path: Path) -> None:
    row = {
        "task_id": 3,
        "text": "Write a function to double.",
        "code": "def helper(x):\r\n  return x\r\ndef double(x):\r\n  return 2 * helper(x)",
        "test_list": ["assert double(2) == 4", "assert double(int(3)) == 6"],
        "test_setup_code": "",
    }
    taskset = load(tmp_path, [row, {**row, "task_id": 4, "test_list": []}])
    assert (taskset.layout, taskset.dropped) == ("mbpp", {"no_tests": 1})
    shown = taskset.tasks[0].messages[1].text
    assert "assert double(2) == 4" in shown and "double(int(3))" not in shown
    assert taskset.tasks[0].payload["tests"]["entry_point"] == "double"
    assert "\r" not in taskset.tasks[0].payload["response"]


def test_mbpp_setup_that_needs_the_program(tmp_path: Path) -> None:
    row = {"task_id": 5, "text": "Depth.", "code": "class N: ...\ndef depth(n): return 1"}
    row |= {"test_list": ["assert depth(a) == 1"], "test_setup_code": "import re\r\na = N()"}
    tests = load(tmp_path, [row]).tasks[0].payload["tests"]
    assert tests["asserts"] == ["import re\na = N()\nassert depth(a) == 1"] and "setup" not in tests
    tests = load(tmp_path, [{**row, "test_setup_code": "import re"}]).tasks[0].payload["tests"]
    assert (tests["asserts"], tests["setup"]) == (row["test_list"], "import re")


def test_the_function_asserts_are_about() -> None:
    assert called(["assert sorted(f(g(1))) == [2]"], "def f(x): ...\ndef g(x): ...") == "f"
    assert called(["assert set(h(1)) == {1}"]) == "h"
    assert called(["not python ("]) is None
    assert called(["assert max(1, 2) == 2"], "") is None


LCB = {
    "question_title": "t",
    "question_content": "Print twice the number.",
    "question_id": "77_A",
    "platform": "somewhere",
    "difficulty": "easy",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "private_test_cases": "[]",
    "metadata": "{}",
}


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def test_livecodebench(tmp_path: Path) -> None:
    hidden = [{"input": "5\n", "output": "10\n", "testtype": "stdin"}]
    function = {
        **LCB,
        "question_id": "78",
        "starter_code": "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        ",
        "metadata": json.dumps({"func_name": "add"}),
        "public_test_cases": json.dumps([{"input": "1\n[2, 3]", "output": "6", "testtype": "functional"}]),
    }
    rows = [
        {**LCB, "private_test_cases": packed(hidden)},
        function,
        {**LCB, "question_id": "79", "private_test_cases": "@@"},
        {**function, "question_id": "80", "metadata": "{}"},
        {**LCB, "question_id": "81", "public_test_cases": "[]"},
    ]
    taskset = load(tmp_path, rows)
    assert (taskset.layout, taskset.dropped) == (
        "livecodebench",
        {"bad_tests": 1, "no_entry_point": 1, "no_tests": 1},
    )
    program, method = taskset.tasks
    assert program.payload["tests"] == {
        "kind": "stdio",
        "cases": [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10\n"}],
    }
    assert program.messages[0].text == STDIO_PROMPT and program.tags == ("somewhere", "easy")
    assert method.payload["tests"] == {
        "kind": "functional",
        "entry_point": "Solution.add",
        "cases": [{"args": [1, [2, 3]], "expected": 6}],
    }
    assert "class Solution" in method.messages[1].text


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/trivet-must-not-exist",))


def test_hidden_tests_run_no_code() -> None:
    value = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
    with pytest.raises(Dropped, match="bad_tests"):
        private_cases(value)
    assert not Path("/tmp/trivet-must-not-exist").exists()


def outcome(function: Callable[[Any], Any], argument: Any) -> str:
    """The kind of what it gives, or the cause it drops it for."""
    try:
        return type(function(argument)).__name__
    except Dropped as cause:
        return str(cause)


@given(st.text(max_size=60))
def test_hidden_tests_of_any_text(value: str) -> None:
    assert outcome(private_cases, value) in ("list", "bad_tests", "tests_too_large")


def test_apps_and_taco(tmp_path: Path) -> None:
    row = {
        "problem_id": 5,
        "question": "Double it.",
        "solutions": json.dumps(["print(2 * int(input()))"]),
        "input_output": json.dumps({"inputs": ["2\n", ["3", "4"]], "outputs": ["4\n", "6"]}),
        "difficulty": "interview",
        "starter_code": "",
        "time_limit": "2.5 seconds",
        "memory_limit": "256.0 megabytes",
    }
    calls = {"inputs": [[2], [3]], "outputs": [[4], [6]], "fn_name": "double"}
    rows = [
        row,
        {**row, "problem_id": 6, "solutions": "", "input_output": json.dumps(calls)},
        {**row, "problem_id": 7, "input_output": ""},
        {**row, "problem_id": 8, "input_output": '{"inputs": ["1"], "outputs": []}'},
        {**row, "problem_id": 9, "input_output": "{"},
        {**row, "problem_id": 10, "question": " "},
    ]
    taskset = load(tmp_path, rows)
    assert (taskset.layout, taskset.dropped) == ("apps", {"no_tests": 1, "bad_tests": 2, "no_prompt": 1})
    program, function = (task.payload for task in taskset.tasks)
    assert program["tests"]["cases"][1] == {"input": "3\n4", "output": "6"}
    assert (program["tests"]["time_limit_s"], program["tests"]["memory_mb"]) == (2.5, 256)
    assert program["response"] == "```python\nprint(2 * int(input()))\n```"
    assert function["tests"]["entry_point"] == "double" and function["tests"]["wrapped"] is True
    assert function["tests"]["cases"][0] == {"args": [2], "expected": [4]} and "response" not in function


def test_codeforces_and_contests(tmp_path: Path) -> None:
    row = {
        "id": "9999/A",
        "title": "Doubling",
        "description": "Double it.",
        "input_format": "A number.",
        "output_format": "Twice the number.",
        "interaction_format": None,
        "input_mode": "stdio",
        "note": None,
        "examples": [{"input": "1", "output": "2"}],
        "official_tests": [{"input": "4", "output": "8"}],
        "time_limit": 1.0,
        "memory_limit": 64.0,
        "generated_checker": "import sys",
        "tags": ["maths"],
    }
    odd = [{**row, "interaction_format": "ask"}, {**row, "input_mode": "file"}, {**row, "official_tests": 3}]
    taskset = load(tmp_path, [row, *odd])
    assert taskset.dropped == {"interactive": 1, "reads_files": 1, "bad_tests": 1}
    (task,) = taskset.tasks
    assert task.payload["tests"] == {
        "kind": "stdio",
        "cases": [{"input": "4", "output": "8"}],
        "checker": "import sys",
        "time_limit_s": 1.0,
        "memory_mb": 64,
    }
    assert "## Example" in task.messages[1].text and task.tags == ("maths",)
    contest = {
        "name": "9_A",
        "description": "Double it.",
        "public_tests": {"input": ["1"], "output": ["2"]},
        "private_tests": {"input": ["3"], "output": ["6"]},
        "generated_tests": {"input": [], "output": []},
        "time_limit": {"seconds": 1, "nanos": 500_000_000},
        "memory_limit_bytes": 1 << 28,
    }
    (task,) = load(tmp_path, [contest]).tasks
    assert task.payload["tests"]["time_limit_s"] == 1.5 and task.payload["tests"]["memory_mb"] == 256
    assert [one["input"] for one in task.payload["tests"]["cases"]] == ["1", "3"]


def test_listed_tests(tmp_path: Path) -> None:
    call = {"fn_name": "f", "type": "function_call", "input": [1], "output": [2]}
    rows = [
        {"problem": "p", "tests": json.dumps([{"input": "1", "output": "2", "type": "stdin_stdout"}])},
        {"problem": "q", "tests": [call]},
        {"problem": "r", "tests": [call, {"input": "1", "output": "2"}]},
    ]
    taskset = load(tmp_path, rows)
    assert (taskset.layout, taskset.dropped) == ("listed_tests", {"mixed_modalities": 1})
    assert [task.payload["tests"]["kind"] for task in taskset.tasks] == ["stdio", "functional"]
    assert load(tmp_path, [{"prompt": "p", "tests": "a text", "answer": "1"}]).layout == ""


def test_instructions(tmp_path: Path) -> None:
    row = {
        "key": 1,
        "prompt": "Say hello without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"relation": None}],
    }
    rows = [row, {**row, "key": 2, "kwargs": []}, {**row, "key": 3, "instruction_id_list": []}]
    taskset = load(tmp_path, rows)
    assert (taskset.layout, taskset.dropped) == ("ifeval", {"bad_instructions": 1, "no_instructions": 1})
    (task,) = taskset.tasks
    assert task.payload["kwargs"] == [{}] and task.id == "ifeval/1"
    assert load(tmp_path, [{**row, "instruction_id_list": ["count:numbers"]}]).layout == "ifbench"


def test_multiple_choice(tmp_path: Path) -> None:
    mmlu = {"question": "Which is a fruit?", "choices": ["stone", "plum"], "answer": 1, "subject": "food"}
    taskset = load(tmp_path, [mmlu, {**mmlu, "answer": 2}])
    assert (taskset.layout, taskset.layout_env, taskset.dropped) == ("mmlu", "qa", {"no_answer": 1})
    assert taskset.tasks[0].messages[0].text == "Which is a fruit?\n\nA. stone\nB. plum"
    assert taskset.tasks[0].payload["answer"] == "B" and taskset.tasks[0].payload["match"] == "choice"
    arc = {"question": "q", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": "2"}
    assert load(tmp_path, [arc]).tasks[0].payload["answer"] == "B"


USER = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_preferences(tmp_path: Path) -> None:
    battle = {"question_id": "b", "winner": "model_b", "language": "English"}
    battle |= {"conversation_a": [USER, said("a")], "conversation_b": [USER, said("b")]}
    rows = [
        battle,
        {**battle, "winner": "tie"},
        {**battle, "winner": "?"},
        {**battle, "conversation_a": [USER, said("b")]},
        {**battle, "conversation_b": [USER, said(" ")]},
    ]
    taskset = load(tmp_path, rows)
    assert taskset.layout == "arena_battles"
    assert taskset.dropped == {"tie": 1, "no_winner": 1, "same_answers": 1, "empty_answer": 1}
    chosen, rejected = pair_messages(taskset.tasks[0])
    assert (chosen[-1].text, rejected[-1].text) == ("b", "a")

    old = {"id": 4, "prompt": '["hi", "more"]', "response_a": '["a", "x"]', "response_b": '["b", "y"]'}
    old |= {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}
    (task,) = load(tmp_path, [old]).tasks
    assert task.payload == {"chosen": "a", "rejected": "b"} and len(task.messages) == 1

    helpful = {"context": [USER, said("ok"), USER], "response1": "1", "response2": "2"}
    taskset = load(
        tmp_path,
        [
            {**helpful, "overall_preference": -2},
            {**helpful, "overall_preference": 0},
            helpful | {"overall_preference": 1},
        ],
    )
    assert (taskset.layout, taskset.dropped) == ("helpsteer3", {"tie": 1})
    assert [(t.payload["chosen"], t.payload["margin"]) for t in taskset.tasks] == [("1", 2.0), ("2", 1.0)]
    assert [m.role for m in taskset.tasks[0].messages] == ["user", "assistant", "user"]

    hh = {"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"}
    taskset = load(tmp_path, [hh, {**hh, "rejected": hh["chosen"]}, {**hh, "rejected": "nothing"}])
    assert (taskset.layout, taskset.dropped) == ("hh_rlhf", {"same_answers": 1, "bad_messages": 1})


def test_ids_that_differ_in_content(tmp_path: Path) -> None:
    row = {"uid": "1", "category": "c", "cluster": "d", "prompt": "p"}
    assert load(tmp_path, [row, row]).dropped == {"duplicate": 1}
    with pytest.raises(TasksetError, match="ids must differ"):
        load(tmp_path, [row, {**row, "prompt": "q"}])


def test_hub_names() -> None:
    assert hub_defaults("openai/gsm8k", None, "test") == ("main", "test")
    assert hub_defaults("openai/openai_humaneval", None, "train") == (None, "test")
    assert hub_defaults("a/b", None, "train") == (None, "train")
    assert hub_defaults("openai/gsm8k", "socratic", "train") == ("socratic", "train")


OPTIONAL = [
    *("tags", "test_imports", "test_list", "metadata", "private_test_cases", "time_limit", "memory_limit"),
    *("solutions", "starter_code", "official_tests", "generated_tests", "memory_limit_bytes", "atol", "id"),
    *("assertion", "prompt", "text", "question_id", "subcategory", "winner_model_b", "winner_tie", "key"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=500)
@given(st.data())
def test_odd_rows_are_dropped_and_nothing_else(data: st.DataObject) -> None:
    """Whatever the columns of a known layout hold, a row becomes a task or is dropped with a cause."""
    layout = data.draw(st.sampled_from([one for one in LAYOUTS if one.make is not None]))
    names = [name if isinstance(name, str) else name[0] for name in layout.columns]
    more = data.draw(st.lists(st.sampled_from(OPTIONAL), max_size=6))
    row = {name: data.draw(JSON) for name in [*names, *more]}
    row |= dict.fromkeys(data.draw(st.sets(st.sampled_from(names))), "text")
    assert layout.make is not None
    if layout.fits(row):
        assert outcome(layout.make, row).isidentifier()
