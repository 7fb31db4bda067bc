"""Reading tasksets: what is well formed is read whole, what is not is refused by place and name."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trivet.recipe import schema
from trivet.rewards import answers
from trivet.rewards.math import MathVerifier
from trivet.tasks import Taskset, TasksetError, load_tasks, readers
from trivet.types import Message, Scored, ToolCall

SHARED = Path(os.environ.get("TRIVET_SHARED", Path(__file__).parents[2].parent / "shared"))
MATH = SHARED / "data" / "math"
ROWS = [{"prompt": f"question {i}", "answer": str(i), "kind": i % 2} for i in range(10)]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def load(source: object, **options: Any) -> Taskset:
    return load_tasks(schema.Tasks(source=str(source), **{"shuffle": False, **options}))


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "c.json").write_text(json.dumps(ROWS, indent=1))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    sets = [load(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet")]
    assert [one.name for one in sets] == ["a", "b", "c", "d"]
    assert len({one.fingerprint for one in sets}) == 1
    for one in sets:
        assert [task.messages[0].text for task in one.tasks] == [row["prompt"] for row in ROWS]
        assert [task.payload for task in one.tasks] == [{"answer": row["answer"]} for row in ROWS]
        assert [task.id for task in one.tasks] == [task.id for task in sets[0].tasks]


def test_globs_and_order(tmp_path: Path) -> None:
    write(tmp_path / "2.jsonl", ROWS[5:])
    write(tmp_path / "1.jsonl", ROWS[:5])
    both = load(tmp_path / "*.jsonl", name="both")
    assert [task.payload["answer"] for task in both.tasks] == [str(i) for i in range(10)]
    part = load(tmp_path / "*.jsonl", skip=3, limit=4)
    assert [task.payload["answer"] for task in part.tasks] == ["3", "4", "5", "6"]


def test_shuffle_is_seeded_and_after_skip_and_limit(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ROWS)

    def answers(seed: int) -> list[str]:
        config = schema.Tasks(source=source, skip=2, limit=6)
        return [task.payload["answer"] for task in load_tasks(config, seed=seed).tasks]

    assert answers(1) == answers(1)
    assert len({tuple(answers(seed)) for seed in range(5)}) > 1
    assert sorted(answers(1)) == ["2", "3", "4", "5", "6", "7"]


def test_fingerprint_follows_content_not_order_or_place(tmp_path: Path) -> None:
    first = load(write(tmp_path / "a.jsonl", ROWS)).fingerprint
    (tmp_path / "sub").mkdir()
    assert load(write(tmp_path / "sub" / "b.jsonl", ROWS[::-1])).fingerprint == first
    changed = [{**ROWS[0], "answer": "other"}, *ROWS[1:]]
    assert load(write(tmp_path / "c.jsonl", changed)).fingerprint != first


def test_mapping_template_and_tags(tmp_path: Path) -> None:
    rows = [{"q": "two?", "key": 7, "meta": {"gold": [1, 2]}, "hint": "think"}]
    source = write(tmp_path / "a.jsonl", rows)
    (task,) = load(
        source,
        fields={"prompt": "q", "id": "key", "payload.tests": "meta.gold"},
        template="{hint}: {prompt}\nIn \\boxed{}, {{hint}}.",
        tags=["t"],
        licence="MIT",
        env="callable",
    ).tasks
    assert task.id == "7"
    assert task.messages == (Message("user", "think: two?\nIn \\boxed{}, {hint}."),)
    assert task.payload == {"tests": [1, 2]}
    assert (task.tags, task.licence, task.env) == (("t",), "MIT", "callable")


def test_conversations_and_responses(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "assistant", "content": "three"},
    ]
    (task,) = load(write(tmp_path / "a.jsonl", [{"messages": messages}])).tasks
    assert [m.role for m in task.messages] == ["user", "assistant", "tool", "assistant"]
    assert task.messages[1].tool_calls == (ToolCall("f", {"a": 1}, "c"),)
    (task,) = load(write(tmp_path / "b.jsonl", [{"prompt": "hi", "response": "hello"}])).tasks
    assert task.payload == {"response": "hello"}


def test_well_known_shapes(tmp_path: Path) -> None:
    gsm = [{"question": "q", "answer": "6*7=<<6*7=42>>42 eggs\n#### 1,042"}]
    (task,) = load(write(tmp_path / "a.jsonl", gsm)).tasks
    assert task.payload == {"answer": "1,042", "response": "6*7=42 eggs\n\\boxed{1,042}"}
    solved = [{"problem": "p", "solution": r"so $\boxed{\frac12}$."}, {"problem": "r", "solution": "hm"}]
    found = load(write(tmp_path / "b.jsonl", solved))
    assert [task.payload["answer"] for task in found.tasks] == [r"\frac12"]
    assert found.tasks[0].payload["response"] == solved[0]["solution"]
    assert found.dropped == {"no_answer": 1}


def test_a_row_without_the_solution_is_dropped_and_counted(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.jsonl", [{"problem": "p", "solution": r"\boxed{1}"}, {"problem": "r"}]))
    assert [task.payload["answer"] for task in found.tasks] == ["1"]
    assert found.dropped == {"no_answer": 1}


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", json.dumps(ROWS[0])), ("b.json", json.dumps(ROWS[:1]))):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load(tmp_path / name).tasks[0].messages[0].text == "question 0"


def test_half_a_surrogate_pair_does_no_harm(tmp_path: Path) -> None:
    rows = [{"prompt": "odd \ud800", "answer": "1"}, {"prompt": "q", "answer": "\udfff"}]
    named = [{**row, "id": str(i)} for i, row in enumerate(rows)]
    assert len(load(write(tmp_path / "a.jsonl", rows))) == 2
    assert len(load(write(tmp_path / "b.jsonl", named), fields={"id": "id"})) == 2


def test_a_taskset_has_one_name(tmp_path: Path) -> None:
    """What the monitor files its metrics under is what `until` is checked against."""
    config = schema.Tasks(source=write(tmp_path / "a.json.jsonl", ROWS))
    assert load_tasks(config).name == config.label


def test_equal_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.jsonl", [*ROWS, ROWS[3]]))
    assert len(found) == 10
    assert found.dropped == {"duplicate": 1}


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, "it is empty"),
        ([{"x": 1}], {}, r"which column is the prompt\?.*columns: x"),
        ([{"qestion": "q"}], {"fields": {"prompt": "question"}}, "did you mean 'qestion'"),
        ([{"prompt": "q"}], {"fields": {"promt": "prompt"}}, "did you mean 'prompt'"),
        ([{"prompt": "q"}, {"answer": "a"}], {}, r"a.jsonl:2: column 'prompt' .* missing in this row"),
        ([{"prompt": "q", "answer": "1"}, {"prompt": "r"}], {}, r"a.jsonl:2: column 'answer'"),
        ([{"prompt": 3}], {}, r"a.jsonl:1: column 'prompt' .* is a int; it must be text"),
        ([{"prompt": " "}], {}, "empty"),
        ([{"prompt": None}], {}, "empty"),
        ([{"prompt": "q"}, ["prompt"]], {}, r"a.jsonl:2: a row is an object"),
        ([["prompt"]], {}, r"a.jsonl\[0\]: a row is an object"),
        ([{"prompt": "q", "response": None}], {}, "our response"),
        ([{"prompt": "q", "id": 1.5}], {"fields": {"id": "id"}}, "text or a whole number"),
        (
            [{"prompt": "q", "id": "a"}, {"prompt": "r", "id": "b"}, {"prompt": "s", "id": "a"}],
            {"fields": {"id": "id"}},
            r"id 'a' stands at .*a.jsonl:1 and at .*a.jsonl:3",
        ),
        ([{"prompt": "q"}], {"template": "{promt}"}, "did you mean 'prompt'"),
        (
            [{"prompt": "q", "answer": "1"}],
            {"template": r"{prompt} \boxed{answer}"},
            "show the policy the answer",
        ),
        ([{"prompt": "q", "m": None}], {"template": "{prompt} {m}"}, "holds NoneType"),
        (
            [{"problem": "p", "solution": r"\boxed{1}"}],
            {"template": "{prompt} {solution}"},
            "show the policy the answer",
        ),
        ([{"prompt": "q", "answer": ""}], {}, r"no task is left \(dropped: no_answer: 1\)"),
        ([{"prompt": "q", "answer": " \n"}], {}, r"no task is left \(dropped: no_answer: 1\)"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}],
            {},
            r"a.jsonl:1: message 0: content part type 'input_text' is not one of",
        ),
        (
            [{"messages": [{"role": "user", "content": ["x"]}]}],
            {},
            "content part must be an object, not a str",
        ),
        (
            [{"messages": [{"role": "assistant", "tool_calls": [{"arguments": {}}]}]}],
            {},
            "tool call: 'name' is missing",
        ),
        ([{"prompt": "q"}], {"skip": 5}, "skip=5 leaves no row"),
        ([{"prompt": "q"}], {"args": {"size": 3}}, "args are for generated"),
        ([{"messages": "hi"}], {}, "list of messages"),
        ([{"messages": [{"role": "bot", "content": "x"}]}], {}, r"a.jsonl:1: message 0: message role 'bot'"),
        ([{"messages": [{"content": "x"}]}], {}, "without a role"),
        ([{"messages": [{"role": "user", "text": "x"}]}], {}, "unknown key"),
        (
            [{"messages": [{"role": "user", "content": "x"}]}],
            {"template": "say {prompt}"},
            "template is for prompts",
        ),
    ],
)
def test_malformed_data_is_refused_by_place(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], words: str
) -> None:
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(TasksetError, match=words):
        load(source, **options)


def test_broken_files(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, words: str) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TasksetError, match=words):
            load(path)

    refused("a.jsonl", b'{"prompt": "q"}\n{"prompt": \n', r"a.jsonl:2: not JSON")
    refused("b.json", b'[{"prompt": "q"},\n {]', r"b.json: not JSON at line 2")
    refused("c.jsonl", b"\xff\xfe\x00", "not UTF-8")
    refused("d.parquet", b"not parquet at all", "not a Parquet file")
    refused("e.jsonl.gz", b"not gzip", "cannot be read")
    whole = gzip.compress(json.dumps(ROWS[0]).encode() * 50)
    refused("f.jsonl.gz", whole[: len(whole) // 2], "cannot be read")
    refused("g.csv", b"prompt\nq\n", "unknown kind of file")
    refused("h.jsonl", b'{"prompt": "q", "answer": ' + b"9" * 5000 + b"}", r"h.jsonl:1: Exceeds the limit")
    with pytest.raises(TasksetError, match=r"did you mean 'a\.jsonl'"):
        load(tmp_path / "aa.jsonl")
    with pytest.raises(TasksetError, match="no file matches"):
        load(tmp_path / "*.nothing")
    with pytest.raises(TasksetError, match="is a directory"):
        load(tmp_path)


def test_a_hub_that_is_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port nobody listens on: the libraries alone would retry for half a minute, for each of the two."""
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    readers._hub_problem.cache_clear()
    begin = time.monotonic()
    try:
        for name in ("nobody/no-such-set", "nobody/another"):
            with pytest.raises(TasksetError, match=r"no file here.*127\.0\.0\.1:9.*Give a local file"):
                load(name)
    finally:
        readers._hub_problem.cache_clear()
    assert time.monotonic() - begin < 10
    assert constants.HF_HUB_OFFLINE is False  # the switch is put back


@pytest.mark.slow
def test_a_hub_that_is_out_of_reach() -> None:
    """Asked in another process, since the library reads its offline switch when it is imported."""
    code = (
        "from trivet.recipe.schema import Tasks; from trivet.tasks import load_tasks, TasksetError\n"
        "try: load_tasks(Tasks(source='nobody/no-such-set', split='train'))\n"
        "except TasksetError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "'nobody/no-such-set' is no file here" in done.stdout


def test_real_gsm8k_scores_itself() -> None:
    """Every gold answer reads, and scores 1 against its own worked solution; without algebra."""
    if not (MATH / "gsm8k").is_dir():
        pytest.skip("no GSM8K here")
    for split, count in (("train", 7473), ("test", 1319)):
        taskset = load(MATH / "gsm8k" / f"{split}.jsonl")
        assert len(taskset) == count
        assert taskset.dropped == {}
        _all_score_one(taskset, algebra=False)


def test_real_math_scores_itself() -> None:
    if not (MATH / "math_test_5000").is_dir():
        pytest.skip("no MATH here")
    taskset = load(MATH / "math_test_5000" / "math_test.json")
    assert len(taskset) == 5000
    _all_score_one(taskset, algebra=False)
    named = load(MATH / "math500" / "math500_stripped.jsonl")
    assert len(named) == 500


@pytest.mark.slow
def test_real_math_answers_are_read_by_the_algebra() -> None:
    """All gold answers of MATH-500 parse, equal themselves, and none is refused as too large."""
    if not (MATH / "math500").is_dir():
        pytest.skip("no MATH-500 here")
    golds = [task.payload["answer"] for task in load(MATH / "math500" / "math500_stripped.jsonl").tasks]
    forms = [answers.normalise(gold) for gold in golds]
    assert [form for form in forms if answers.too_large(form)] == []

    async def check() -> list[str]:
        async with MathVerifier() as verifier:
            outcomes = await asyncio.gather(*(verifier.pool.call(form, form) for form in forms))
            return [f for f, o in zip(forms, outcomes, strict=True) if not (o.value or {}).get("equal")]

    assert asyncio.run(check()) == []


def _all_score_one(taskset: Taskset, *, algebra: bool) -> None:
    async def check() -> list[str]:
        async with MathVerifier() as verifier:
            wrong = []
            for task in taskset.tasks:
                reward = await verifier.verify(task.payload["response"], task.payload["answer"])
                if not (isinstance(reward, Scored) and reward.value == 1.0):
                    wrong.append(f"{task.payload['answer']}: {reward}")
            assert bool(verifier.pool.alive()) == algebra
            return wrong

    assert asyncio.run(check()) == []
