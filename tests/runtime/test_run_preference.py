"""Learning from pairs in a whole run: the chosen answers win, and a killed run goes on bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.runtime.support import TINY, killed_at, metrics, numbers, weights

from trivet.recipe import RecipeError, load_recipe
from trivet.runtime import run_recipe
from trivet.runtime.reader import NothingToRead


def recipe(folder: Path, algorithm: Any, *overrides: str, **stage: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    rng, rows = np.random.default_rng(0), []
    for n in range(64):
        chosen, rejected = ("".join(rng.choice(list(known), 4)) for known in ("0123456789", "abcdefghij"))
        rows.append({"id": f"p{n}", "prompt": f"{n:02d}=", "chosen": chosen, "rejected": rejected})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = {
        "name": "pairs",
        "mode": "train",
        "algorithm": algorithm,
        "tasks": [{"source": str(folder / "pairs.jsonl")}],
        "batch": {"prompts": 16},
        "trainer": {"lr": 1e-2},
        "checkpoints": {"every": 2},
        "steps": 8,
    }
    content = {
        "name": "preference",
        "output": str(folder / "run"),
        "policy": {"model": TINY},
        "runtime": {"threads": 1},
        "monitor": {"plots": False},
        "stages": [one | stage],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path, list(overrides))


@pytest.mark.parametrize("algorithm", ["dpo", "cdpo", {"kind": "ipo", "beta": 0.5}, "orpo"])
def test_the_chosen_win(tmp_path: Path, algorithm: Any) -> None:
    run_recipe(recipe(tmp_path, algorithm), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(lines) == 8
    assert lines[-1]["train/accuracy"] > 0.9
    assert lines[-1]["train/margin"] > lines[0]["train/margin"]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    if algorithm == "dpo":  # the policy is its own reference at first: log 2 for each pair
        assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)


def test_kto_parts_the_two(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path, {"kind": "kto", "beta": 0.5}), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.1
    first, last = lines[0], lines[-1]
    rejected = last["train/preference/reward"] - last["train/preference/desirable_reward"]
    assert last["train/preference/desirable_reward"] > rejected
    assert first["train/preference/desirable"] == 0.5


def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """The reference is the stage's start, also after the run was cut."""
    run_recipe(recipe(tmp_path / "whole", "dpo"), quiet=True)
    with killed_at(5):
        run_recipe(recipe(tmp_path / "cut", "dpo"), quiet=True)
    run_recipe(recipe(tmp_path / "cut", "dpo"), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "pairs" / "model") == weights(two / "pairs" / "model")


def test_a_pair_is_read_whole(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a pair is read whole"):
        run_recipe(recipe(tmp_path, "dpo", batch={"prompts": 8, "group": 2}), quiet=True)
    with pytest.raises(RecipeError, match="mode both does not suit dpo"):
        run_recipe(recipe(tmp_path, "dpo", mode="both"), quiet=True)


def labelled(folder: Path) -> Path:
    """Answers of digits called good, of letters called bad; no prompt has both."""
    rng, path = np.random.default_rng(1), folder / "labelled.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for n in range(64):
            good = n % 2 == 0
            answer = "".join(rng.choice(list("0123456789" if good else "abcdefghij"), 4))
            file.write(json.dumps({"prompt": f"{n:02d}=", "response": answer, "label": good}) + "\n")
    return path


def test_kto_learns_from_single_answers(tmp_path: Path) -> None:
    tasks = [{"source": str(labelled(tmp_path))}]
    run_recipe(recipe(tmp_path, {"kind": "kto", "beta": 0.5}, tasks=tasks), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.05
    last = lines[-1]
    rejected = last["train/preference/reward"] - last["train/preference/desirable_reward"]
    assert last["train/preference/desirable_reward"] > rejected


def test_what_compares_two_answers_refuses_single_ones(tmp_path: Path) -> None:
    tasks = [{"source": str(labelled(tmp_path))}]
    with pytest.raises(NothingToRead, match=r"lone_answer 64"):
        run_recipe(recipe(tmp_path, "dpo", tasks=tasks), quiet=True)


def test_dpo_with_adapters_needs_no_second_model(tmp_path: Path) -> None:
    lora = {"lr": 5e-2, "lora": {"rank": 4, "alpha": 8}}
    run_recipe(recipe(tmp_path, "dpo", trainer=lora), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert lines[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert lines[-1]["train/accuracy"] > 0.7
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
