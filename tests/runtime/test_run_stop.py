"""How a run ends before its end, and when there is nothing to train on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import HERE, Killed, metrics, numbers, recipe, trained, weights

from trivet.recipe import RecipeError
from trivet.runtime import NothingToRead, NothingTrained, StepTimeout, reader, run_recipe
from trivet.runtime.evaluation import Evaluator
from trivet.runtime.pipeline import RunResult
from trivet.trainer import Trainer


def held_out(folder: Path, **settings: Any) -> dict[str, Any]:
    """An `eval` section with one task that is not trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "held.jsonl"
    data.write_text('{"id": "h1", "prompt": "99+98="}\n')
    tasks = {"source": str(data), "name": "held", "env": f"{HERE}:Lively", "fields": {"prompt": "prompt"}}
    return {"samples": 1, "tasks": [tasks]} | settings


def run(folder: Path, *overrides: str, **stage: Any) -> RunResult:
    return run_recipe(recipe(folder, *overrides, **stage), quiet=True)


@pytest.mark.parametrize("at", [4, 6], ids=["in the middle", "the last step"])
def test_a_stop_during_an_evaluation_trains_no_step_twice(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before the evaluation is done: it is what is kept, and its evaluation is made up for."""
    settings = {"epochs": None, "steps": 6, "checkpoints": {"every": 0}}
    run(tmp_path / "whole", **settings, eval=held_out(tmp_path, every=2))
    run_all = Evaluator.run_all

    async def stopped(self: Evaluator, step: int, **rest: Any) -> Any:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return await run_all(self, step, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run_all", stopped)
        assert run(tmp_path / "cut", **settings, eval=held_out(tmp_path, every=2)).stopped
    assert [p.name for p in (tmp_path / "cut/run/rl/checkpoints").iterdir()] == [f"step_{at:06d}"]
    assert run(tmp_path / "cut", **settings, eval=held_out(tmp_path, every=2)).stages["rl"]["step"] == 6
    assert numbers(tmp_path / "cut/run") == numbers(tmp_path / "whole/run")
    assert weights(tmp_path / "cut/run/rl/model") == weights(tmp_path / "whole/run/rl/model")


def test_evaluations_that_would_break_the_schedule_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"eval.every 3 is not a multiple of sync.interval 2"):
        run(tmp_path, epochs=None, steps=4, sync={"interval": 2}, eval=held_out(tmp_path, every=3))


def test_a_step_that_hangs_ends_with_its_stacks_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, released = Trainer.update, threading.Event()

    def hanging(self: Trainer, *args: Any, **rest: Any) -> Any:
        released.wait(60)
        return update(self, *args, **rest)

    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", hanging)
        with pytest.raises(StepTimeout, match=r"step 1 took over 3 s .* while training"):
            run(tmp_path, "runtime.step_timeout_s=3", epochs=None, steps=1)
    took = time.monotonic() - begin
    released.set()
    assert took < 45, "the error waited for what hangs"
    assert "hanging" in (tmp_path / "run/rl/stacks.txt").read_text()
    assert run(tmp_path, epochs=None, steps=1).stages["rl"]["step"] == 1


def test_a_bench_that_is_broken_off_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.runtime.test_run import pipeline

    run_all = Evaluator.run_all

    async def dying(self: Evaluator, step: int, *, suffix: str = "") -> Any:
        if suffix == "@rl":
            raise Killed
        return await run_all(self, step, suffix=suffix)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run_all", dying)
        with pytest.raises(Killed):
            pipeline(tmp_path)
    pipeline(tmp_path)
    names = [key for line in metrics(tmp_path / "run") for key in line if line["stage"] == "bench"]
    assert sorted(n for n in names if n.endswith("pass@1")) == [
        f"eval/sums@{model}/pass@1" for model in ("rl", "sft", "start")
    ]


# -- nothing to train on --------------------------------------------------------------------------


def test_a_stage_that_could_train_on_nothing_is_an_error(tmp_path: Path) -> None:
    window = {"window": {"above": 0.999, "max_rounds": 20}}
    with pytest.raises(NothingTrained, match=r"all of its 64 tasks .* \(too_low 64\).*explorer.window"):
        run(tmp_path, epochs=1, explorer=window)
    assert "model" not in os.listdir(tmp_path / "run/rl")


@pytest.mark.parametrize("rounds", [2, 100], ids=["rounds", "whole pass"])
def test_examples_none_of_which_fits_are_an_error(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_ROUNDS", rounds)
    data = tmp_path / "answers.jsonl"
    rows = (f'{{"prompt": "{i}+1=", "response": "{i + 1}"}}\n' for i in range(9))
    data.write_text("".join(rows))
    tasks = [{"source": str(data), "fields": {"prompt": "prompt", "response": "response"}}]
    with pytest.raises(NothingToRead, match=r"too_long \d+\); look at max_length \(2\)"):
        run(tmp_path, mode="train", algorithm="sft", batch={"prompts": 4}, tasks=tasks, max_length=2)
    assert not (tmp_path / "run/rl/model").exists()
    assert trained(tmp_path / "run")[0] == {}
