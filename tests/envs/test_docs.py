"""The pages on environments and tasks say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.envs import environment_names, make_env
from trivet.recipe import schema
from trivet.rewards.constraints import KINDS
from trivet.tasks import load_tasks
from trivet.tasks.generated import generator_names
from trivet.tasks.layouts import layout_names

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(code: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "docs_example", **names}
    exec(code, space)
    return space


@pytest.mark.parametrize("name", ["environments.md", "tasks.md"])
def test_recipes_are_valid(name: str) -> None:
    for text in blocks(page(name), "yaml"):
        for taskset in yaml.safe_load(text)["tasks"]:
            schema.Tasks(**taskset)


def test_examples_of_environments_run() -> None:
    function, shout, tries = (run(code) for code in blocks(page("environments.md"), "python"))
    assert function["score"]("it is 7", "7") == {"value": 1.0, "length": 7}
    assert make_env("shout", worth=2.0).__class__ is shout["Shout"]
    assert tries["TwoTries"]()


def test_the_example_generator_runs() -> None:
    (code,) = blocks(page("tasks.md"), "python")
    run(code)
    tasks = load_tasks(schema.Tasks(source="generated:squares", args={"top": 30, "size": 10})).tasks
    assert len(tasks) == 10
    for task in tasks:
        n = int(task.messages[0].text.split("*")[0])
        assert task.payload["answer"] == str(n * n)


def test_every_name_is_on_its_page() -> None:
    text = page("environments.md")
    names = {"math", "callable", "instruct", "qa", "puzzle", "chat"}
    assert names <= set(environment_names())
    for name in sorted(names):
        assert f"\n## {name}\n" in text
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
    tasks = page("tasks.md")
    assert [name for name in layout_names() if f"`{name}`" not in tasks] == []
    assert [name for name in generator_names() if f"`{name}`" not in tasks and name != "squares"] == []
    assert [key for key in schema.Tasks.model_fields if f"`{key}`" not in tasks and key != "args"] == []


def test_every_cause_is_on_its_page() -> None:
    """What the sources call Unscored with is explained to the reader."""
    sources = Path(__file__).parents[2] / "src" / "trivet"
    causes = {
        cause
        for room in ("rewards", "envs")
        for file in (sources / room).glob("*.py")
        for cause in re.findall(r'Unscored\(\s*"(\w+)"', file.read_text())
    } - {"not_scored"}
    assert {"verifier_timeout", "no_gold"} <= causes
    assert [cause for cause in sorted(causes) if f"`{cause}`" not in page("environments.md")] == []
