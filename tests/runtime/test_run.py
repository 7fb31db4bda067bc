"""Whole runs with the tiny model: schedules, stages, stops, proofs, bad input."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.support import (
    GROUP,
    HERE,
    STEPS,
    at_ack,
    killed_at,
    metrics,
    numbers,
    recipe,
    trained,
    weights,
)

from trivet.buffer import Ledger, LedgerError
from trivet.engine.base import WeightsNotArrived
from trivet.engine.torch import TorchEngine
from trivet.explorer import TooManyUnscored
from trivet.recipe import RecipeError
from trivet.runtime import RunFolderError, SetupError, run_recipe
from trivet.runtime.compose import _updates
from trivet.runtime.pipeline import RunResult
from trivet.runtime.stage import joined
from trivet.tasks import TasksetError


def run(folder: Path, *overrides: str, **stage: Any) -> RunResult:
    return run_recipe(recipe(folder, *overrides, **stage), quiet=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    return metrics(folder / "run")


def versions_by_step(folder: Path) -> dict[int, set[int]]:
    """The weight versions of the sampled tokens trained at each step."""
    out: dict[int, set[int]] = {}
    with Ledger(f"sqlite:///{folder / 'run' / 'ledger.sqlite'}", owner="test") as ledger:
        stage = ledger.stage("rl")
        keys = stage.keys("trained")  # type: ignore[arg-type]
        for n, group in enumerate(stage.groups(keys)):
            for rollout in group.rollouts:
                column = rollout.trace.column("version")[rollout.trace.column("sampled")]
                out.setdefault(n // 8 + 1, set()).update(column.tolist())
    return out


# -- schedules ------------------------------------------------------------------------------------


def test_every_second_step_the_engine_gets_new_weights(tmp_path: Path) -> None:
    """interval 2: lags 0, 1, 0, 1; batches 1 and 2 come from version 1, 3 and 4 from version 2."""
    run(tmp_path, epochs=None, steps=4, sync={"interval": 2}, checkpoints={"every": 0})
    assert [line["buffer/lag"] for line in lines(tmp_path)] == [0, 1, 0, 1]
    by_step = versions_by_step(tmp_path)
    assert by_step[1] == by_step[2] != by_step[3] == by_step[4]
    assert all(len(versions) == 1 for versions in by_step.values())


def test_a_run_that_syncs_late_resumes_exactly(tmp_path: Path) -> None:
    settings = {"epochs": None, "steps": 6, "sync": {"interval": 2}, "checkpoints": {"every": 1}}
    run(tmp_path / "whole", **settings)
    with killed_at(3):
        run(tmp_path / "cut", **settings)
    run(tmp_path / "cut", **settings)
    assert numbers(tmp_path / "cut" / "run") == numbers(tmp_path / "whole" / "run")
    assert weights(tmp_path / "cut/run/rl/model") == weights(tmp_path / "whole/run/rl/model")


def test_several_updates_a_batch(tmp_path: Path) -> None:
    """Groups that say nothing are refilled, so that each of the four parts of a batch has a gradient."""
    window = {"window": {"not_all_equal": True, "max_rounds": 20}}
    batch = {"prompts": 8, "group": GROUP, "updates_per_batch": 4}
    run(tmp_path, epochs=None, steps=2, batch=batch, explorer=window)
    assert [line["train/updates"] for line in lines(tmp_path)] == [4, 8]


def test_metrics_of_several_updates() -> None:
    first = {
        "time/train_s": 1.0,
        "train/lr": 0.1,
        "train/kl": 0.0,
        "train/pg/tokens": 5.0,
        "train/d_max": 3.0,
    }
    second = {
        "time/train_s": 2.0,
        "train/lr": 0.2,
        "train/kl": 0.4,
        "train/pg/tokens": 7.0,
        "train/d_max": 1.0,
    }
    skipped = {"train/skipped": 1.0, "train/kl": 9.0}
    assert joined([skipped, skipped]) == skipped
    assert joined([first, skipped, second]) == {
        "time/train_s": 3.0,
        "train/lr": 0.2,
        "train/kl": 0.2,
        "train/pg/tokens": 12.0,
        "train/d_max": 3.0,
    }


def test_phases_change_settings(tmp_path: Path) -> None:
    phases = [{"from": 2, "set": {"trainer.lr": 0.5, "sampling.max_tokens": 2, "algorithm.tis": None}}]
    run(tmp_path, epochs=None, steps=2, phases=phases)
    first, second = lines(tmp_path)
    assert (first["train/lr"], second["train/lr"]) == (0.01, 0.5)
    assert first["rollout/length_max"] > 2 >= second["rollout/length_max"]
    assert "train/pg/tis_factor" in first
    assert "train/pg/tis_factor" not in second


def test_a_schedule_counts_the_updates_of_all_phases(tmp_path: Path) -> None:
    phases = [{"from": 3, "set": {"batch.updates_per_batch": 4}}]
    stage = recipe(tmp_path, epochs=None, steps=5, phases=phases).stages[0]
    assert [_updates(stage, steps) for steps in (1, 2, 5)] == [1, 2, 2 + 3 * 4]


def test_the_last_batch_is_what_is_left(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, batch={"prompts": 24, "group": GROUP})
    assert [line["train/prompts"] for line in lines(tmp_path)] == [24, 24, 16]


# -- windows --------------------------------------------------------------------------------------


def test_a_window_drops_refills_and_replays(tmp_path: Path) -> None:
    settings = {
        "epochs": None,
        "steps": 4,
        "explorer": {"window": {"above": 0.05, "max_rounds": 6}},
        "checkpoints": {"every": 0},
    }
    run(tmp_path / "whole", **settings)
    whole = lines(tmp_path / "whole")
    assert all(line["train/prompts"] == 8 for line in whole)
    assert sum(line["explorer/filtered"] for line in whole) > 0
    _, _, states = trained(tmp_path / "whole/run")
    assert states["trained"] == 32
    assert states["filtered"] == sum(line["explorer/filtered"] for line in whole)
    with killed_at(3):
        run(tmp_path / "cut", **settings)
    run(tmp_path / "cut", **settings)
    assert numbers(tmp_path / "cut/run") == numbers(tmp_path / "whole/run")
    assert trained(tmp_path / "cut/run") == trained(tmp_path / "whole/run")


def test_a_window_that_nothing_passes_is_said_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    window = {"above": 0.999, "max_rounds": 1}
    run(tmp_path, epochs=None, steps=2, explorer={"window": window}, checkpoints={"every": 1})
    assert [line["train/skipped"] for line in lines(tmp_path)] == [1, 1]
    said = " ".join(capsys.readouterr().out.split())
    assert "0 of 8 groups were accepted" in said
    assert "groups by mean reward" in said


# -- stages ---------------------------------------------------------------------------------------

PIPELINE = """
name: pipeline
output: {output}
policy: {{model: {{hidden: 16, layers: 1, heads: 2, kv_heads: 1, mlp: 32, context: 64}}}}
runtime: {{threads: 1}}
monitor: {{plots: false}}
sampling: {{max_tokens: 6}}
eval:
  every: 2
  samples: 2
  k: [1, 2]
  tasks: [{{source: "generated:addition", name: sums, split: test, limit: 4, args: {{form: plain}}}}]
stages:
  - name: sft
    mode: train
    algorithm: sft
    tasks: [{{source: "generated:addition", args: {{form: plain}}}}]
    batch: {{prompts: 8}}
    steps: 4
  - name: rl
    mode: both
    tasks: [{{source: "generated:addition", args: {{form: plain}}}}]
    batch: {{prompts: 4, group: 2}}
    steps: 2
  - name: bench
    mode: bench
"""


def pipeline(folder: Path, *overrides: str) -> RunResult:
    from trivet.recipe import load_recipe

    folder.mkdir(exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text(PIPELINE.format(output=folder / "run"))
    return run_recipe(load_recipe(path, list(overrides)), quiet=True)


def test_stages_follow_one_another_and_are_not_run_twice(tmp_path: Path) -> None:
    result = pipeline(tmp_path)
    assert list(result.stages) == ["sft", "rl", "bench"]
    assert result.model == tmp_path / "run/rl/model"
    seen = [(line["stage"], line["step"]) for line in lines(tmp_path)]
    assert seen.count(("sft", 0)) == 1
    assert ("rl", 0) in seen
    tables = json.loads((tmp_path / "run/tables.json").read_text())
    assert [row[0] for row in tables[-1]["rows"]] == ["start", "sft", "rl"]
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = pipeline(tmp_path)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert again.stages == result.stages
    assert (tmp_path / "run/report.html").exists()


def test_the_next_stage_starts_from_the_one_before(tmp_path: Path) -> None:
    """What the first stage ends with, the second begins with, to the digit."""
    pipeline(tmp_path)
    evals = {
        (line["stage"], line["step"]): line["eval/sums/reward"]
        for line in lines(tmp_path)
        if "eval/sums/reward" in line
    }
    lengths = {
        (line["stage"], line["step"]): line["eval/sums/length"]
        for line in lines(tmp_path)
        if "eval/sums/length" in line
    }
    assert evals["sft", 4] == evals["rl", 0]
    assert lengths["sft", 4] == lengths["rl", 0]


def test_until_ends_a_stage(tmp_path: Path) -> None:
    result = pipeline(tmp_path, "stages.sft.until={metric: eval/sums/reward, below: 2}")
    assert result.stages["sft"]["step"] == 0
    assert "eval/sums/reward" in result.stages["sft"]["why"]


def test_until_with_an_unknown_metric_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"pass@3; eval.k computes pass@1, pass@2"):
        pipeline(tmp_path, "stages.sft.until={metric: eval/sums/pass@3, above: 0.5}")


def test_a_killed_supervised_stage_resumes_exactly(tmp_path: Path) -> None:
    pipeline(tmp_path / "whole")
    with killed_at(3):
        pipeline(tmp_path / "cut", "stages.sft.checkpoints.every=2")
    pipeline(tmp_path / "cut", "stages.sft.checkpoints.every=2")
    assert numbers(tmp_path / "cut/run") == numbers(tmp_path / "whole/run")
    for stage in ("sft", "rl"):
        assert weights(tmp_path / f"cut/run/{stage}/model") == weights(tmp_path / f"whole/run/{stage}/model")


def test_evaluating_on_training_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"4 tasks of evaluation 'sums' are also trained on"):
        pipeline(tmp_path, "eval.tasks.0.split=train")


# -- stopping -------------------------------------------------------------------------------------


def test_a_signal_stops_at_a_safe_point_and_the_next_run_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    with at_ack(5, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = run(tmp_path / "cut")
    assert stopped.stopped is not None
    assert "SIGTERM" in stopped.stopped
    assert stopped.stages == {}
    assert len(lines(tmp_path / "cut")) == 5
    whole = run(tmp_path / "cut")
    assert whole.stopped is None
    assert whole.stages["rl"]["step"] == STEPS
    assert numbers(tmp_path / "cut/run") == numbers(tmp_path / "whole/run")


def test_a_signal_while_sampling_gives_the_issues_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = TorchEngine.generate, []

    async def signalling(self: TorchEngine, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 40:  # in the second step
            os.kill(os.getpid(), signal.SIGINT)
        return await generate(self, *args, **kwargs)

    monkeypatch.setattr(TorchEngine, "generate", signalling)
    assert run(tmp_path, epochs=1).stopped is not None
    _, _, states = trained(tmp_path / "run")
    assert states == {"trained": 8, "issued": 56}
    assert run(tmp_path, epochs=1).stages["rl"]["step"] == 8


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("proof", ["checksum", "probe"])
def test_an_engine_that_keeps_old_weights_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: str
) -> None:
    """It accepts the second update and keeps the first one's weights."""
    from trivet.engine.torch import engine as module

    load, calls = module.load_in_place, []

    def lazy(model: Any, tensors: Any) -> dict[str, str]:
        calls.append(1)
        return load(model, tensors if len(calls) == 1 else dict(model.tensors))

    monkeypatch.setattr(module, "load_in_place", lazy)
    with pytest.raises(WeightsNotArrived, match="version 2"):
        run(tmp_path, f"weights.proof={proof}", epochs=None, steps=2)
    monkeypatch.setattr(module, "load_in_place", load)
    assert run(tmp_path, f"weights.proof={proof}", epochs=None, steps=2).stages["rl"]["step"] == 2


def test_an_engine_that_fails_half_way_is_named_and_the_next_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = TorchEngine.update, []

    def failing(self: TorchEngine, tensors: Any, version: int) -> dict[str, str]:
        calls.append(1)
        if len(calls) == 2:
            some = dict(list(tensors.items())[:2])
            return update(self, some, version)
        return update(self, tensors, version)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "update", failing)
        with pytest.raises((WeightsNotArrived, ValueError, RuntimeError), match=r"layers\.0"):
            run(tmp_path, epochs=None, steps=2)
    assert run(tmp_path, epochs=None, steps=2).stages["rl"]["step"] == 2


def test_weights_over_disk_are_the_same_weights(tmp_path: Path) -> None:
    run(tmp_path / "memory", epochs=None, steps=3)
    run(tmp_path / "disk", "weights.transport=disk", epochs=None, steps=3)
    assert numbers(tmp_path / "disk/run") == numbers(tmp_path / "memory/run")
    assert list((tmp_path / "disk/run/rl/weights").glob("*.safetensors"))


def test_the_first_step_trains_on_the_policy_that_sampled(tmp_path: Path) -> None:
    run(tmp_path, epochs=None, steps=1, sampling={"max_tokens": 4, "temperature": 0.7})
    (line,) = lines(tmp_path)
    assert line["train/pg/abs_log_diff"] < 1e-3


# -- bad input ------------------------------------------------------------------------------------

FUNCTIONS = """
import math, time
def raises(task, text): raise ValueError("own words")
def hangs(task, text): time.sleep(600)
def nan(task, text): return math.nan
def words(task, text): return "good"
def nothing(task, text): return None
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "own words"),
        ("hangs", "verifier_timeout"),
        ("nan", "nan"),
        ("words", "good"),
        ("nothing", "None"),
    ],
)
def test_a_reward_function_that_fails_never_gives_a_zero(tmp_path: Path, name: str, said: str) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text(FUNCTIONS)
    made = recipe(tmp_path)
    tasks = {
        "source": made.stages[0].tasks[0].source,
        "env": "callable",
        "env_args": {"function": f"{functions}:{name}", "limit_s": 0.5},
    }
    batch = {"prompts": 1, "group": 2}
    with pytest.raises(TooManyUnscored, match=said):
        run(tmp_path, tasks=[tasks], batch=batch, epochs=None, steps=1)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_recipe_of_a_run_cannot_change_under_it(tmp_path: Path) -> None:
    run(tmp_path, epochs=None, steps=1)
    with pytest.raises(RunFolderError, match=r"stages\.0\.trainer\.lr"):
        run(tmp_path, "stages.rl.trainer.lr=0.5", epochs=None, steps=1)
    longer = run(tmp_path, epochs=None, steps=2)  # how long it runs may change, but the stage is done
    assert longer.stages["rl"]["step"] == 1
    fresh = run_recipe(recipe(tmp_path, epochs=None, steps=2), fresh=True, quiet=True)
    assert fresh.stages["rl"]["step"] == 2
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()


def test_two_processes_cannot_share_a_run_folder(tmp_path: Path) -> None:
    from trivet.runtime.folder import RunFolder

    made = recipe(tmp_path)
    folder = RunFolder.open(made)
    try:
        with pytest.raises(RunFolderError, match=f"process {os.getpid()} is running"):
            RunFolder.open(made)
    finally:
        folder.close()
    RunFolder.open(made).close()


def test_other_data_under_a_run_is_refused(tmp_path: Path) -> None:
    with killed_at(1, before=True):
        run(tmp_path)
    data = tmp_path / "prompts.jsonl"
    data.write_text(data.read_text().replace("00+00", "99+00"))
    with pytest.raises(LedgerError, match="other data"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "'a'"),
        ('{"id": "a", "prompt": "x"}\nnot json\n', ":2"),
        ('{"id": "a", "prmpt": "x"}\n', "prompt"),
    ],
)
def test_broken_tasksets_are_named(tmp_path: Path, content: str, said: str) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text(content)
    fields = {"prompt": "prompt", "id": "id"}
    tasks = {"source": str(data), "env": f"{HERE}:Lively", "fields": fields}
    with pytest.raises(TasksetError, match=said):
        run(tmp_path, tasks=[tasks])


def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="trivet model import"):
        run(tmp_path, f"policy.model={tmp_path / 'nowhere'}")


def test_offsets_and_inexact_sampling_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="offset"):
        run(tmp_path, sync={"interval": 1, "offset": 1})
    with pytest.raises(RecipeError, match="top_p"):
        run(tmp_path, sampling={"max_tokens": 4, "top_p": 0.9})
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_template_is_named(tmp_path: Path) -> None:
    from trivet.recipe.schema import TinyModel
    from trivet.render import RenderError
    from trivet.render.tiny import make_tiny

    model = make_tiny(TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32), tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RenderError, match="chat template"):
        run(tmp_path, f"policy.model={model}")


def test_sampled_tokens_are_what_is_trained(tmp_path: Path) -> None:
    """Ids in the ledger are those the engine gave, log-probabilities those of its own forward."""
    run(tmp_path, epochs=None, steps=1, checkpoints={"every": 0})
    with Ledger(f"sqlite:///{tmp_path / 'run' / 'ledger.sqlite'}", owner="test") as ledger:
        stage = ledger.stage("rl")
        rollout = stage.groups(stage.keys("trained"))[0].rollouts[0]  # type: ignore[arg-type]
    (row,) = rollout.trace.rows()
    engine = TorchEngine(tmp_path / "run" / "tiny", slots=2, context=64)
    try:
        expected = engine.logprobs(row.ids_T)
    finally:
        engine.close()
    ours = row.logprob_T[row.sampled_T]
    np.testing.assert_allclose(ours, expected[row.sampled_T[1:]], atol=1e-4)
