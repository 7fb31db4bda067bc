"""Answers that somebody called good or bad, one by one: groups of one that KTO learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.data.preference import preference_group
from trivet.data.sft import ExampleDropped
from trivet.recipe.schema import Tasks, TinyModel
from trivet.render import get_renderer, load_tokenizer
from trivet.render.tiny import make_tiny
from trivet.tasks import load_tasks
from trivet.types import IssueKey, Message, Task

KEY = IssueKey("t", 0)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny(TinyModel(hidden=16, layers=1, heads=2, kv_heads=1), tmp_path_factory.mktemp("m"))
    return get_renderer(load_tokenizer(folder), kind="auto", template_args={})


def task(**payload: Any) -> Task:
    return Task("math", (Message("user", "1+1="),), payload, id="t")


def test_a_label_makes_the_one_answer_chosen_or_rejected(renderer: Any) -> None:
    for label, side in ((True, "chosen"), (False, "rejected"), (1, "chosen"), (0, "rejected")):
        group = preference_group(task(response="2", label=label), renderer, KEY, group_id="g")
        assert [r.preference for r in group.rollouts] == [side]
        assert group.kind == "preference"
        assert group.rollouts[0].trace.column("train").any()


@pytest.mark.parametrize(
    ("payload", "lone", "cause"),
    [
        ({"response": "2", "label": "yes"}, True, "bad_label"),
        ({"label": True}, True, "no_answer"),
        ({"response": {"role": "assistant", "content": "2", "train": 0}, "label": True}, True, "not_trained"),
        ({"response": "2", "label": True}, False, "lone_answer"),
        ({"chosen": "2", "label": True}, True, "no_answer"),
    ],
)
def test_what_cannot_be_learnt_from_is_dropped_by_cause(
    renderer: Any, payload: dict[str, Any], lone: bool, cause: str
) -> None:
    with pytest.raises(ExampleDropped) as dropped:
        preference_group(task(**payload), renderer, KEY, group_id="g", lone=lone)
    assert dropped.value.cause == cause


def test_a_column_label_beside_an_answer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "judged.jsonl"
    rows: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "label": True,
        },
        {
            "messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
            "label": False,
        },
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks(Tasks(source=str(path), shuffle=False), seed=0).tasks
    assert [t.payload["label"] for t in tasks] == [True, False]


def test_the_public_set_is_read_whole(shared_dir: Path) -> None:
    source = shared_dir / "data" / "preference" / "llamafactory_dpo_kto" / "kto_en_demo.json"
    if not source.is_file():
        pytest.skip(f"no {source}")
    tasks = load_tasks(Tasks(source=str(source)), seed=0).tasks
    assert len(tasks) == 300
    assert {t.payload["label"] for t in tasks} == {True, False}
