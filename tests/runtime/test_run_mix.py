"""Worked examples beside rollouts in a whole run; a killed one goes on bit by bit."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import killed_at, metrics, numbers, recipe, weights

from trivet.recipe import RecipeError
from trivet.runtime import run_recipe
from trivet.runtime.build import SetupError

EXAMPLES = 10


def mix(folder: Path, algorithm: Any = "mix", *overrides: str, **more: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "examples.jsonl"
    rows = ({"id": f"p{n:02d}", "prompt": f"{n:02d}+1=", "response": str(n + 1)} for n in range(EXAMPLES))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {
        "algorithm": algorithm,
        "expert": {"tasks": [{"source": str(file)}], "prompts": 4},
        "batch": {"prompts": 8, "group": 2},
        "checkpoints": {"every": 2},
        "epochs": None,
        "steps": 5,
    }
    return recipe(folder, *overrides, **(stage | more))


def states(run: Path, stage: str) -> list[tuple[str, int, str, int]]:
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        query = "select task_id, epoch, state, step from issues where stage = ? order by 1, 2"
        return ledger.execute(query, [stage]).fetchall()


def test_both_terms_are_trained(tmp_path: Path) -> None:
    """Five steps of four examples: two epochs of ten; rewards and groups are the rollouts' alone."""
    run_recipe(mix(tmp_path), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(lines) == 5
    assert all(line["train/imitate/nll"] > 0 and line["rollout/count"] == 16 for line in lines)
    assert all(line["train/prompts"] == 8 and line["reward/unscored"] == 0 for line in lines)
    assert lines[-1]["train/imitate/nll"] < lines[0]["train/imitate/nll"]
    read = states(tmp_path / "run", "rl.expert")
    assert len(read) == 20
    assert all(state == "trained" for _, _, state, _ in read)


@pytest.mark.parametrize(
    "algorithm", ["mix", {"kind": "mix", "schedule": "alternate"}, {"kind": "chord", "steps": 4}]
)
def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path, algorithm: Any) -> None:
    run_recipe(mix(tmp_path / "whole", algorithm), quiet=True)
    with killed_at(3):
        run_recipe(mix(tmp_path / "cut", algorithm), quiet=True)
    run_recipe(mix(tmp_path / "cut", algorithm), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    assert states(one, "rl.expert") == states(two, "rl.expert")


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="makes no use of worked examples"):
        run_recipe(mix(tmp_path, "grpo"), quiet=True)
    with pytest.raises(RecipeError, match=r"give the stage expert"):
        run_recipe(mix(tmp_path, "mix", expert=None), quiet=True)
    held = [{"source": str(tmp_path / "examples.jsonl"), "name": "held", "env": "math"}]
    with pytest.raises(SetupError, match="also trained on"):
        run_recipe(mix(tmp_path, "mix", eval={"tasks": held}), quiet=True)
