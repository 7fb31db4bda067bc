"""Killed at any moment: every issue in exactly one state, nothing lost, nothing trained twice."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trivet.buffer import Ledger, faults

PROMPTS = {f"p{i}": 2 for i in range(64)}


def _times_trained(weights: list[str]) -> dict[str, int]:
    return dict(Counter(key.split("@")[0] for key in weights))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Ledger]:
    """A ledger that is left behind, not closed, when the block is left by a crash."""
    ledger = Ledger(path, owner="driver")
    try:
        yield ledger
    except faults.Crash:
        return
    ledger.close()


@pytest.mark.parametrize("k", range(1, 17))
def test_golden_every_prompt_is_trained_once_an_epoch(driver: ModuleType, tmp_path: Path, k: int) -> None:
    """64 prompts, batch 8, 2 epochs, group 4, two batches ahead; dies after step k (8: an epoch ends)."""
    path = tmp_path / "ledger.sqlite"
    order: dict[int, list[str]] = {}

    def die(step: int, keys: list[str]) -> None:
        order[step] = keys
        if step == k:
            raise faults.Crash(f"after step {k}")

    with _opened(path) as ledger:
        driver.run(ledger, told=die)
    replayed: dict[int, list[str]] = {}
    with Ledger(path, owner="driver") as ledger:
        weights = driver.run(ledger, told=replayed.__setitem__)
        counts = ledger.stage("rl").counts()
    assert len(weights) == 16 * 8
    assert _times_trained(weights) == PROMPTS
    assert (counts["trained"], sum(counts.values())) == (128, 128)
    again = {step: keys for step, keys in replayed.items() if 0 < step <= k}
    assert len(again) == (k if k < 3 else k % 3 if k % 3 else 3)  # since the last checkpoint before the death
    assert again == {step: order[step] for step in again}


def _points(driver: ModuleType, path: Path) -> int:
    seen = 0

    def count(_: str) -> None:
        nonlocal seen
        seen += 1

    with faults.injected(count), Ledger(path, owner="driver") as ledger:
        driver.run(ledger, **SMALL)
    return seen


SMALL = {"tasks": 4, "batch": 2, "epochs": 2, "group": 1, "every": 2, "depth": 1}


def _die_and_resume(driver: ModuleType, path: Path, points: list[int]) -> None:
    """Run with a death at each of the points in turn, then to the end."""
    for n in points:
        with contextlib.suppress(faults.Crash), faults.injected(faults.crash_at(n)), _opened(path) as ledger:
            driver.run(ledger, **SMALL)
    with Ledger(path, owner="driver") as ledger:
        weights = driver.run(ledger, **SMALL)
        assert ledger.stage("rl").epoch_done(1) and ledger.stage("rl").epoch_done(2)
    assert _times_trained(weights) == {f"p{i}": 2 for i in range(4)}, points
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []


def test_death_between_statements(driver: ModuleType, tmp_path: Path) -> None:
    last = _points(driver, tmp_path / "count.sqlite")
    assert last > 200
    for n in range(1, last, last // 6):
        _die_and_resume(driver, tmp_path / f"{n}.sqlite", [n])


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(1, 11))
def test_death_between_any_two_statements(driver: ModuleType, tmp_path: Path, offset: int) -> None:
    for n in range(offset, _points(driver, tmp_path / "count.sqlite") + 1, 10):
        _die_and_resume(driver, tmp_path / f"{n}.sqlite", [n])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_deaths_in_one_run(driver: ModuleType, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for run in range(5):
        points = [chance.randrange(1, 200) for _ in range(8)]
        _die_and_resume(driver, tmp_path / f"{run}.sqlite", points)


# -- a real process, really killed ---------------------------------------------------------------


def _start(path: Path, numbers: tuple[int, ...]) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("driver.py")
    command = [sys.executable, str(script), str(path), *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _read(child: subprocess.Popen[str], until: int | None) -> list[str]:
    """Lines of the child, up to `until` of them or to its end."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.strip())
        if len(lines) == until:
            break
    return lines


def _killed_run(tmp_path: Path, numbers: tuple[int, ...], kills: list[tuple[int, float]]) -> None:
    """Kill a child `kills` times, each after so many lines and seconds, then let one finish."""
    path = tmp_path / "ledger.sqlite"
    tasks, _, epochs, _, every = numbers
    for after, seconds in kills:
        with _start(path, numbers) as child:
            lines = _read(child, after)
            time.sleep(seconds)
            child.send_signal(signal.SIGKILL)
            lines += _read(child, None)
        if "done" in lines:  # it was quicker
            continue
        _check_told(path, [line for line in lines if line.count(" ") or line.startswith("-")], every)
    with _start(path, numbers) as child:
        lines = _read(child, None)
    assert child.returncode == 0 and lines[-1] == "done"
    with Ledger(path, owner="driver") as ledger:
        stage = ledger.stage("rl")
        weights = stage.state(max(stage.checkpoints()))
        assert stage.counts()["trained"] == tasks * epochs == len(weights)
        versions = ledger.line()
        assert versions == sorted(set(versions), reverse=True)
    assert _times_trained(weights) == {f"p{i}": epochs for i in range(tasks)}


def _check_told(path: Path, lines: list[str], every: int) -> None:
    """What the child had reported before it died is in the file."""
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        query = "SELECT task_id || '@' || epoch || '.' || round, step FROM issues WHERE state = 'trained'"
        trained = dict(raw.execute(query).fetchall())
        checkpoints = {row[0] for row in raw.execute("SELECT step FROM checkpoints")}
    for line in lines:
        number, *keys = line.split()
        step = int(number)
        if step < 0:
            assert -step in checkpoints
        assert all(trained.get(key) == step for key in keys)


def test_kill_nine_twice(tmp_path: Path) -> None:
    _killed_run(tmp_path, (16, 4, 2, 2, 2), [(2, 0.0), (3, 0.02)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_nine_many_times(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kills = [(chance.randrange(1, 6), chance.random() * 0.1) for _ in range(6)]
    _killed_run(tmp_path, (64, 4, 3, 4, 3), kills)


def test_a_crashed_ledger_is_dead(driver: ModuleType, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", owner="me")
    stage = ledger.stage("rl")
    with faults.injected(faults.crash_at(1, only="commit")), pytest.raises(faults.Crash):
        stage.issue(["a"], 1)
    with pytest.raises(RuntimeError, match=r"has crashed at commit \(1\)"):
        stage.issue(["a"], 1)
    ledger.close()
    with Ledger(tmp_path / "ledger.sqlite", owner="me") as again:
        assert sum(again.stage("rl").counts().values()) == 0


def test_hooks_do_not_stack() -> None:
    def quiet(_: str) -> None:
        return

    with (
        faults.injected(quiet),
        pytest.raises(RuntimeError, match="already in place"),
        faults.injected(quiet),
    ):
        pass
    faults.point("statement")
