"""Rows with a task and an answer, and pairs of answers, as they are read for scoring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.recipe import schema
from trivet.tasks import TasksetError, load_tasks
from trivet.tasks.answers import Answers, export_prompts, read_answers, read_pairs, response_message
from trivet.tasks.layouts import Dropped
from trivet.types import Message, Task, Termination


def config(folder: Path, rows: list[Any], name: str = "rows.jsonl", **options: Any) -> schema.Tasks:
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return schema.Tasks(source=str(folder / name), **options)


def read(folder: Path, rows: list[Any], *, response: str | None = None, **options: Any) -> Answers:
    return read_answers(config(folder, rows, **options), response=response)


def test_prompt_answer_response(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "answer": "2", "response": "\\boxed{2}"},
        {"prompt": "1+2?", "answer": "3", "response": ""},
        {"prompt": "1+3?", "answer": "4", "response": None},
        {"prompt": "1+4?", "answer": "5", "response": 5},
    ]
    found = read(tmp_path, rows)
    assert found.rows == 4 and found.dropped == {"empty_response": 1, "no_response": 1, "bad_response": 1}
    (sample,) = found.samples
    assert sample.task.payload == {"answer": "2"}  # what was answered is not the task's worked answer
    assert sample.message == Message("assistant", "\\boxed{2}")
    assert sample.place.endswith("rows.jsonl:1") and found.env == ""


def test_layouts_and_several_answers(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "so\n#### 7", "completions": ["\\boxed{7}", "\\boxed{8}"]}
    found = read(tmp_path, [row])
    assert (found.layout, found.env, len(found.samples)) == ("gsm8k", "math", 2)
    assert [sample.task.payload["answer"] for sample in found.samples] == ["7", "7"]
    assert [sample.place[-2:] for sample in found.samples] == ["#0", "#1"]


def test_whole_tasks_and_conversations(tmp_path: Path) -> None:
    task = Task("qa", (Message("user", "q"),), {"answer": "a"}, id="t1")
    found = read(tmp_path, [{"task": task.to_dict(), "response": {"content": "a"}}])
    assert found.samples[0].task == task and found.env == "qa"
    with pytest.raises(TasksetError, match=r"rows\.jsonl:1: its task: task: 'messages' is missing"):
        read(tmp_path, [{"task": {"env": "qa"}, "response": "a"}])
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = read(tmp_path, [{"messages": said, "answer": "a"}, {"messages": said[:1], "answer": "a"}])
    assert [m.role for m in found.samples[0].task.messages] == ["user"]
    assert found.dropped == {"no_response": 1}


def test_answers_of_another_taskset(tmp_path: Path) -> None:
    tasks = config(
        tmp_path,
        [
            {"uid": "a1", "category": "c", "cluster": "d", "prompt": "p"},
            {"uid": "a2", "category": "c", "cluster": "d", "prompt": "r"},
        ],
        "tasks.jsonl",
    )
    rows = [{"task_id": "a2", "completion": "x"}, {"task_id": "a9", "completion": "y"}, {"completion": "z"}]
    found = read_answers(config(tmp_path, rows), tasks=tasks)
    assert [sample.task.messages[0].text for sample in found.samples] == ["r"]
    assert found.dropped == {"unknown_task": 1, "no_id": 1} and found.env == "chat"


def test_cut_answers_and_named_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "1", "said": "x", "finish_reason": "length"}]
    assert read(tmp_path, rows, response="said").samples[0].termination is Termination.LENGTH
    with pytest.raises(TasksetError, match="which column is the answer that was given"):
        read(tmp_path, rows)
    with pytest.raises(TasksetError, match="did you mean 'said'"):
        read(tmp_path, rows, response="sad")
    with pytest.raises(TasksetError, match="no answer is left to be scored"):
        read(tmp_path, [{**rows[0], "said": " "}], response="said")


def test_reasoning_is_taken_off_as_in_play() -> None:
    message = response_message("<think>\nhm\n</think>\n\nfour")
    assert (message.reasoning, message.text) == ("hm", "four")
    assert response_message("hm</think>four").reasoning == "hm"
    assert response_message("four").reasoning is None


@given(st.one_of(st.none(), st.text(), st.integers(), st.dictionaries(st.text(max_size=7), st.text())))
def test_any_answer_is_a_message_or_dropped(value: Any) -> None:
    try:
        message = response_message(value)
    except Dropped:
        return
    assert message.role == "assistant"


def test_pairs(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "long answer", "rejected": "no"},
        {"prompt": "q", "chosen": "same", "rejected": "same "},
        {"prompt": "q", "chosen": " ", "rejected": "no"},
        {"prompt": "q", "chosen": None, "rejected": "no"},
        {"prompt": "", "chosen": "a", "rejected": "b"},
        {"prompt": "r", "chosen": "c", "rejected": "d"},
    ]
    found = read_pairs(config(tmp_path, rows))
    assert (len(found.pairs), found.rows) == (2, 6)
    assert found.dropped == {"same_answers": 1, "empty_answer": 1, "no_answer": 1, "unreadable": 1}
    assert "rows.jsonl:5" in found.first["unreadable"]
    chosen, rejected = found.pairs[0]
    assert (chosen.message.text, rejected.message.text) == ("long answer", "no")
    assert chosen.task.payload == {} and chosen.task.messages == rejected.task.messages
    with pytest.raises(TasksetError, match="no valid pair: same_answers 1"):
        read_pairs(config(tmp_path, rows[1:2]))


def test_multi_turn_pairs_and_prompts(tmp_path: Path) -> None:
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    rows = [{"chosen": text + "d", "rejected": text + "e"}, {"chosen": text + "f", "rejected": text + "g"}]
    found = read_pairs(config(tmp_path, rows))
    assert found.layout == "hh_rlhf"
    chosen, _ = found.pairs[0]
    assert [m.text for m in chosen.task.messages] == ["a", "b", "c"] and chosen.message.text == "d"
    out = tmp_path / "sub" / "prompts.jsonl"
    assert export_prompts([chosen.task for chosen, _ in found.pairs], out) == 1
    taskset = load_tasks(schema.Tasks(source=str(out), env="chat"))
    assert taskset.tasks[0].messages == chosen.task.messages
