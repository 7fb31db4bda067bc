"""What can be known before a start of routing replay and of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.algorithms import resolve_all
from trivet.recipe import load_recipe, plan

STAGE: dict[str, Any] = {"name": "rl", "tasks": [{"source": "generated:sums"}], "steps": 2}


def problems(folder: Path, model: Any, **stage: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"policy": {"model": model}, "stages": [STAGE | stage]}))
    recipe = load_recipe(path)
    return "\n".join(plan(recipe, algorithms=resolve_all(recipe)).problems)


def directory(folder: Path, kind: str) -> str:
    (folder / kind).mkdir()
    (folder / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder / kind)


REPLAY: dict[str, Any] = {"engine": {"routes": True}, "trainer": {"replay_routes": True}}


def test_routes_of_a_dense_model_or_an_unknown_family_are_refused(tmp_path: Path) -> None:
    assert "the policy is a dense model" in problems(tmp_path, {"hidden": 16}, **REPLAY)
    assert "the policy is qwen2_moe" in problems(tmp_path, directory(tmp_path, "qwen2_moe"), **REPLAY)
    assert "replay_routes" not in problems(tmp_path, directory(tmp_path, "olmoe"), **REPLAY)


def test_routes_nobody_reads_are_refused(tmp_path: Path) -> None:
    assert "routes that nobody reads" in problems(tmp_path, {"hidden": 16}, engine={"routes": True})


def test_the_known_families_are_those_of_the_routers() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from trivet.recipe.checks import ROUTED
    from trivet.weights.moe import FAMILIES

    found = set()
    for kind in ROUTED:
        sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 8}
        sizes |= {"first_k_dense_replace": 0, "num_experts": 8, "n_routed_experts": 8}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        found |= {type(m).__name__ for m in model.modules() if type(m).__name__ in FAMILIES}
    assert found == set(FAMILIES)


def test_a_reward_model_is_not_trained_through_adapters(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    stage = {"mode": "train", "algorithm": "reward_model", "tasks": [{"source": str(path)}]}
    assert "adapters do not reach" in problems(tmp_path, {"hidden": 16}, **stage, trainer={"lora": {}})


@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 4, "targets": ["q_proj"]}])
def test_the_plan_counts_what_adapters_take(tmp_path: Path, lora: dict[str, Any]) -> None:
    """Rank 4, one layer of width 16 with an MLP of 32: q 4 * (16 + 16) = 128 numbers, 4 bytes each."""
    path = tmp_path / "recipe.yaml"
    model = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 32}
    stage = STAGE | {"algorithm": {"kind": "grpo", "kl": "k3", "kl_weight": 0.1}, "trainer": {"lora": lora}}
    path.write_text(yaml.safe_dump({"policy": {"model": model}, "stages": [stage]}))
    recipe = load_recipe(path)
    text = plan(recipe, algorithms=resolve_all(recipe)).text()
    whole = 4 * (16 + 16) * 2 + 4 * (16 + 8) * 2 + 4 * (16 + 32) * 3  # q, o; k, v; gate, up, down
    size = 4 * (128 if "targets" in lora else whole)
    assert f"{size} B" in text or f"{size / 1024:.1f} KiB" in text
    assert "reference policy" not in text
