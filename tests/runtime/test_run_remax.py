"""ReMax in a whole run: the last attempt of each group is greedy, compared with and never trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.runtime.support import killed_at, metrics, numbers, recipe, weights

from trivet.buffer import Ledger
from trivet.runtime import run_recipe

STAGE = {
    "algorithm": "remax",
    "batch": {"prompts": 8, "group": 3},
    "checkpoints": {"every": 2},
    "epochs": None,
    "steps": 4,
}


def test_one_attempt_is_greedy_and_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path / "whole", **STAGE), quiet=True)
    with killed_at(3):
        run_recipe(recipe(tmp_path / "cut", **STAGE), quiet=True)
    run_recipe(recipe(tmp_path / "cut", **STAGE), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    lines = [line for line in metrics(one) if "train/loss" in line]
    assert all(line["train/rollouts_baseline"] == 8 and line["rollout/count"] == 16 for line in lines)
    assert all(line["train/masked_rollouts/baseline"] == 8 for line in lines)
    with Ledger(f"sqlite:///{one / 'ledger.sqlite'}", owner="reader") as ledger:
        stage = ledger.stage("rl")
        groups = stage.groups(stage.keys("trained"))
    for group in groups:
        assert [r.role for r in group.rollouts] == ["train", "train", "baseline"]
    # Greedy: the most probable token each time; the others are sampled.
    greedy = [r.trace.column("logprob")[r.trace.column("sampled")] for g in groups for r in g.rollouts[2:]]
    sampled = [r.trace.column("logprob")[r.trace.column("sampled")] for g in groups for r in g.rollouts[:2]]
    assert np.concatenate(greedy).mean() > np.concatenate(sampled).mean() + 0.2
