"""Sweeps: a grid of short runs that is not run twice, failures and divergence as rows of a table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.packed_support import recipe
from tests.runtime.support import metrics

from trivet.runtime import sweep as sweeping
from trivet.runtime.sweep import Axis, Row, SweepError, markdown, rows_of, short_names, sweep

LR = "stages.sft.trainer.lr"


def run(folder: Path, *axes: str, **more: Any) -> list[Row]:
    source = folder / "recipe.yaml"
    if not source.exists():
        recipe(folder)
    options = {"steps": 3, "folder": folder / "sweep"} | more
    return sweep(str(source), [Axis.parse(text) for text in axes], **options)


def test_axes() -> None:
    assert Axis.parse("a.b=1e-5,3e-5").values == ("1e-05", "3e-05")
    assert Axis.parse("a.b=[0.9,0.95],[0.9,0.99]").values == ("[0.9, 0.95]", "[0.9, 0.99]")
    assert Axis.parse("a=cosine, linear").values == ('"cosine"', '"linear"')
    assert Axis.parse("a=true").values == ("true",)
    for text in ("a", "a=", "=1", "a=1,1", "a=[1", "a=1,,2"):
        with pytest.raises(SweepError):
            Axis.parse(text)


def test_names_as_short_as_they_may_be() -> None:
    assert short_names(["stages.sft.trainer.lr", "batch.packs"]) == ["lr", "packs"]
    assert short_names(["stages.a.trainer.lr", "stages.b.trainer.lr"]) == ["a.trainer.lr", "b.trainer.lr"]
    assert short_names(["lr", "trainer.lr"]) == ["lr", "trainer.lr"]


def test_the_grid(tmp_path: Path) -> None:
    recipe(tmp_path)
    axes = [Axis.parse(f"{LR}=1e-3,1e-2"), Axis.parse("stages.sft.batch.packs=2,4,0")]
    rows = rows_of(str(tmp_path / "recipe.yaml"), axes, steps=3, stage=None, folder=tmp_path)
    assert [(r.settings[LR], r.settings["stages.sft.batch.packs"]) for r in rows] == [
        (lr, packs) for lr in ("0.001", "0.01") for packs in ("2", "4", "0")
    ]
    assert len({row.name for row in rows}) == 6
    assert [row.mark for row in rows] == ["", "", "failed"] * 2
    other = rows_of(str(tmp_path / "recipe.yaml"), axes, steps=4, stage=None, folder=tmp_path)
    assert not {row.name for row in rows if row.recipe} & {row.name for row in other}


def test_what_cannot_be_swept(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"none of 1 combinations can be run.*trainer.lrr is not a key"):
        run(tmp_path, "stages.sft.trainer.lrr=1")
    with pytest.raises(SweepError, match="comes twice"):
        run(tmp_path, f"{LR}=1", f"{LR}=2")
    with pytest.raises(SweepError, match="'rl' is no training stage; there is sft"):
        run(tmp_path, f"{LR}=1e-3", stage="rl")


def test_a_sweep_and_its_table(tmp_path: Path) -> None:
    """Rows end as runs do; what fails is a row; the same command runs nothing again; weights are gone."""
    told: list[str] = []
    axes = (f"{LR}=1e-3,3e-2", "stages.sft.batch.micro_tokens=4096,5")
    rows = run(tmp_path, *axes, workers=2, say=lambda row, done, total: told.append(row.name))
    good, bad = rows[0::2], rows[1::2]
    assert all(row.mark == "stable" and row.steps == 3 for row in good)
    assert good[1].last_loss < good[0].last_loss < good[0].first_loss == good[1].first_loss  # type: ignore[operator]
    assert all(row.mark == "failed" and "below the longest document" in row.why for row in bad)
    assert sorted(told) == sorted(row.name for row in rows)
    before = {row.name: (tmp_path / "sweep" / row.name / "row.json").stat().st_mtime_ns for row in rows}
    again = run(tmp_path, *axes)
    assert [row.record() for row in again] == [row.record() for row in rows]
    assert before == {n: (tmp_path / "sweep" / n / "row.json").stat().st_mtime_ns for n in before}
    lines = [json.loads(line) for line in (tmp_path / "sweep" / "sweep.jsonl").read_text().splitlines()]
    assert lines == [row.record() for row in rows]
    text = (tmp_path / "sweep" / "sweep.md").read_text()
    assert text == markdown(rows)
    assert text.splitlines()[0].startswith("| lr | micro_tokens | steps | first loss |")
    assert not list((tmp_path / "sweep").rglob("*.safetensors"))


def test_a_row_is_the_start_of_the_whole_run(tmp_path: Path) -> None:
    """The schedule is that of all steps, not of the sweep's."""
    trainer = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 3}
    recipe(tmp_path, trainer=trainer, epochs=4)
    (row,) = run(tmp_path, f"{LR}=1e-2", steps=4)
    from trivet.recipe import load_recipe
    from trivet.runtime import run_recipe

    run_recipe(load_recipe(tmp_path / "recipe.yaml"), quiet=True)
    whole = [m for m in metrics(tmp_path / "run") if "train/loss" in m]
    short = [m for m in metrics(tmp_path / "sweep" / row.name) if "train/loss" in m]
    assert len(short) == 4 < len(whole)
    for a, b in zip(short, whole, strict=False):
        assert (a["train/loss"], a["train/lr"]) == (b["train/loss"], b["train/lr"])


def test_a_death_is_a_failure(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGKILL)
    process.wait(30)

    class Dead:
        exitcode = process.returncode

    assert sweeping._complaint(tmp_path, Dead()) == "the run's process ended by signal 9"  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Its rows die with it, and the next one runs what had not ended."""
    recipe(tmp_path, epochs=400)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "trivet.cli", "sweep", str(tmp_path / "recipe.yaml"), f"{LR}=1e-3,1e-2"]
    command += ["--steps", "400", "--output", str(tmp_path / "sweep")]
    child = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list((tmp_path / "sweep").glob("*/metrics.jsonl")):
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    time.sleep(3)
    rows = run(tmp_path, f"{LR}=1e-3,1e-2", steps=400)
    assert all(row.steps == 400 and row.mark != "failed" for row in rows)
