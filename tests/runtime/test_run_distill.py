"""On-policy distillation in a whole run: a teacher named in the recipe pulls the policy towards it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.runtime.support import TINY, killed_at, metrics, numbers, recipe, weights

from trivet.recipe import RecipeError
from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny
from trivet.runtime import run_recipe
from trivet.trainer import Trainer


def distil(folder: Path, teacher: Path | None, *overrides: str, **more: Any) -> Any:
    stage = {
        "algorithm": "on_policy_distillation",
        "batch": {"prompts": 16, "group": 1},
        "checkpoints": {"every": 2},
        "epochs": None,
        "trainer": {"lr": 1e-2},
        "steps": 6,
    }
    named = (f"models.teacher.model={teacher}",) if teacher else ()
    return recipe(folder, *named, *overrides, **(stage | more))


def opinionated(folder: Path) -> Path:
    """A random model whose logits are large: far from a policy from random weights."""
    teacher = make_tiny(TinyModel(**(TINY | {"seed": 7})), folder)
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.norm.weight"] = 5 * tensors["model.norm.weight"]
    save_file(tensors, teacher / "model.safetensors", {"format": "pt"})
    return teacher


def test_the_policy_comes_closer(tmp_path: Path) -> None:
    """The loss is minus the mean of log teacher - log mu: an estimate of KL(pi, teacher) on 256 tokens."""
    batch = {"prompts": 64, "group": 1}
    run = distil(tmp_path, opinionated(tmp_path / "teacher"), batch=batch, steps=30, checkpoints={"every": 0})
    run_recipe(run, quiet=True)
    losses = [line["train/pg/loss"] for line in metrics(tmp_path / "run") if "train/pg/loss" in line]
    assert sum(losses[:5]) > 0.2
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    teacher = opinionated(tmp_path / "teacher")
    run_recipe(distil(tmp_path / "whole", teacher), quiet=True)
    with killed_at(5):
        run_recipe(distil(tmp_path / "cut", teacher), quiet=True)
    run_recipe(distil(tmp_path / "cut", teacher), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")


def test_without_a_teacher_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"models: \{teacher"):
        run_recipe(distil(tmp_path, None), quiet=True)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = make_tiny(TinyModel(**(TINY | {"alphabet": "0123456789+="})), tmp_path / "other")
    with pytest.raises(ValueError, match="the teacher has another tokenizer"):
        run_recipe(distil(tmp_path, other), quiet=True)
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as ledger:  # before anything is sampled
        assert ledger.execute("select count(*) from issues").fetchone() == (0,)


def test_a_teacher_of_another_stage_is_not_looked_at(tmp_path: Path) -> None:
    other = make_tiny(TinyModel(**(TINY | {"alphabet": "0123456789+="})), tmp_path / "other")
    run = distil(tmp_path, other, algorithm="grpo", batch={"prompts": 8, "group": 2}, steps=1)
    assert run_recipe(run, quiet=True)


def test_a_reference_from_elsewhere(tmp_path: Path) -> None:
    """`models.reference` replaces the stage's start: the distance to it is not 0 at the first step."""
    other = make_tiny(TinyModel(**(TINY | {"seed": 3})), tmp_path / "other")
    found = {}
    for name, more in (("start", ()), ("other", (f"models.reference.model={other}",))):
        algorithm = {"kind": "grpo", "kl": "k3", "kl_weight": 0.1}
        run = distil(
            tmp_path / name, None, *more, algorithm=algorithm, batch={"prompts": 8, "group": 2}, steps=1
        )
        run_recipe(run, quiet=True)
        found[name] = next(line for line in metrics(tmp_path / name / "run") if "train/kl/loss" in line)
    assert abs(found["start"]["train/kl/loss"]) < 1e-6
    assert found["other"]["train/kl/loss"] > 1e-4, json.dumps(found["other"])


def regularised(folder: Path, **stage: Any) -> Any:
    algorithm = {"kind": "grpo", "kl": "k3", "kl_weight": 0.1, "clip": 0.2}
    batch = {"prompts": 8, "group": 2, "updates_per_batch": 2}
    return distil(folder, None, algorithm=algorithm, batch=batch, **stage)


def test_the_reference_stays_the_start_when_a_run_goes_on(tmp_path: Path) -> None:
    """A frozen copy taken from the checkpoint instead would make the distance 0 again."""
    run_recipe(regularised(tmp_path / "whole"), quiet=True)
    with killed_at(5):
        run_recipe(regularised(tmp_path / "cut"), quiet=True)
    run_recipe(regularised(tmp_path / "cut"), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    assert [line for line in metrics(two) if "train/kl/loss" in line][-1]["train/kl/loss"] > 1e-5


def test_rows_without_a_loss_are_not_annotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of equal rewards have none; with them annotated too a run learns the same."""
    annotate, dead = Trainer.annotate, []

    def all_of_it(self: Trainer, batch: Any, needs: Any, *, only_T: Any = None) -> dict[str, float]:
        return annotate(self, batch, needs)

    def watched(self: Trainer, batch: Any, needs: Any, *, only_T: Any = None) -> dict[str, float]:
        out = annotate(self, batch, needs, only_T=only_T)
        if needs:
            known_T = np.isfinite(batch.annotations["proximal_logp"])
            assert (known_T == only_T).all()
            dead.append(int(((batch.train_T > 0) & ~known_T).sum()))
        return out

    found = []
    for name, method in (("all", all_of_it), ("some", watched)):
        monkeypatch.setattr(Trainer, "annotate", method)
        algorithm = {"kind": "grpo", "clip": 0.2}
        batch = {"prompts": 8, "group": 2, "updates_per_batch": 2}
        run_recipe(distil(tmp_path / name, None, algorithm=algorithm, batch=batch, steps=3), quiet=True)
        found.append([line["train/grad_norm"] for line in metrics(tmp_path / name / "run") if "step" in line])
    assert len(dead) == 6
    assert sum(dead) > 0
    assert found[0] == pytest.approx(found[1], rel=1e-4)
