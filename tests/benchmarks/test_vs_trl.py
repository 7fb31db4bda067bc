"""The comparison with TRL: what it makes of its numbers, and that both sides compute the same."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny

ROOM = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def versus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOM))
    return importlib.import_module("vs_trl")


def rewards(*values: float) -> list[dict[str, float]]:
    return [{"reward/mean": value} for value in values]


def test_a_reward_counts_once_the_mean_of_three_steps_has_it(versus: ModuleType) -> None:
    assert versus.reached(rewards(0.9, 0.9), 0.5) is None
    assert versus.reached(rewards(0.1, 0.9, 0.2, 0.5, 0.9), 0.5) == 3  # means 0.4, 0.533
    assert versus.reached(rewards(0.1, 0.2, 0.3), 0.5) is None


def test_ratios_at_equal_tokens(versus: ModuleType) -> None:
    # 100 tokens sampled at 50/s, and 150 trained at 20 s per 1000: 2 + 3 s. The arm sampled twice as many.
    base = {"step_s": 5.0, "sampled": 100, "tokens_per_s": 50.0, "train_s_per_1000": 20.0, "peak_gb": 4.0}
    arm = {"step_s": 4.0, "sampled": 200, "tokens_per_s": 100.0, "train_s_per_1000": 10.0, "peak_gb": 2.0}
    out = versus.ratios(arm, base, 50)
    assert out["step"] == pytest.approx(1.25)
    assert out["step_at_equal_tokens"] == pytest.approx(2.0)
    assert out["memory"] == pytest.approx(0.5)


def test_a_line_still_being_written_is_no_step_yet(versus: ModuleType, tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "time": 2.0, "time/step_s": 1.0, "reward/mean": 0.5})
    (tmp_path / "metrics.jsonl").write_text(line + "\n" + line[:20])
    assert [step["step"] for step in versus.read_steps("trl", tmp_path)] == [1]
    assert versus.read_steps("shared", tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_losses_and_gradients_are_those_of_trl(
    versus: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(TinyModel(hidden=32, heads=2, kv_heads=1, layers=1, mlp=64), tmp_path / "tiny")
    asked = ["vs_trl", "--model", str(model), "--parity", "--prompts", "2", "--group", "3", "--tokens", "12"]
    monkeypatch.setattr(sys, "argv", [*asked, "--threads", "1"])
    report = importlib.import_module("vs_trl_parity").run_parity(versus.arguments())
    assert report["advantage_difference_with_epsilon"] < 1e-5
    assert len(report["cases"]) == 4 * 2 * 2
    for case in report["cases"]:
        assert case["loss_difference"] < 1e-6, case
        assert case["gradient_difference"] < 1e-5, case
        assert case["worst_gradient_difference"] < 1e-4, case
        assert case["clipped"] == pytest.approx(case["trl_clipped"], abs=1e-6), case
        assert (case["clipped"] > 0) == (case["policy"] == "off"), case
