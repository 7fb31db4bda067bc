"""Checkpoints: whole or not at all, whatever happens while one is written; and exact continuation."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, TrainingDiverged, checkpoint
from trivet.trainer.checkpoint import CheckpointError

FILES = ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json"]
CONFIG = Config(lr=0.01, schedule="cosine", warmup_steps=2)


def make(tools: Any, seed: int = 0) -> Trainer:
    model = tools.tiny_model(dtype=torch.float32, seed=seed)
    return Trainer(model, CONFIG, device="cpu", micro_tokens=64, total_steps=8)


def train(tools: Any, trainer: Trainer, steps: range) -> list[float]:
    return [
        trainer.update(tools.make_prepared(tools.random_groups(2, seed=s)), step=s)["train/loss"]
        for s in steps
    ]


def copy_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = trainer.state_tensors() | trainer.optimiser_tensors()
    return {name: t.clone() for name, t in tensors.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_resumed_run_is_bit_identical(tools: Any, tmp_path: Path) -> None:
    straight = make(tools)
    losses = train(tools, straight, range(6))
    first = make(tools)
    assert train(tools, first, range(3)) == losses[:3]
    checkpoint.write(tmp_path, 3, first, {"step": 3, "note": "x"})
    second = make(tools, seed=9)  # other weights: all must come from the checkpoint
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.read(found, second) == {"step": 3, "note": "x"}
    assert train(tools, second, range(3, 6)) == losses[3:]
    assert same(copy_of(second), copy_of(straight))


def test_random_generators_come_back(tools: Any, tmp_path: Path) -> None:
    trainer = make(tools)
    random.gauss(0, 1)  # keeps half a pair in store, as numpy's does
    np.random.randn()
    path = checkpoint.write(tmp_path, 1, trainer, {})

    def draw() -> tuple[Any, ...]:
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.randn(),
            np.random.rand(),
            torch.rand(2).tolist(),
        )

    first = draw()
    checkpoint.read(path, trainer)
    assert draw() == first


@pytest.mark.parametrize("fault", FILES)
@pytest.mark.parametrize("kind", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tools: Any, tmp_path: Path, fault: str, kind: str) -> None:
    trainer = make(tools)
    good = checkpoint.write(tmp_path, 1, trainer, {"step": 1})
    bad = checkpoint.write(tmp_path, 2, trainer, {"step": 2})
    blob = (bad / fault).read_bytes()
    if kind == "gone":
        (bad / fault).unlink()
    elif kind == "cut":
        (bad / fault).write_bytes(blob[:-1])
    else:
        middle = len(blob) // 2
        (bad / fault).write_bytes(blob[:middle] + bytes([blob[middle] ^ 0x41]) + blob[middle + 1 :])
    assert checkpoint.faults(bad)
    assert checkpoint.latest(tmp_path) == good
    assert checkpoint.read(good, trainer) == {"step": 1}


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("same_step", [False, True])
def test_a_failure_at_any_point_keeps_the_former_one(
    tools: Any, tmp_path: Path, number: int, same_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up at the n-th sync or rename (5 files, 2 folders, 1 or 2 renames)."""
    trainer = make(tools)
    train(tools, trainer, range(1))
    checkpoint.write(tmp_path, 1, trainer, {"step": 1})
    former = copy_of(trainer)
    train(tools, trainer, range(1, 2))
    calls = [0]

    def failing(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(Path, "rename", failing(Path.rename))
    step = 1 if same_step else 2
    failure = ""
    try:
        checkpoint.write(tmp_path, step, trainer, {"step": step})
    except CheckpointError as error:
        failure = str(error)
    monkeypatch.undo()
    assert not failure or "the disk is full" in failure
    found = checkpoint.latest(tmp_path)
    assert found is not None
    other = make(tools, seed=9)
    state = checkpoint.read(found, other)
    new = copy_of(trainer)
    if failure and calls[0] < 8:  # before the new one took its place
        assert same(copy_of(other), former)
        assert state == {"step": 1}
    else:
        assert same(copy_of(other), former) or same(copy_of(other), new)
    checkpoint.write(tmp_path, 3, other, {})  # and life goes on
    assert checkpoint.retain(tmp_path, 1) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]


def test_a_file_that_cannot_be_written_is_named(tools: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not written"):
        checkpoint.write(tmp_path / "file", 1, make(tools), {})


def test_weights_that_cannot_be_written_leave_nothing(tools: Any, tmp_path: Path) -> None:
    """safetensors has errors of its own, which are no OSError."""
    trainer = make(tools)
    checkpoint.write(tmp_path, 1, trainer, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 in .* was not written: .*File too large"):
            checkpoint.write(tmp_path, 2, trainer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_file_of_weights_that_cannot_be_read_is_named(tools: Any, tmp_path: Path) -> None:
    trainer = make(tools)
    path = checkpoint.write(tmp_path, 1, trainer, {})
    (path / "optimizer.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="cannot be used"):
        checkpoint.read(path, trainer)


@pytest.mark.parametrize(
    "delay", [0.02, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.0, 0.01, 0.03, 0.1))]
)
def test_a_killed_writer_leaves_a_usable_checkpoint(tools: Any, tmp_path: Path, delay: float) -> None:
    """kill -9 while a process writes checkpoint after checkpoint."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import conftest, torch
        from trivet.recipe.schema import Trainer as Config
        from trivet.trainer import Trainer, checkpoint
        model = conftest.tiny_model(dtype=torch.float32, hidden_size=256, num_hidden_layers=4)
        trainer = Trainer(model, Config(), device="cpu")
        for step in range(1, 10_000):
            checkpoint.write({str(tmp_path)!r}, step, trainer, {{"step": step}})
            print(step, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        written = [process.stdout.readline() for _ in range(2)]
        assert written == ["1\n", "2\n"]
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    step = int(found.name.removeprefix("step_"))
    assert step >= 2
    model = tools.tiny_model(dtype=torch.float32, hidden_size=256, num_hidden_layers=4, seed=3)
    trainer = Trainer(model, Config(), device="cpu")
    assert checkpoint.read(found, trainer) == {"step": step}
    assert checkpoint.retain(tmp_path, 2) == step - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{s:06d}" for s in (step - 1, step)]


def test_retention(tools: Any, tmp_path: Path) -> None:
    trainer = make(tools)
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.retain(tmp_path, 2) == 0
    for step in (5, 10, 15, 1_000_000):
        checkpoint.write(tmp_path, step, trainer, {})
    (tmp_path / "step_000015" / "model.safetensors").unlink()
    assert checkpoint.retain(tmp_path, 2) == 10  # a damaged one does not count
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000"]


def test_another_models_checkpoint_is_refused(tools: Any, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 1, make(tools), {})
    for other in (tools.tiny_model(num_hidden_layers=1), tools.tiny_model(hidden_size=64)):
        trainer = Trainer(other, Config(), device="cpu")
        before = copy_of(trainer)
        with pytest.raises(CheckpointError, match=r"another model's|has shape"):
            checkpoint.read(path, trainer)
        assert same(copy_of(trainer), before)


def test_weights_that_are_not_finite_reach_no_file(tools: Any, tmp_path: Path) -> None:
    trainer = Trainer(tools.tiny_model(dtype=torch.float32), Config(), device="cpu")
    checkpoint.write(tmp_path, 1, trainer, {})
    with torch.no_grad():
        trainer.model.module.model.norm.weight[0] = float("nan")
    for write in (
        lambda: checkpoint.write(tmp_path, 2, trainer, {}),
        lambda: checkpoint.write_weights(tmp_path / "best", 2, trainer),
        lambda: trainer.export(tmp_path / "model"),
    ):
        with pytest.raises(TrainingDiverged, match=r"weights are not finite: model\.norm\.weight"):
            write()
    assert not (tmp_path / "model").exists()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000001"
