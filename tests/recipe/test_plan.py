"""Derived numbers, worked by hand, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms import resolve, resolve_all
from trivet.recipe import (
    ModelShape,
    Plan,
    Recipe,
    RecipeError,
    derived_steps,
    lag,
    load_recipe,
    plan,
    policy_shape,
    sampled_after,
)
from trivet.recipe.memory import human_bytes
from trivet.recipe.schema import TinyModel


def recipe_of(*stages: dict[str, Any], **rest: Any) -> Recipe:
    return Recipe.model_validate(
        {"stages": [{"name": f"s{i}", **stage} for i, stage in enumerate(stages)], **rest}
    )


def planned(recipe: Recipe, **counts: Any) -> Plan:
    algorithms = {s.name: resolve(s.algorithm) for s in recipe.stages if s.mode != "bench"}
    return plan(recipe, algorithms=algorithms, **counts)


TASKS = [{"source": "generated:addition"}]
RL: dict[str, Any] = {"steps": 10, "tasks": TASKS}
SFT: dict[str, Any] = {"steps": 10, "tasks": TASKS, "mode": "train", "algorithm": "sft"}


# -- the schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "offset", "after", "lags"),
    [
        (1, 0, [0, 1, 2, 3], [0, 0, 0, 0]),
        (2, 0, [0, 0, 2, 2], [0, 1, 0, 1]),
        (1, 1, [0, 0, 1, 2], [0, 1, 1, 1]),
        (3, 0, [0, 0, 0, 3], [0, 1, 2, 0]),
        (2, 1, [0, 0, 0, 2], [0, 1, 2, 1]),
    ],
)
def test_the_schedule(interval: int, offset: int, after: list[int], lags: list[int]) -> None:
    assert [sampled_after(e, interval, offset) for e in range(1, 5)] == after
    assert [lag(e, interval, offset) for e in range(1, 5)] == lags


@given(st.integers(1, 1000), st.integers(1, 20), st.integers(0, 20))
def test_weights_are_never_from_the_future_nor_too_old(step: int, interval: int, offset: int) -> None:
    version = sampled_after(step, interval, offset)
    assert version % interval == 0
    assert 0 <= lag(step, interval, offset) <= interval + offset - 1


def test_no_schedule_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="no schedule for step 0"):
        sampled_after(0, 1, 0)


# -- derived numbers -----------------------------------------------------------------------------


def test_numbers_of_an_rl_stage() -> None:
    stage = {
        "tasks": TASKS,
        "epochs": 2,
        "batch": {"prompts": 32, "group": 16, "updates_per_batch": 2},
        "sampling": {"max_tokens": 100},
        "explorer": {"window": {"max_rounds": 3}},
        "eval": {"tasks": [{"source": "x.jsonl"}], "every": 20, "samples": 4, "k": [1, 4]},
        "checkpoints": {"every": 25},
        "sync": {"interval": 2},
    }
    derived = planned(recipe_of(stage), tasks={"s0": 1000}, eval_tasks={"s0": 50}).check().stage("s0")
    assert derived.rollouts_per_step == 512
    assert derived.tokens_per_step == 51_200
    assert derived.tokens_per_step_refilled == 153_600  # three rounds
    assert derived.steps == 63  # 2 * 1000 / 32 = 62.5
    assert derived.epochs == pytest.approx(63 * 32 / 1000)
    assert derived.evaluations == 5  # at 0, 20, 40, 60 and at the end, 63
    assert (derived.eval_rollouts, derived.all_eval_rollouts) == (200, 1000)
    assert derived.checkpoints == 3  # at 25, 50 and at the end
    assert derived.lags == (0, 1, 0, 1)
    text = planned(recipe_of(stage), tasks={"s0": 1000}, eval_tasks={"s0": 50}).text()
    for shown in (
        "32 prompts x 16 rollouts = 512 rollouts, 2 optimiser update(s)",
        "63 (epochs 2)",
        "5 of 200",
    ):
        assert shown in text


def test_numbers_of_an_sft_stage_and_a_bench_stage() -> None:
    held = {"tasks": [{"source": "x.jsonl"}], "every": 5, "at_start": False, "samples": 2}
    recipe = recipe_of({**SFT, "batch": {"prompts": 8}, "eval": held}, RL, {"mode": "bench", "eval": held})
    derived = planned(recipe, tasks={"s0": 80}, eval_tasks={"s0": 10, "s2": 10}).check()
    sft, _, bench = derived.stages
    assert (sft.group, sft.rollouts_per_step, sft.tokens_per_step, sft.lags) == (1, 8, None, ())
    assert sft.evaluations == 2  # at 5 and 10; 10 is the end
    assert "8 examples, 1 optimiser update(s)" in derived.text()
    assert (bench.steps, bench.checkpoints, bench.evaluations) == (
        None,
        0,
        3,
    )  # the start and two stages' models
    assert bench.all_eval_rollouts == 60


@pytest.mark.parametrize(
    ("ends", "tasks", "steps"),
    [
        ({"steps": 7}, None, 7),
        ({"epochs": 1}, 64, 2),
        ({"epochs": 3}, 65, 7),  # 195 / 32 = 6.1
        ({"epochs": 1}, None, None),
        ({"steps": 5, "epochs": 3}, 65, 5),
        ({"steps": 50, "epochs": 3}, 65, 7),
        ({"max_seconds": 5.0}, 65, None),
    ],
)
def test_steps(ends: dict[str, Any], tasks: int | None, steps: int | None) -> None:
    assert derived_steps(recipe_of({"tasks": TASKS, **ends}).stages[0], tasks) == steps


def test_unknown_numbers_are_said_to_be_unknown() -> None:
    stage = {"tasks": TASKS, "max_seconds": 60.0, "eval": {"tasks": TASKS}}
    derived = planned(recipe_of(stage)).check()
    assert (derived.stages[0].evaluations, derived.stages[0].checkpoints) == (None, None)
    assert "not known yet (60 s)" in derived.text()


def test_notes() -> None:
    stage = {
        **RL,
        "batch": {"prompts": 10, "updates_per_batch": 3},
        "phases": [{"from": 11, "set": {"trainer.lr": 1e-4}}],
        "eval": {"tasks": TASKS, "samples": 2, "sampling": {"temperature": 0.0}},
    }
    text = planned(recipe_of(stage), tasks={"s0": 4}).check().text()
    for note in ("it spans epochs", "do not split evenly", "after the last step, 10", "eval is greedy"):
        assert note in text


# -- memory --------------------------------------------------------------------------------------

# SmolLM2-135M: 28,311,552 of embeddings, 30 layers of 3,540,096, a final norm of 576.
SMOL = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def test_parameters_of_a_known_model() -> None:
    shape = ModelShape.from_config(SMOL)
    assert shape is not None
    assert shape.parameters == 134_515_008
    assert shape.cached_per_token == 2 * 30 * 3 * 64
    untied = ModelShape.from_config({**SMOL, "tie_word_embeddings": False})
    assert untied is not None
    assert untied.parameters == 134_515_008 + 28_311_552


def test_parameters_of_the_tiny_model() -> None:
    tiny = TinyModel(hidden=8, layers=1, heads=2, kv_heads=1, mlp=16, alphabet="ab")
    shape = ModelShape.from_tiny(tiny)
    # embeddings (2 letters + 8 special) * 8; q, o 64 each; k, v 32 each; q and k norms 4 each; mlp 3 * 128;
    # two norms of 8; the last norm
    assert shape.parameters == 80 + (64 + 64 + 32 + 32 + 8 + 384 + 16) + 8


@pytest.mark.slow
def test_parameters_match_a_real_tiny_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trivet.render.tiny import make_tiny

    directory = make_tiny(TinyModel(), tmp_path / "tiny")
    counted = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(directory).parameters())
    assert ModelShape.from_tiny(TinyModel()).parameters == counted
    read = ModelShape.from_config(json.loads((directory / "config.json").read_text()))
    assert read == ModelShape.from_tiny(TinyModel())


def test_memory_of_a_stage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    stage = {**RL, "engine": {"slots": 4, "context": 1000}, "trainer": {"head_chunk": 100}}
    recipe = recipe_of(stage, policy={"model": str(tmp_path), "dtype": "bfloat16"})
    derived = planned(recipe)
    parameters = 134_515_008
    assert derived.parameters == parameters
    assert derived.stages[0].memory == {
        "trainer: weights": 4 * parameters,
        "trainer: gradients": 4 * parameters,
        "trainer: optimiser (two moments)": 8 * parameters,
        "trainer: one chunk of logits and its gradient": 2 * 4 * 100 * 49152,
        "engine: weights": 2 * parameters,
        "engine: key-value cache (4 slots x 1000 tokens)": 4 * 1000 * 11520 * 2,
    }
    assert "2.4 GiB without activations" in derived.text()
    assert human_bytes(1536) == "1.5 KiB"


def test_no_estimate_for_what_is_not_known(tmp_path: Path) -> None:
    assert ModelShape.from_config({**SMOL, "num_experts": 8}) is None
    assert ModelShape.from_config({"model_type": "odd"}) is None
    (tmp_path / "config.json").write_text("[]")
    assert policy_shape(recipe_of(RL, policy={"model": str(tmp_path)})) is None
    assert planned(recipe_of(RL, policy={"model": "some/hub-model"})).stages[0].memory == {}


# -- refusals ------------------------------------------------------------------------------------


def refused(*stages: dict[str, Any], **rest: Any) -> list[str]:
    return list(planned(recipe_of(*stages, **rest)).problems)


HELD = {"tasks": [{"source": "x.jsonl"}]}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({**RL, "sync": {"offset": 1}}, r"sync.offset 1 .* v\(e\) = max\(0, interval .* lags 0, 1, 1, 1, "),
        ({**RL, "sampling": {"temperature": 0}}, "temperature: 0: training must sample"),
        ({**RL, "sampling": {"top_p": 0.9, "top_k": 5}}, "top_p: 0.9, top_k: 5: training"),
        ({**RL, "sampling": {"stop": ["x"]}}, "belong under eval.sampling"),
        ({**RL, "batch": {"group": 1}}, "group 1 gives grpo nothing to compare: credit needs at least 2"),
        (
            {**RL, "batch": {"prompts": 2, "updates_per_batch": 4}},
            "cannot split 2 prompts.*prompts x group = 32",
        ),
        ({**RL, "batch": {"micro_tokens": 64}}, "micro_tokens 64 must hold the longest row"),
        ({**RL, "mode": "train"}, "mode train has no rollouts for grpo"),
        ({**RL, "algorithm": "sft"}, "mode both does not suit sft, .* set mode: train"),
        ({**SFT, "batch": {"group": 4}}, "batch.group 4 does not suit sft.*set batch.group: 1"),
        ({**RL, "tasks": []}, "nothing to train on"),
        ({"mode": "bench"}, "a bench stage plays eval.tasks, and there are none"),
        ({"mode": "bench", "eval": HELD, "tasks": TASKS}, "move what is under tasks there"),
        ({**RL, "eval": {**HELD, "k": [1, 8], "samples": 4}}, r"eval.k \[8\] is more than eval.samples 4"),
        (
            {**RL, "eval": {"tasks": [{"source": "a/x.jsonl"}, {"source": "b/x.json"}]}},
            r"\['x'\] more than once",
        ),
        ({**RL, "until": {"metric": "loss", "below": 1}}, "must be eval/TASKSET/METRIC"),
        (
            {**RL, "eval": HELD, "until": {"metric": "eval/y/pass@1", "above": 1}},
            "taskset 'y'; eval.tasks has x",
        ),
        ({**RL, "eval": HELD, "until": {"metric": "eval/x/pass@2", "above": 1}}, "computes pass@1"),
        ({**RL, "eval": HELD, "until": {"metric": "eval/x/pass@2/low", "above": 1}}, "computes pass@1"),
        (
            {**RL, "eval": HELD, "until": {"metric": "eval/x/rewrad", "above": 1}},
            "wants rewrad, which no evaluation gives; did you mean `reward`",
        ),
        ({**RL, "max_length": 99}, "max_length is for supervised stages"),
        ({"mode": "bench", "eval": HELD, "steps": 3}, "a bench stage has no steps: take out steps"),
        (
            {"tasks": TASKS, "max_seconds": 9, "trainer": {"schedule": "cosine"}},
            "schedule cosine must know how many steps",
        ),
        ({**RL, "trainer": {"warmup_steps": 10}}, "warmup_steps 10 is not below the stage's 10 optimiser"),
        ({**RL, "sampling": {"max_tokens": 256}}, "leaves no room for a prompt"),
        ({**RL, "engine": {"context": 999}}, "engine.context 999 is more than the model's 256"),
        (
            {**RL, "phases": [{"from": 5, "set": {"sampling.top_p": 0.5}}]},
            "top_p: 0.5: training must sample",
        ),
    ],
)
def test_refusals(stage: dict[str, Any], message: str) -> None:
    [problem] = refused(stage)
    assert problem.startswith("stages.s0: ")
    with pytest.raises(RecipeError, match=message):
        planned(recipe_of(stage)).check()


def test_stop_rules_that_are_fine() -> None:
    for metric in ("reward", "length", "pass@1", "pass@1/low", "pass@1/high", "truncated", "unscored"):
        rule = {"metric": f"eval/x/{metric}", "above": 0.5}
        assert refused({**RL, "eval": HELD, "until": rule}) == []


def test_a_lease_outlives_a_step() -> None:
    """Or a slow step loses its own prompts and batch: the ledger takes back what ran out."""
    [problem] = refused(RL, buffer={"lease_s": 600}, runtime={"step_timeout_s": 3600})
    assert "buffer.lease_s 600 is below runtime.step_timeout_s 3600" in problem
    assert refused(RL, buffer={"lease_s": 7200}, runtime={"step_timeout_s": 7200}) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden": 30}, "multiple of 8"),
        ({"heads": 4, "kv_heads": 3}, "must be a multiple of kv_heads 3"),
        ({"alphabet": ""}, "alphabet is empty"),
    ],
)
def test_tiny_models_that_cannot_be(model: dict[str, Any], message: str) -> None:
    [problem] = refused(RL, policy={"model": model})
    assert message in problem


def test_an_empty_taskset_is_refused() -> None:
    [problem] = planned(recipe_of(RL), tasks={"s0": 0}).problems
    assert "hold no task" in problem


def test_all_refusals_at_once() -> None:
    recipe = recipe_of({**RL, "sync": {"offset": 1}, "batch": {"group": 1}}, {**RL, "sampling": {"top_k": 3}})
    with pytest.raises(RecipeError, match="3 problems"):
        planned(recipe).check()


class Fake:
    """An algorithm that needs what nobody provides, as a user's own could."""

    kind, group_min = "mine", 1
    modes, consumes = ("both", "async"), ("rollout",)

    def __init__(self, *needs: str) -> None:
        self.needs = frozenset(needs)
        self.parts = [
            Part("objective", "distil", frozenset({"teacher_logp"})),
            Part("mask", "m", frozenset()),
        ]


class Part:
    def __init__(self, role: str, name: str, needs: frozenset[str]) -> None:
        self.role, self.name, self.needs = role, name, needs


def test_needs_name_who_needs_what_and_the_key_to_set() -> None:
    recipe = recipe_of(RL)
    algorithms = {"s0": Fake("teacher_logp", "top", "ref_logp", "proximal_logp")}
    [teacher, top] = plan(recipe, algorithms=algorithms).problems
    assert "mine (objective distil) needs teacher_logp: name a teacher" in teacher
    assert "mine (mine) needs top: set engine.top" in top
    with_top = recipe_of({**RL, "engine": {"top": 8}})
    gives = {"s0": {"teacher_logp": "another process"}}
    derived = plan(with_top, algorithms=algorithms, gives=gives)
    assert derived.problems == ()
    memory = derived.stages[0].memory
    assert memory["trainer: reference policy"] == memory["trainer: weights"]


def test_the_quick_start_can_be_run() -> None:
    derived = planned(load_recipe("quickstart")).check()
    assert derived.parameters is not None
    assert derived.parameters < 1_000_000


def test_a_phase_cannot_begin_to_play_greedy_answers() -> None:
    """Whether one is played is settled when the stage starts: from step 2 on there would be no baseline."""
    recipe = recipe_of({**RL, "algorithm": "grpo", "phases": [{"from": 2, "set": {"algorithm": "remax"}}]})
    [problem] = plan(recipe, algorithms=resolve_all(recipe)).problems
    assert "remax" in problem
    assert "greedy" in problem
