"""Supervised stages on packed data, whole: they learn, they resume to the row, they hand on the best."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.runtime.packed_support import as_jsonl, examples, packs_of, recipe, write_packs
from tests.runtime.support import Killed, die, metrics, numbers, weights

from trivet.buffer import LedgerError
from trivet.data.shards import PackedData
from trivet.recipe import RecipeError, plan
from trivet.recipe.schema import Recipe
from trivet.runtime import SetupError, run_recipe
from trivet.runtime.packed import OtherData, PackedRun
from trivet.runtime.packs import PackOrder, pack_lengths, packed_numbers
from trivet.runtime.stage import StageRun
from trivet.trainer import checkpoint

WEIGHT = {"id": "id", "prompt": "prompt", "response": "response", "payload.weight": "weight"}
SLOW = pytest.mark.slow


def trained(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "train/loss" in line]


@contextlib.contextmanager
def killed(owner: type, method: str, at: int) -> Iterator[None]:
    """What runs inside dies once `method` has been awaited for step `at`."""
    plain = getattr(owner, method)

    async def dying(self: Any, step: int, *args: Any, **more: Any) -> Any:
        out = await plain(self, step, *args, **more)
        if step == at:
            die()
        return out

    with mock.patch.object(owner, method, dying), pytest.raises(Killed):
        yield


def same(one: Path, two: Path, stage: str = "sft") -> None:
    assert numbers(one) == numbers(two)
    assert weights(one / stage / "model") == weights(two / stage / "model")


def selecting(folder: Path, *overrides: str, **stage: Any) -> Recipe:
    """Held-out loss every second step; the best checkpoint is handed on."""
    held = folder.parent / "held"
    if not held.exists():
        write_packs(held, packs_of(examples(20, first=500)))
    more: dict[str, Any] = {
        "held_out": {"packed": str(held), "every": 2},
        "keep_best": {"metric": "eval/held_out/loss"},
        "trainer": {"lr": 5e-2},
        "checkpoints": {"every": 3},
        "epochs": 8,
    }
    return recipe(folder, *overrides, **(more | stage))


# -- training ------------------------------------------------------------------------------------


def test_it_learns_and_says_of_what(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path, epochs=6), quiet=True)
    lines = trained(tmp_path / "run")
    data = PackedData(tmp_path / "data")
    assert len(lines) == -(-6 * len(data) // 4)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.5
    names = {"train/loss/source/plus", "train/loss/source/my_even~82db", "train/loss/category/arithmetic"}
    assert all(names <= set(line) for line in lines)
    assert lines[-1]["train/epoch"] == 6.0
    assert sum(line["train/prompts"] for line in lines) == 6 * 60
    assert sum(line["train/tokens"] for line in lines) == 6 * data.tokens
    assert sum(line["train/trained_tokens"] for line in lines) == 6 * data.trained


def test_the_ledger_holds_no_rows_of_packs(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path), quiet=True)
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.execute("select count(*) from issues").fetchone() == (0,)


def test_the_first_step_is_that_of_the_same_examples(tmp_path: Path) -> None:
    """All data in one step: packed and not packed, loss and weights agree to float32's rounding."""
    rows = examples(40)
    whole = recipe(tmp_path / "a", rows=40, batch={"packs": 100}, epochs=1)
    tasks = [{"source": str(as_jsonl(tmp_path / "rows.jsonl", rows)), "fields": WEIGHT}]
    plain = {"packed": None, "tasks": tasks, "batch": {"prompts": 40}, "epochs": 1}
    run_recipe(whole, quiet=True)
    run_recipe(recipe(tmp_path / "b", **plain), quiet=True)
    one, two = trained(tmp_path / "a" / "run"), trained(tmp_path / "b" / "run")
    assert len(one) == len(two) == 1
    for key in ("train/loss", "train/grad_norm"):
        assert one[0][key] == pytest.approx(two[0][key], rel=1e-6)
    assert one[0]["train/trained_tokens"] == two[0]["train/trained_tokens"]
    assert two[0]["train/loss/source/rows"] == pytest.approx(two[0]["train/loss"], rel=1e-6)


def test_a_step_in_tokens(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path, batch={"tokens": 150}, epochs=1), quiet=True)
    lines = trained(tmp_path / "run")
    data = PackedData(tmp_path / "data")
    assert all(line["train/tokens"] <= 150 for line in lines)
    assert sum(line["train/tokens"] for line in lines) == data.tokens
    order = PackOrder(pack_lengths(data).tokens_P, packs=None, tokens=150, epochs=1, seed=0)
    assert len(lines) == order.steps


def test_updates_phases_and_schedules(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "batch": {"packs": 4, "updates_per_batch": 2},
        "trainer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.5},
        "phases": [{"from": 3, "set": {"trainer.weight_decay": 0.1}}],
    }
    run_recipe(recipe(tmp_path, **more), quiet=True)
    rates = [line["train/lr"] for line in trained(tmp_path / "run")]
    assert [line["train/updates"] for line in trained(tmp_path / "run")] == [2, 4, 6, 8, 10]
    assert rates[0] == 1e-2  # after two updates of warm-up
    assert all(a > b > 0.5e-2 for a, b in pairwise(rates))


# -- resuming ------------------------------------------------------------------------------------


OTHERS = [({key: n}, step) for key, n in (("packs", 4), ("tokens", 230)) for step in (1, 2, 4)]


@pytest.mark.parametrize(
    ("batch", "step"),
    [({"packs": 4}, 3), ({"tokens": 230}, 5), *(pytest.param(*other, marks=SLOW) for other in OTHERS)],
)
def test_killed_at_a_step(tmp_path: Path, batch: dict[str, int], step: int) -> None:
    run_recipe(recipe(tmp_path / "whole", batch=batch), quiet=True)
    with killed(PackedRun, "train", step):
        run_recipe(recipe(tmp_path / "cut", batch=batch), quiet=True)
    run_recipe(recipe(tmp_path / "cut", batch=batch), quiet=True)
    same(tmp_path / "whole" / "run", tmp_path / "cut" / "run")


@pytest.mark.parametrize("method", ["train", "evaluate", "_held_out_loss", "keep"])
@pytest.mark.parametrize("step", [6, pytest.param(12, marks=SLOW)])
def test_a_killed_stage_selects_the_same(tmp_path: Path, method: str, step: int) -> None:
    """Cut before, in and after an evaluation and a checkpoint; the best one lies before the last."""
    result = run_recipe(selecting(tmp_path / "whole"), quiet=True)
    owner = PackedRun if method == "train" else StageRun
    with killed(owner, method, step):
        run_recipe(selecting(tmp_path / "cut"), quiet=True)
    again = run_recipe(selecting(tmp_path / "cut"), quiet=True)
    same(tmp_path / "whole" / "run", tmp_path / "cut" / "run")
    for key in ("selected", "step", "why", "evals"):
        assert result.stages["sft"][key] == again.stages["sft"][key]


CHILD = """
import sys
from pathlib import Path
from tests.runtime.test_run_packed import selecting
from trivet.runtime import run_recipe
if __name__ == "__main__":
    run_recipe(selecting(Path(sys.argv[1])), quiet=True)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], env=environment, cwd=root)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7, 10])
def test_kill_minus_nine(tmp_path: Path, step: int) -> None:
    run_recipe(selecting(tmp_path / "whole"), quiet=True)
    folder = tmp_path / "cut"
    selecting(folder)
    child = start(folder)
    lines, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    try:
        while time.monotonic() < deadline and child.poll() is None:
            if lines.exists() and f'"step":{step},' in lines.read_text():
                break
            time.sleep(0.002)
        assert child.poll() is None, "the run ended before it could be killed"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert start(folder).wait(180) == 0
    same(tmp_path / "whole" / "run", folder / "run")


def test_other_data_are_refused(tmp_path: Path) -> None:
    with killed(PackedRun, "train", 3):
        run_recipe(recipe(tmp_path), quiet=True)
    for part in (tmp_path / "data" / "packed").glob("*"):
        part.unlink()
    write_packs(tmp_path / "data", packs_of(examples(60, first=100)))
    with pytest.raises(LedgerError, match="other data"):
        run_recipe(recipe(tmp_path), quiet=True)


def test_a_checkpoint_knows_its_data_too(tmp_path: Path) -> None:
    """Where the ledger does not: it says nothing about data it was never told of."""
    with killed(PackedRun, "train", 3):
        run_recipe(recipe(tmp_path), quiet=True)
    for part in (tmp_path / "data" / "packed").glob("*"):
        part.unlink()
    write_packs(tmp_path / "data", packs_of(examples(60, first=100)))
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as ledger:
        ledger.execute("update stages set fingerprint = ''")
    with pytest.raises(OtherData, match=r"trained on other packs(?s:.*)--fresh"):
        run_recipe(recipe(tmp_path), quiet=True)


def test_another_order_is_refused(tmp_path: Path) -> None:
    """The recipe is the same, and what it comes to is not: the rule of the order has changed, say."""
    with killed(PackedRun, "train", 3):
        run_recipe(recipe(tmp_path), quiet=True)
    with (
        mock.patch.object(PackOrder, "_permutation", lambda self, epoch: list(range(len(self.tokens_P)))),
        pytest.raises(OtherData, match=r"goes on with .*'epoch': 1"),
    ):
        run_recipe(recipe(tmp_path), quiet=True)


# -- held-out loss and selection -----------------------------------------------------------------


def test_the_best_is_handed_on(tmp_path: Path) -> None:
    """The model of the stage is the one whose held-out loss was lowest, and only that one is kept."""
    result = run_recipe(selecting(tmp_path / "a"), quiet=True)
    run = tmp_path / "a" / "run"
    lines = [line for line in metrics(run) if "eval/held_out/loss" in line]
    losses = {line["step"]: line["eval/held_out/loss"] for line in lines}
    last = result.stages["sft"]["step"]
    assert list(losses) == sorted({*range(0, last + 1, 2), last})
    best = min(losses, key=lambda step: (losses[step], step))
    assert best != result.stages["sft"]["step"]  # else it shows nothing
    assert result.stages["sft"]["selected"] == best
    assert [path.name for path in (run / "sft" / "best").iterdir()] == [f"step_{best:06d}"]
    run_recipe(selecting(tmp_path / "b", steps=best, keep_best=None), quiet=True)
    assert weights(run / "sft" / "model") == weights(tmp_path / "b" / "run" / "sft" / "model")


def test_a_plateau_ends_the_stage(tmp_path: Path) -> None:
    rule = {"metric": "eval/held_out/loss", "patience": 2, "min_delta": 0.5}
    result = run_recipe(selecting(tmp_path / "a", keep_best=rule, epochs=50), quiet=True)
    facts = result.stages["sft"]
    assert facts["why"] == "no progress of eval/held_out/loss in 2 evaluations"
    assert facts["step"] < 50
    again = run_recipe(selecting(tmp_path / "a", keep_best=rule, epochs=50), quiet=True)
    assert again.stages["sft"] == facts


def test_damaged_weights_are_not_handed_on(tmp_path: Path) -> None:
    with killed(StageRun, "keep", 12):
        run_recipe(selecting(tmp_path / "a"), quiet=True)
    for path in (tmp_path / "a" / "run" / "sft" / "best").glob("*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with (
        mock.patch("trivet.runtime.selection.Selection.look"),
        pytest.raises(checkpoint.CheckpointError, match="its checksum differs"),
    ):
        run_recipe(selecting(tmp_path / "a"), quiet=True)


def test_held_out_tasks_are_measured_as_packs_are(tmp_path: Path) -> None:
    rows = examples(20, first=500)
    tasks = [{"source": str(as_jsonl(tmp_path / "held.jsonl", rows)), "name": "mine", "fields": WEIGHT}]
    stage: dict[str, Any] = {"keep_best": None, "epochs": 1}
    run_recipe(selecting(tmp_path / "a", **stage), quiet=True)
    run_recipe(selecting(tmp_path / "b", held_out={"tasks": tasks, "every": 2}, **stage), quiet=True)
    one, two = (
        [line for line in metrics(tmp_path / x / "run") if "eval/held_out/loss" in line] for x in "ab"
    )
    assert len(one) == len(two) >= 2
    for a, b in zip(one, two, strict=True):
        assert a["eval/held_out/loss"] == pytest.approx(b["eval/held_out/loss"], rel=1e-6)
        assert a["eval/held_out/tokens"] == b["eval/held_out/tokens"]
        assert b["eval/held_out/loss/source/mine"] == b["eval/held_out/loss"]


def test_an_unpacked_stage_selects_too(tmp_path: Path) -> None:
    tasks = [{"source": str(as_jsonl(tmp_path / "rows.jsonl", examples(40)))}]
    plain = {"packed": None, "tasks": tasks, "batch": {"prompts": 10}, "steps": 20, "epochs": None}
    result = run_recipe(selecting(tmp_path / "a", **plain), quiet=True)
    losses = [
        (line["eval/held_out/loss"], line["step"])
        for line in metrics(tmp_path / "a" / "run")
        if "eval/held_out/loss" in line
    ]
    assert result.stages["sft"]["selected"] == min(losses)[1]


def test_the_last_step_ends_by_a_held_out_loss(tmp_path: Path) -> None:
    until = {"metric": "eval/held_out/loss", "below": 3.0}
    result = run_recipe(selecting(tmp_path / "a", until=until, keep_best=None), quiet=True)
    assert result.stages["sft"]["why"].startswith("eval/held_out/loss = 2.")


def test_an_engines_evaluation_selects_too(tmp_path: Path) -> None:
    """Tasks are played beside the held-out loss, each at its own steps; a killed run does the same."""
    tasks = [{"source": "generated:addition", "env": "math", "limit": 6, "name": "add"}]
    stage: dict[str, Any] = {
        "eval": {"tasks": tasks, "every": 4},
        "sampling": {"max_tokens": 4},
        "keep_best": {"metric": "eval/add/reward", "mode": "max"},
        "epochs": 3,
    }
    result = run_recipe(selecting(tmp_path / "whole", **stage), quiet=True)
    lines = metrics(tmp_path / "whole" / "run")
    last = result.stages["sft"]["step"]
    played = [line["step"] for line in lines if "eval/add/reward" in line]
    assert played == sorted({*range(0, last + 1, 4), last})
    assert {"eval/add/reward", "eval/held_out/loss"} <= set(result.stages["sft"]["evals"])
    assert result.stages["sft"]["selected"] in played
    with killed(PackedRun, "train", 5):
        run_recipe(selecting(tmp_path / "cut", **stage), quiet=True)
    run_recipe(selecting(tmp_path / "cut", **stage), quiet=True)
    same(tmp_path / "whole" / "run", tmp_path / "cut" / "run")


# -- what is refused -----------------------------------------------------------------------------


def problems(loaded: Recipe) -> str:
    from trivet.algorithms import resolve_all

    numbers_of, unread = packed_numbers(loaded)
    return "\n".join([*plan(loaded, algorithms=resolve_all(loaded), packed=numbers_of).problems, *unread])


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"batch": {}}, "exactly one of batch.packs"),
        ({"batch": {"packs": 2, "tokens": 100}}, "exactly one of batch.packs"),
        ({"batch": {"packs": 2, "micro_tokens": 8}}, "below the longest document of the packs, 12 tokens"),
        ({"algorithm": "dpo"}, "take algorithm sft"),
        ({"mode": "both", "algorithm": "grpo"}, "packed is for supervised stages"),
        ({"max_length": 10}, "max_length is for tasks"),
        ({"tasks": [{"source": "generated:addition"}]}, "packed and tasks: give one of them"),
        ({"keep_best": {"metric": "eval/held_out/loss"}}, "keep_best.metric names the taskset 'held_out'"),
        ({"keep_best": {"metric": "train/loss"}}, "keep_best.metric 'train/loss' must be eval/"),
        ({"packed": "/nowhere"}, "/nowhere has no manifest.json"),
        ({"held_out": {"packed": "/nowhere"}}, "/nowhere has no manifest.json"),
    ],
)
def test_refusals(tmp_path: Path, stage: dict[str, Any], said: str) -> None:
    assert said in problems(recipe(tmp_path, **stage))
    with pytest.raises(RecipeError):
        run_recipe(recipe(tmp_path, **stage), quiet=True)


def test_tasks_do_not_take_packs(tmp_path: Path) -> None:
    stage = {"packed": None, "tasks": [{"source": "generated:addition"}], "batch": {"tokens": 3}}
    assert "batch.tokens counts packed data, and there is none" in problems(recipe(tmp_path, **stage))


def test_held_out_is_one_thing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="exactly one of packed and tasks"):
        recipe(tmp_path, held_out={"every": 3})
    same_folder = recipe(tmp_path, held_out={"packed": str(tmp_path / "data")})
    assert "is the folder that is trained on" in problems(same_folder)


def test_the_very_packs_under_another_name_are_no_held_out_data(tmp_path: Path) -> None:
    write_packs(tmp_path / "copy", packs_of(examples(60)))
    with pytest.raises(SetupError, match="the very packs that are trained on"):
        run_recipe(recipe(tmp_path, held_out={"packed": str(tmp_path / "copy")}), quiet=True)


@pytest.mark.parametrize("which", ["packed", "held_out"])
def test_another_tokenizer_is_refused(tmp_path: Path, which: str) -> None:
    other = write_packs(tmp_path / "other", packs_of(examples(20)), tokenizer="0123456789abcdef")
    stage = {"packed": str(other)} if which == "packed" else {"held_out": {"packed": str(other)}}
    with pytest.raises(SetupError, match="made with another tokenizer"):
        run_recipe(recipe(tmp_path, **stage), quiet=True)


def test_phases_do_not_change_what_a_step_takes(tmp_path: Path) -> None:
    for key in ("batch.packs", "packed", "held_out.every", "keep_best.patience"):
        with pytest.raises(RecipeError, match="belongs to the whole stage"):
            recipe(tmp_path, phases=[{"from": 2, "set": {key: 2}}])


def test_the_plan_counts(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, batch={"tokens": 150})
    numbers_of, _ = packed_numbers(loaded)
    text = plan(loaded, packed=numbers_of).text()
    data = PackedData(tmp_path / "data")
    steps = numbers_of["sft"].steps
    assert f"{len(data):,} packs of 64 tokens" in text
    assert f"{data.tokens:,} tokens, {data.trained:,} trained" in text
    assert "60 documents, the longest 12 tokens" in text
    assert "150 tokens, 1 optimiser update(s)" in text
    assert f"at most {steps} (epochs 2)" in text
    chosen = selecting(tmp_path / "b", keep_best={"metric": "eval/held_out/loss", "patience": 3})
    text = plan(chosen, packed=packed_numbers(chosen)[0]).text()
    assert "held-out loss every 2 step(s): eval/held_out/loss" in text
    assert "or 3 evaluations without progress" in text
    assert "the checkpoint with the lowest eval/held_out/loss is handed on" in text
