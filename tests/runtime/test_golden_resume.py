"""64 prompts, batch 8, two epochs: killed after any step, every prompt is trained exactly twice, in 16 steps,
and the numbers are those of the run that was never killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.runtime.support import EPOCHS, PROMPTS, STEPS, killed_at, numbers, recipe, trained, weights

from trivet.runtime import run_recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never killed."""
    folder = tmp_path_factory.mktemp("whole")
    result = run_recipe(recipe(folder), quiet=True)
    assert result.stages["rl"]["step"] == STEPS
    return folder / "run"


def check(run: Path, whole: Path) -> None:
    by_prompt, steps, states = trained(run)
    assert len(by_prompt) == PROMPTS
    assert set(by_prompt.values()) == {EPOCHS}
    assert steps == set(range(1, STEPS + 1))
    assert states == {"trained": PROMPTS * EPOCHS}
    assert numbers(run) == numbers(whole)
    assert weights(run / "rl" / "model") == weights(whole / "rl" / "model")


def cases() -> list[object]:
    """Before and after every acknowledgement; one of the two is slow, in turn."""
    return [
        pytest.param(step, before, marks=pytest.mark.slow if before == (step % 2 == 0) else ())
        for step in range(1, STEPS + 1)
        for before in (True, False)
    ]


@pytest.mark.parametrize(("step", "before"), cases())
def test_killed_at_any_step(step: int, before: bool, tmp_path: Path, whole: Path) -> None:
    with killed_at(step, before=before):
        run_recipe(recipe(tmp_path), quiet=True)
    run_recipe(recipe(tmp_path), quiet=True)
    check(tmp_path / "run", whole)


CHILD = """
import sys
from pathlib import Path
from tests.runtime.support import recipe
from trivet.runtime import run_recipe
if __name__ == "__main__":
    run_recipe(recipe(Path(sys.argv[1])), quiet=True)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], env=environment, cwd=root)


def kill_after(folder: Path, step: int) -> None:
    """kill -9 the run once the line of `step` is in its metrics."""
    child = start(folder)
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    try:
        while time.monotonic() < deadline and child.poll() is None:
            if metrics.exists() and f'"step":{step},' in metrics.read_text():
                break
            time.sleep(0.002)
        assert child.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, f"no step {step} within 120 s"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)


def resumed(folder: Path, whole: Path) -> None:
    child = start(folder)
    assert child.wait(180) == 0
    check(folder / "run", whole)


@pytest.mark.parametrize("step", [5, 8])
def test_kill_minus_nine(step: int, tmp_path: Path, whole: Path) -> None:
    """Step 8 is the epoch's edge."""
    kill_after(tmp_path, step)
    resumed(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS))
def test_kill_minus_nine_at_every_step(step: int, tmp_path: Path, whole: Path) -> None:
    kill_after(tmp_path, step)
    resumed(tmp_path, whole)
