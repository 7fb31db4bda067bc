"""Named algorithms, regularisers and their controls in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import killed_at, metrics, numbers, recipe

from trivet.runtime import run_recipe

SHORT = {"batch": {"prompts": 4, "group": 4, "updates_per_batch": 2}, "epochs": None, "steps": 2}


def steps_of(folder: Path, algorithm: Any, **stage: Any) -> list[dict[str, Any]]:
    run_recipe(recipe(folder, algorithm=algorithm, **(SHORT | stage)), quiet=True)
    return [line for line in metrics(folder / "run") if "train/loss" in line]


@pytest.mark.parametrize(
    "algorithm",
    [
        *("dapo", "gspo", "gmpo", "cispo", "sapo", "topr", "sppo", "dppo", "is_reinforce"),
        {"kind": "rec", "mode": "ring", "regulariser": "k2", "regulariser_weight": 0.1},
        {"kind": "rec", "over": "rollout", "weight": "importance"},
    ],
    ids=str,
)
def test_a_run_of_two_steps(tmp_path, algorithm):
    lines = steps_of(tmp_path, algorithm)
    assert len(lines) == 2
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert all(0 <= line["train/pg/abs_log_diff"] < 5 for line in lines)


def test_corrections_report_themselves(tmp_path):
    corrections = ["geometric_mask", {"kind": "sequence_mis", "unit": "row"}]
    lines = steps_of(tmp_path, {"kind": "gspo", "corrections": corrections})
    for line in lines:
        assert line["train/pg/mis_masked"] == 0  # the sampler is the policy before the step's first update
        assert line["train/pg/geometric_ratio"] == pytest.approx(1.0, abs=1e-3)
        assert line["train/pg/ess/mis_factor"] == pytest.approx(1.0, abs=1e-3)


CONTROLLED = {
    "kind": "grpo",
    "kl": "low_var",
    "kl_weight": 0.5,
    "kl_control": {"kind": "adaptive_kl", "target": 1e-6, "limit": 1.0},
    "entropy_weight": 0.1,
    "entropy_control": {"kind": "linear_decay", "steps": 4},
}


def test_controls_move_and_go_on_after_a_kill(tmp_path):
    def part(name: str) -> Any:
        stage = {"steps": 4, "checkpoints": {"every": 1}, "trainer": {"lr": 5e-3}}
        return recipe(tmp_path / name, algorithm=CONTROLLED, **(SHORT | stage))

    run_recipe(part("whole"), quiet=True)
    lines = [line for line in metrics(tmp_path / "whole" / "run") if "train/loss" in line]
    assert [line["train/entropy/scale"] for line in lines] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    scales = [line["train/kl/scale"] for line in lines]
    assert scales[0] == 0.5
    assert scales[-1] > 0.5  # the policy has left its reference by more than the target
    assert all(line["train/kl/k3"] >= 0 for line in lines)
    assert lines[-1]["train/kl/k3"] > 0
    with killed_at(3):
        run_recipe(part("cut"), quiet=True)
    run_recipe(part("cut"), quiet=True)

    def trained(name: str) -> list[dict[str, float]]:
        kept = ("train/kl", "train/entropy", "train/loss", "train/grad_norm")
        steps = numbers(tmp_path / name / "run").values()
        return [{key: v for key, v in step.items() if key.startswith(kept)} for step in steps]

    assert trained("cut") == trained("whole")
