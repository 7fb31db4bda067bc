"""What a run is given may be wrong: it says what and where before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import HERE, recipe

from trivet.recipe.schema import TinyModel
from trivet.render import RenderError
from trivet.render.tiny import make_tiny
from trivet.runtime import NothingToRead, SetupError, run_recipe
from trivet.runtime.folder import changed_keys
from trivet.tasks import TasksetError


def run(folder: Path, *overrides: str, **stage: Any) -> None:
    run_recipe(recipe(folder, *overrides, **stage), quiet=True)


def test_tasks_that_are_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.jsonl"
    with pytest.raises(TasksetError, match=str(missing)):
        run(tmp_path, tasks=[{"source": str(missing), "env": f"{HERE}:Lively"}])


def test_a_policy_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match=r"empty has no config\.json"):
        run(tmp_path, f"policy.model={tmp_path / 'empty'}")


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "fixed"],
    ids=["leaves answers out", "leaves all out"],
)
def test_a_template_that_leaves_nothing_to_train(template: str, tmp_path: Path) -> None:
    model = make_tiny(TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32), tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    data = tmp_path / "answers.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "response": f"{i + 1}"}) + "\n" for i in range(6))
    )
    tasks = [{"source": str(data), "fields": {"prompt": "prompt", "response": "response"}}]
    supervised = {"mode": "train", "algorithm": "sft", "batch": {"prompts": 4}, "tasks": tasks, "steps": 1}
    with pytest.raises((RenderError, NothingToRead), match=r"template|not_renderable"):
        run(tmp_path, f"policy.model={model}", **supervised)
    assert not (tmp_path / "run/rl/model").exists()


def test_what_may_differ_when_a_run_goes_on() -> None:
    """How long it runs and what it runs on; not an environment's argument that happens to be called alike."""
    stage = {"steps": 1, "checkpoints": {"every": 1}, "tasks": [{"env_args": {"steps": 3}}]}
    old = {"runtime": {"threads": 1}, "monitor": {}, "stages": [stage]}
    longer = {"runtime": {"threads": 2}, "stages": [{**stage, "steps": 2, "checkpoints": {"every": 5}}]}
    other = {"stages": [{**stage, "tasks": [{"env_args": {"steps": 4}}]}]}
    assert list(changed_keys(old, {**old, **longer})) == []
    assert list(changed_keys(old, {**old, **other})) == ["stages.0.tasks.0.env_args.steps"]
