"""PPO in a whole run: policy and critic are trained, and a run that was killed goes on bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.runtime.support import killed_at, metrics, numbers, recipe, weights

from trivet.recipe import RecipeError
from trivet.render.tiny import make_tiny
from trivet.runtime import run_recipe
from trivet.runtime.build import SetupError

STEPS = 5


def ppo(folder: Path, *overrides: str, **more: Any) -> Any:
    stage = {
        "algorithm": {"kind": "ppo", "credit": {"kl": 0.01}},
        "batch": {"prompts": 8, "group": 2, "updates_per_batch": 2},
        "trainer": {"lr": 5e-3, "critic_lr": 1e-2},
        "checkpoints": {"every": 2},
        "epochs": None,
        "steps": STEPS,
    }
    return recipe(folder, *overrides, **(stage | more))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    run_recipe(ppo(folder), quiet=True)
    return folder / "run"


def test_both_are_trained(whole: Path) -> None:
    lines = [line for line in metrics(whole) if "train/loss" in line]
    assert len(lines) == STEPS
    assert [line["train/critic/updates"] for line in lines] == [2.0 * (i + 1) for i in range(STEPS)]
    assert all(line["train/critic/lr"] == 1e-2 for line in lines)
    assert all(line["train/critic/loss"] > 0 and line["train/critic/grad_norm"] > 0 for line in lines)
    assert lines[0]["train/value/value"] != 0  # 0 before the first of the step's two updates
    assert abs(lines[-1]["train/value/value"]) > 0.01


def test_a_killed_run_goes_on_bit_by_bit(whole: Path, tmp_path: Path) -> None:
    with killed_at(3):
        run_recipe(ppo(tmp_path), quiet=True)
    run_recipe(ppo(tmp_path), quiet=True)
    assert numbers(tmp_path / "run") == numbers(whole)  # the critic's losses among them
    assert weights(tmp_path / "run" / "rl" / "model") == weights(whole / "rl" / "model")


def test_the_model_is_the_policys_alone(whole: Path) -> None:
    [last] = (whole / "rl" / "checkpoints").glob(f"step_{STEPS:06d}")
    with safe_open(last / "model.safetensors", "np") as policy:
        assert not any("score" in name for name in policy.keys())  # noqa: SIM118
    with safe_open(last / "optimizer.safetensors", "np") as moments:
        assert "critic.weights/score.weight" in set(moments.keys())
        assert any(name.startswith("critic.optimiser/exp_avg/") for name in set(moments.keys()))
    assert json.loads((whole / "state.json").read_text())["stages"]["rl"]["model"] == "rl/model"


def test_a_critic_from_elsewhere(tmp_path: Path) -> None:
    """`models.critic` may be of another shape than the policy; one that is not there is named."""
    from trivet.recipe.schema import TinyModel

    small = ppo(tmp_path / "a", steps=1).policy.model.model_dump()
    start = make_tiny(TinyModel(**(small | {"hidden": 24, "layers": 2})), tmp_path / "critic")
    run_recipe(ppo(tmp_path / "a", f"models.critic.model={start}", steps=1), quiet=True)
    [folder] = (tmp_path / "a" / "run" / "rl" / "checkpoints").glob("step_*")
    with safe_open(folder / "optimizer.safetensors", "np") as moments:
        assert moments.get_tensor("critic.weights/score.weight").shape == (1, 24)
    (tmp_path / "empty").mkdir()
    wrong = ppo(tmp_path / "b", f"models.critic.model={tmp_path / 'empty'}", steps=1)
    with pytest.raises(SetupError, match=r"models\.critic\.model: .* no config\.json"):
        run_recipe(wrong, quiet=True)


def test_values_without_a_critic_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs value: it trains no critic"):
        run_recipe(ppo(tmp_path, algorithm={"kind": "grpo", "credit": "gae"}), quiet=True)
    assert not (tmp_path / "run").exists()
