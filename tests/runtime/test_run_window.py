"""Oversampling in a whole run: what a full batch does not need is surplus, also after a kill."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from tests.runtime.support import killed_at, metrics, numbers, recipe, weights

from trivet.runtime import run_recipe


def windowed(folder: Path) -> Any:
    window = {"above": -1.0, "not_all_equal": True, "oversample": 1.5}
    return recipe(
        folder,
        explorer={"window": window},
        batch={"prompts": 8, "group": 4},
        checkpoints={"every": 2},
        epochs=None,
        steps=5,
    )


def states(run: Path) -> Counter[str]:
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        return Counter(state for (state,) in ledger.execute("select state from issues"))


def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    run_recipe(windowed(tmp_path / "whole"), quiet=True)
    with killed_at(3):
        run_recipe(windowed(tmp_path / "cut"), quiet=True)
    run_recipe(windowed(tmp_path / "cut"), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    assert states(one) == states(two)
    lines = [line for line in metrics(one) if "train/loss" in line]
    assert all(line["explorer/accepted"] == 8 for line in lines)
    assert sum(line.get("explorer/filtered/surplus", 0) for line in lines) > 5
    assert states(one)["trained"] == 40
