"""The examples run: shortened here, whole (and learning) when slow tests are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pages import ROOT

from trivet.recipe import load_recipe
from trivet.recipe.schema import TinyModel
from trivet.rewards.load import load_file
from trivet.sandbox import report

EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, float]:
    """Numbers of the last evaluation."""
    from trivet.runtime import run_recipe

    monkeypatch.chdir(EXAMPLES)
    always = [f"output={folder}/run", "runtime.threads=1", "monitor.plots=false"]
    recipe = load_recipe(EXAMPLES / name, [*always, *overrides])
    return run_recipe(recipe, quiet=True).stages["rl"]["evals"]


@pytest.mark.parametrize("name", ["digits.yaml", "best_of.yaml"])
def test_recipes_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["stages.rl.steps=1", "stages.rl.batch.prompts=4", "eval.tasks.0.limit=4", "eval.at_start=false"]
    assert "eval/digits/pass@1" in run(name, tmp_path, monkeypatch, *small)


def test_programs_are_run_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not {name: holds for name, holds, _ in report()}["bubblewrap"]:
        pytest.skip("no bubblewrap here")
    small = ["stages.sft.steps=2", "stages.rl.steps=1", "stages.rl.batch.prompts=4", "eval.tasks.0.limit=4"]
    small += [f"stages.{stage}.trainer.warmup_steps=0" for stage in ("sft", "rl")]
    assert run("programs.yaml", tmp_path, monkeypatch, *small)["eval/programs/pass@1"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits.yaml", "best_of.yaml"])
def test_recipes_learn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0 at the start; chance level is far below a tenth."""
    assert run(name, tmp_path, monkeypatch)["eval/digits/pass@1"] > 0.2


def test_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trivet.render.tiny import make_tiny

    example = load_file(EXAMPLES / "from_python.py")
    rollouts = example.main(make_tiny(TinyModel(), tmp_path / "tiny"))
    assert len(rollouts) == 8
    assert all(rollout.score is not None for rollout in rollouts)
    assert "log-probability" in capsys.readouterr().out


def test_best_of_keeps_the_best() -> None:
    """Rewards 0, 1, 1, 3 with share 0.25: the last. 2, 2: equal, nothing. A NaN is no candidate."""
    import numpy as np

    from trivet.trainer import collate

    example = load_file(EXAMPLES / "best_of.py")
    kept = example.best_of_group(collate(_groups([[0, 1, 1, 3], [2, 2], [None, 0, 1]])))
    assert np.flatnonzero(kept).tolist() == [3, 8]


def _groups(rewards: list[list[float | None]]) -> list:
    from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace, Unscored

    out = []
    for g, values in enumerate(rewards):
        task = Task("digits", (Message("user", f"{g}"),), id=f"t{g}")
        rollouts = []
        for i, value in enumerate(values):
            trace = Trace()
            trace.add_sampled(trace.add(-1, [1, 2]), [3, 4], [-1.0, -1.0], 0)
            reward = Unscored("none") if value is None else Scored(value)
            rollouts.append(
                Rollout(task, trace, reward, Termination.FINISHED, attempt=i, group=f"g{g}", id=f"{g}.{i}")
            )
        out.append(Group(f"g{g}", IssueKey(task.id, 1), rollouts))
    return out
