"""Phases: settings that change from a step on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trivet.recipe import RecipeError, Stage, load_recipe

TEXT = """
stages:
  - name: rl
    steps: 100
    algorithm: grpo
    trainer: {lr: 1e-3}
    phases:
      - {from: 50, set: {trainer.lr: 3e-4, sampling.max_tokens: 32}}
      - {from: 20, set: {trainer.lr: 5e-4, batch.prompts: 3, algorithm.clip: 0.1}}
"""


def load(tmp_path: Path, text: str) -> Stage:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path).stages[0]


def test_later_phases_lie_on_top(tmp_path: Path) -> None:
    stage = load(tmp_path, TEXT)
    assert stage.at(1) is stage
    assert stage.at(19) is stage
    at20, at50 = stage.at(20), stage.at(50)
    assert (at20.trainer.lr, at20.batch.prompts, at20.sampling.max_tokens) == (
        5e-4,
        3,
        stage.sampling.max_tokens,
    )
    assert (at50.trainer.lr, at50.sampling.max_tokens) == (3e-4, 32)
    assert at50.batch.prompts == 3
    assert at50.algorithm == {"kind": "grpo", "clip": 0.1}
    assert stage.at(1000) == at50
    assert at50.phases == []
    assert (stage.trainer.lr, stage.batch.prompts) == (1e-3, 32)  # untouched


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("{trainer.lerning_rate: 1}", r"r.yaml:6: phases.0.set: stages.0.trainer.lerning_rate .* mean `lr`"),
        ("{trainer.lr: fast}", r"r.yaml:6: phases.0.set: stages.0.trainer.lr must be a number"),
        ("{steps: 5}", r"r.yaml:6: stages.0.phases.0.set: a phase cannot set 'steps'"),
        ("{mode: train}", "cannot set 'mode'"),
        ("{trainer..lr: 1}", "not a dotted path"),
        ("{sampling.stop.3: x}", "no item '3'"),
        # What is read once, when the stage is put together: a phase would change nothing.
        ("{tasks.0.limit: 1}", "cannot set 'tasks.0.limit'"),
        ("{engine.slots: 4}", "cannot set 'engine.slots'"),
        ("{eval.every: 4}", "cannot set 'eval.every'"),
        ("{checkpoints.every: 4}", "cannot set 'checkpoints.every'"),
        ("{batch.micro_tokens: 99}", "cannot set 'batch.micro_tokens'"),
        ("{trainer.dtype: bfloat16}", "cannot set 'trainer.dtype'"),
        ("{trainer: {lr: 1}}", "cannot set 'trainer' as a whole: name the keys"),
        ("{}", "must not be empty"),
    ],
)
def test_bad_phases_are_refused_when_loading(tmp_path: Path, phase: str, message: str) -> None:
    text = f"stages:\n  - name: rl\n    steps: 9\n    phases:\n      - from: 3\n        set: {phase}\n"
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, text)


def test_from_begins_at_one(tmp_path: Path) -> None:
    text = "stages:\n  - {name: rl, steps: 9, phases: [{from: 0, set: {trainer.lr: 1}}]}\n"
    with pytest.raises(RecipeError, match=r"phases.0.from must be greater than or equal to 1"):
        load(tmp_path, text)
