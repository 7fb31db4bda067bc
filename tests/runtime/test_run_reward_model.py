"""A reward model is trained on pairs, and the policy of the next stage is rewarded by it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.runtime.support import TINY, killed_at, metrics, numbers

from trivet.buffer import Ledger
from trivet.recipe import Recipe, RecipeError, load_recipe
from trivet.rewards import RewardModel
from trivet.runtime import pipeline, run_recipe

PROMPTS, RM_STEPS = 64, 12
# A policy from random weights says anything, the names of special tokens too: the reward model reads them.
ALPHABET = "0123456789=?!abcdefghijklmnopqrstuvwxyz<|>_ \n"


def pair(n: int) -> dict[str, str]:
    """An answer of digits is preferred to one of letters."""
    rng = np.random.default_rng(n)
    chosen, rejected = ("".join(rng.choice(list(known), 3)) for known in ("0123456789", "abcdefghij"))
    return {"id": f"p{n:02d}", "prompt": f"{n:02d}=", "chosen": chosen, "rejected": rejected}


def recipe(folder: Path, *overrides: str, model: str = "stage:rm") -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(pair(n)) + "\n" for n in range(PROMPTS)))
    tasks = {"source": str(file), "fields": {"prompt": "prompt"}}
    rm = {
        "name": "rm",
        "mode": "train",
        "algorithm": "reward_model",
        "tasks": [tasks],
        "batch": {"prompts": 16, "group": 1},
        "trainer": {"lr": 1e-2},
        "checkpoints": {"every": 4},
        "steps": RM_STEPS,
    }
    rl = {
        "name": "rl",
        "mode": "both",
        "algorithm": "grpo",
        "tasks": [tasks | {"env": "reward_model", "env_args": {"model": model, "batch": 8}}],
        "batch": {"prompts": 4, "group": 4},
        "sampling": {"max_tokens": 4},
        "trainer": {"lr": 1e-2},
        "steps": 2,
    }
    content = {
        "name": "scored",
        "output": str(folder / "run"),
        "policy": {"model": TINY | {"alphabet": ALPHABET}},
        "runtime": {"threads": 1},
        "monitor": {"plots": False, "samples_every": 0},
        "stages": [rm, rl],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path, list(overrides))


def test_a_policy_is_rewarded_by_a_stage_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: dict[str, Path] = {}
    whole = pipeline.compose_stage

    async def noting(run: Any, stage: Any, start: Path, stack: Any) -> Any:
        starts[stage.name] = start
        return await whole(run, stage, start, stack)

    monkeypatch.setattr(pipeline, "compose_stage", noting)
    result = run_recipe(recipe(tmp_path), quiet=True)
    run = tmp_path / "run"
    learned = [line for line in metrics(run) if line.get("stage") == "rm" and "train/accuracy" in line]
    assert len(learned) == RM_STEPS
    assert learned[-1]["train/accuracy"] > 0.95
    assert learned[-1]["train/loss"] < 0.3 < learned[0]["train/loss"]  # log 2 at first

    # The next stage starts from the policy, not from the reward model.
    facts = json.loads((run / "state.json").read_text())["stages"]
    assert facts["rm"]["reward_model"] == "rm/model"
    assert "model" not in facts["rm"]
    assert starts["rl"] == starts["rm"] == run / "tiny"
    assert result.model == run / "rl" / "model"

    # What the ledger holds is what the reward model says.
    with Ledger(f"sqlite:///{run / 'ledger.sqlite'}", owner="test") as ledger:
        stage = ledger.stage("rl")
        groups = stage.groups(stage.keys("trained"))  # type: ignore[arg-type]
    played = [rollout for group in groups for rollout in group.rollouts]
    assert len(played) == 2 * 4 * 4
    assert all(rollout.score is not None for rollout in played)
    assert len({rollout.score for rollout in played}) > 4

    async def again() -> list[Any]:
        async with RewardModel(run / "rm" / "model", batch=8) as model:
            return [await model.score(r.task.messages, r.messages[-1]) for r in played[:6]]

    assert [reward.value for reward in asyncio.run(again())] == [r.score for r in played[:6]]


def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path / "whole"), quiet=True)
    with killed_at(6):
        run_recipe(recipe(tmp_path / "killed"), quiet=True)
    run_recipe(recipe(tmp_path / "killed"), quiet=True)
    assert numbers(tmp_path / "killed" / "run") == numbers(tmp_path / "whole" / "run")


def test_a_policy_is_no_reward_model(tmp_path: Path) -> None:
    start = recipe(tmp_path / "a", "stages.rm.steps=1", "stages.rl.steps=1")
    run_recipe(start, quiet=True)
    wrong = recipe(tmp_path / "b", "stages.rm.steps=1", model=str(tmp_path / "a" / "run" / "rl" / "model"))
    with pytest.raises(ValueError, match=r"is no reward model: its safetensors have no score\.weight"):
        run_recipe(wrong, quiet=True)


def test_a_stage_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"stage:rmm names none of the earlier.*\(rm\); did you mean `rm`"):
        run_recipe(recipe(tmp_path, model="stage:rmm"), quiet=True)
    with pytest.raises(RecipeError, match=r"models:judge names none of the models \(none\)"):
        run_recipe(recipe(tmp_path, model="models:judge"), quiet=True)
    assert not (tmp_path / "run").exists()
