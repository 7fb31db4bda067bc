"""A mixture of experts in a whole run: routes are recorded, stored and replayed, after a kill too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.support import TINY, killed_at, metrics, numbers, recipe

from trivet.recipe import RecipeError
from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny
from trivet.runtime import run_recipe


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with the tiny model's tokenizer."""
    import transformers as hf

    folder = make_tiny(TinyModel(**TINY), tmp_path_factory.mktemp("moe"))
    plain = json.loads((folder / "config.json").read_text())
    config = hf.Qwen3MoeConfig(
        vocab_size=plain["vocab_size"],
        hidden_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=plain.get("bos_token_id"),
        eos_token_id=plain["eos_token_id"],
        pad_token_id=None,
    )
    torch.manual_seed(0)
    (folder / "model.safetensors").unlink()
    hf.Qwen3MoeForCausalLM(config).save_pretrained(str(folder))
    return folder


def moe(folder: Path, model: Path, *overrides: str, **more: Any) -> Any:
    stage = {
        "engine": {"routes": True},
        "trainer": {"lr": 1e-2, "replay_routes": True},
        "batch": {"prompts": 8, "group": 2, "updates_per_batch": 2},
        "checkpoints": {"every": 2},
        "epochs": None,
        "steps": 4,
    }
    return recipe(folder, f"policy.model={model}", *overrides, **(stage | more))


def test_a_killed_run_goes_on_where_it_was(experts: Path, tmp_path: Path) -> None:
    """Step 3 is trained again on its stored routes. Not to the last bit: the grouped products of experts on a
    CPU round by where their operands lie in memory."""
    run_recipe(moe(tmp_path / "whole", experts), quiet=True)
    with killed_at(3):
        run_recipe(moe(tmp_path / "cut", experts), quiet=True)
    run_recipe(moe(tmp_path / "cut", experts), quiet=True)
    one, two = numbers(tmp_path / "whole" / "run"), numbers(tmp_path / "cut" / "run")
    assert one.keys() == two.keys()
    assert len(one) == 4
    for step, line in one.items():
        assert two[step] == pytest.approx(line, rel=1e-3, abs=1e-4), step


def test_one_update_is_on_policy(experts: Path, tmp_path: Path) -> None:
    """Both in float32: sampler and trainer say the same of every trained token, at each step."""
    one = {"batch": {"prompts": 8, "group": 2}, "steps": 2}
    run_recipe(moe(tmp_path, experts, **one), quiet=True)
    gaps = [line["train/pg/abs_log_diff"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


def test_what_does_not_go_together_is_refused(experts: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"set engine\.routes"):
        run_recipe(moe(tmp_path / "a", experts, "stages.rl.engine.routes=false"), quiet=True)
    dense = make_tiny(TinyModel(**TINY), tmp_path / "dense")
    with pytest.raises(RecipeError, match="the policy is qwen3; routes are replayed in"):
        run_recipe(moe(tmp_path / "b", dense), quiet=True)
    shutil.rmtree(dense)
