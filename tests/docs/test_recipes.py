"""Every recipe a reader can copy is valid and can be planned: on pages, in examples, packaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.pages import ROOT, Block, blocks, name_of, pages, write_files

from trivet.algorithms import AlgorithmError, resolve
from trivet.recipe import Recipe, load_recipe, plan
from trivet.recipe.files import packaged_recipes
from trivet.recipe.schema import Stage
from trivet.rewards.load import load_file
from trivet.tasks import load_tasks

YAML = [(page, block) for page in pages() for block in blocks(page, "yaml") if block.mark != "text"]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
_TASKS = [{"source": "generated:addition"}]


def whole(content: dict[str, Any]) -> dict[str, Any]:
    """A fragment of a recipe, or of a stage, as a recipe."""
    if "stages" in content:
        return content
    stage = {"name": "rl", "steps": 200, "tasks": _TASKS}
    stage |= {
        key: content[key] for key in content if key in Stage.model_fields and key not in ("name", "mode")
    }
    rest = {key: value for key, value in content.items() if key not in stage}
    return {**rest, "stages": [stage]}


def check(recipe: Recipe) -> None:
    """Plan it as `trivet run` does before it starts."""
    for name in recipe.imports:
        load_file(name)
    algorithms = {s.name: resolve(s.algorithm) for s in recipe.stages if s.mode != "bench"}
    plan(recipe, algorithms=algorithms).check()


@pytest.mark.parametrize(("page", "block"), YAML, ids=lambda value: getattr(value, "place", ""))
def test_recipes_of_pages(page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in write_files(page, tmp_path):
        if file.suffix == ".py":
            load_file(file)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole(yaml.safe_load(block.code))))
    recipe = load_recipe(path)
    check(recipe)
    if block.mark == "needs":
        for stage in recipe.stages:
            for tasks in (*stage.tasks, *stage.eval.tasks):
                if Path(tasks.source).exists() or tasks.source.startswith("generated:"):
                    assert load_tasks(tasks).tasks


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_recipes_of_examples(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    recipe = load_recipe(path)
    check(recipe)
    assert all(load_tasks(tasks).tasks for stage in recipe.stages for tasks in stage.tasks)


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_packaged_recipes(name: str) -> None:
    check(load_recipe(name))


def test_a_wrong_recipe_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole({"algorithm": {"kind": "grpo", "clipp": 0.2}})))
    with pytest.raises(AlgorithmError, match="clip"):
        check(load_recipe(path))
