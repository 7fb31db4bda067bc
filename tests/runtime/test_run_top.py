"""The sampler's top entries in a whole run: stored, trained with, replayed after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import killed_at, metrics, numbers, recipe, weights

from trivet.recipe import RecipeError
from trivet.runtime import run_recipe


def centred(folder: Path, *overrides: str, **more: Any) -> Any:
    stage = {
        "algorithm": "score_centering",
        "engine": {"top": 8},
        "batch": {"prompts": 8, "group": 2},
        "checkpoints": {"every": 2},
        "epochs": None,
        "steps": 5,
    }
    return recipe(folder, *overrides, **(stage | more))


def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Step 3 is trained again from its stored rollouts, with the entries that were stored with them."""
    run_recipe(centred(tmp_path / "whole"), quiet=True)
    with killed_at(3):
        run_recipe(centred(tmp_path / "cut"), quiet=True)
    run_recipe(centred(tmp_path / "cut"), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    lines = [line for line in metrics(one) if "train/loss" in line]
    assert len(lines) == 5
    assert all(line["train/pg/uncentred"] == 0 for line in lines)
    assert all(0.05 < line["train/pg/top_mass"] <= 1 for line in lines)  # 8 of some ninety symbols


def test_without_an_engine_that_keeps_them_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine\.top"):
        run_recipe(centred(tmp_path, "stages.rl.engine.top=0"), quiet=True)
