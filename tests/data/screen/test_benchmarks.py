"""Benchmarks from files, by recipe or by named fields; nothing of a file is left out unsaid."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from trivet.data.read import BadRow, SourceError
from trivet.data.screen.benchmarks import RECIPES, BenchmarkError, load_benchmark


def write(path: Path, rows: list[Any]) -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    return str(path)


def test_all_the_usual_benchmarks_have_a_recipe() -> None:
    wanted = (
        "aime hmmt math_500 gpqa gsm8k hle ifeval ifbench humaneval mbpp livecodebench swe_bench "
        "terminal_bench tau2 mcp_atlas sealqa multi_challenge hle_verified browsecomp advanced_if "
        "arena_hard frontier_science"
    )
    assert set(wanted.split()) <= set(RECIPES)
    assert all(recipe.question for recipe in RECIPES.values())


@pytest.mark.parametrize("name", ["MATH-500", "math_500", "Math500"])
def test_names_as_people_write_them(name: str) -> None:
    assert load_benchmark(name, rows=[{"problem": "p"}]).items[0].label == f"{name}/1"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_questions_and_answers(tmp_path: Path, name: str) -> None:
    source = write(
        tmp_path / name, [{"question": "How many?", "answer": "Two."}, {"question": "Why?", "answer": ""}]
    )
    benchmark = load_benchmark("gsm8k", source)
    assert [(item.label, item.texts) for item in benchmark.items] == [
        ("gsm8k/1", ("How many?",)),
        ("gsm8k/1:answer", ("Two.",)),
        ("gsm8k/2", ("Why?",)),
    ]
    assert benchmark.rows == 2
    assert benchmark.items[2].place.endswith(f"{name}:2")


def test_rows_that_give_no_item_are_counted_with_their_places(tmp_path: Path) -> None:
    rows = [{"problem": "p"}, {"problem": "  "}, "{broken", {"problem": None}, {"other": 1}, [1]]
    benchmark = load_benchmark("math_500", write(tmp_path / "m.jsonl", rows))
    assert len(benchmark.items) == 1 and benchmark.rows == 6
    assert benchmark.skipped == {
        "empty_question": 1,
        "broken_json": 1,
        "no_question_field": 2,
        "not_an_object": 1,
    }
    assert [place.rpartition(":")[2] for _, place in benchmark.places] == ["2", "3", "4", "5", "6"]


def test_parquet_and_an_array_of_json(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["one", "two"], "key": [7, 8]}), tmp_path / "i.parquet")
    (tmp_path / "i.json").write_text('[{"prompt": "one", "key": 7},\n {"prompt": "two", "key": 8}]')
    for name in ("i.parquet", "i.json"):
        items = load_benchmark("ifeval", str(tmp_path / name)).items
        assert [(item.id, item.texts) for item in items] == [("7", ("one",)), ("8", ("two",))]


def test_ids_are_made_unique() -> None:
    rows = [{"id": "x", "question": "a"}, {"id": "x", "question": "b"}, {"id": "", "question": "c"}]
    assert [item.id for item in load_benchmark("sealqa", rows=rows).items] == ["x", "x#2", "3"]


@pytest.mark.parametrize(
    ("name", "row", "texts"),
    [
        (
            "tau2",
            {
                "user_scenario": {
                    "instructions": {
                        "reason_for_call": "lost",
                        "task_instructions": "insist",
                        "known_info": "x",
                    }
                }
            },
            ("lost", "insist"),
        ),
        ("tau2", {"user_scenario": {"instructions": "just text"}}, ("just text",)),
        ("arena_hard", {"turns": [{"content": "write a poem"}]}, ("write a poem",)),
        (
            "multi_challenge",
            {
                "CONVERSATION": [
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "said"},
                    {"role": "user", "content": "two"},
                ]
            },
            ("one", "two"),
        ),
        (
            "advanced_if",
            {"conversation_history": json.dumps([{"role": r, "content": r[0]} for r in ("system", "user")])},
            ("u",),
        ),
        ("mcp_atlas", {"TASK": "t1", "PROMPT": "find it"}, ("find it",)),
        ("livecodebench", {"question_title": "t", "question_content": "c"}, ("c",)),
        ("mbpp", {"text": "Write a function", "code": ""}, ("Write a function",)),
    ],
)
def test_shapes_of_rows(name: str, row: dict[str, Any], texts: tuple[str, ...]) -> None:
    assert load_benchmark(name, rows=[row]).items[0].texts == texts


def test_encrypted_questions_are_read_with_their_canary() -> None:
    canary, question = "keep out", "Which town has three bridges and no river?"
    key = hashlib.sha256(canary.encode()).digest()
    secret = bytes(byte ^ key[i % len(key)] for i, byte in enumerate(question.encode()))
    row = {"problem": base64.b64encode(secret).decode(), "canary": canary}
    assert load_benchmark("browsecomp", rows=[row]).items[0].texts == (question,)
    plain = {"problem": question, "canary": canary}
    assert load_benchmark("browsecomp", rows=[plain]).items[0].texts == (question,)


def test_a_folder_of_tasks(tmp_path: Path) -> None:
    for name, file, text in (
        ("b", "task.yaml", "instruction: |\n  fix the\n  build\ndifficulty: easy\n"),
        ("a", "instruction.md", "write a file"),
        ("c", "task.yaml", "instruction: [unclosed"),
        ("d", "task.yaml", "just text"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    benchmark = load_benchmark("terminal_bench", str(tmp_path))
    assert [(item.id, item.texts) for item in benchmark.items] == [
        ("a", ("write a file",)),
        ("b", ("fix the\nbuild\n",)),
    ]
    assert benchmark.skipped == {"unreadable_file": 1, "not_an_object": 1}


def test_fields_name_what_a_recipe_does_not_know() -> None:
    rows = [{"q": {"text": "who"}, "a": "she"}]
    benchmark = load_benchmark("ours", rows=rows, fields={"question": "q.text", "answer": "a"})
    assert [item.label for item in benchmark.items] == ["ours/1", "ours/1:answer"]


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="did you mean 'gsm8k'"):
        load_benchmark("gsm8", rows=[])
    with pytest.raises(BenchmarkError, match="the first has text, label"):
        load_benchmark("gsm8k", rows=[{"text": "x", "label": 1}])
    with pytest.raises(BenchmarkError, match="give a source"):
        load_benchmark("gsm8k")
    with pytest.raises(BenchmarkError, match=r"not \['prompt'\]"):
        load_benchmark("gsm8k", rows=[], fields={"prompt": "x"})
    with pytest.raises(SourceError):
        load_benchmark("gsm8k", str(tmp_path / "absent.jsonl"))


def test_an_empty_benchmark_and_bad_rows_are_no_error() -> None:
    assert load_benchmark("gsm8k", rows=[]).items == []
    benchmark = load_benchmark("gsm8k", rows=[BadRow("broken_json", "x", "f:1")])
    assert benchmark.skipped == {"broken_json": 1}


LOCAL = {
    "gsm8k": ("math/gsm8k/test.jsonl", 1319),
    "math_500": ("math/math500/math500_stripped.jsonl", 500),
    "humaneval": ("code/humaneval/HumanEval.jsonl.gz", 164),
    "mbpp": ("code/mbpp/mbpp.jsonl", 974),
    "ifeval": ("if/ifeval/ifeval_input_data.jsonl", 541),
    "ifbench": ("if/ifbench/IFBench_test.jsonl", 300),
    "arena_hard": ("chat/arena_hard/arena_hard_v0.1_question.jsonl", 500),
    "tau2": ("agent/tau2/retail__tasks.json", 114),
}


@pytest.mark.parametrize("name", LOCAL)
def test_published_files(shared_dir: Path, name: str) -> None:
    path, count = LOCAL[name]
    benchmark = load_benchmark(name, str(shared_dir / "data" / path))
    questions = [item for item in benchmark.items if item.part == "question"]
    assert (len(questions), benchmark.skipped) == (count, {})
    assert len({item.id for item in questions}) == count
