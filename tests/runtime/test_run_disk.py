"""A disk that fills up, a kill in the middle of a checkpoint, a ledger that somebody else holds: the run says
what is wrong, and the next one continues with nothing lost and the same numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import PROMPTS, killed_at, numbers, recipe, trained, weights

from trivet.buffer import LedgerError
from trivet.buffer.store import Database
from trivet.runtime import RunFolderError, run_recipe
from trivet.runtime.pipeline import RunResult
from trivet.trainer.checkpoint import CheckpointError

SETTINGS: dict[str, Any] = {"epochs": 1, "checkpoints": {"every": 3}}  # 8 steps, checkpoints at 3, 6, 8
LAST = PROMPTS // 8


def run(folder: Path, *overrides: str) -> RunResult:
    return run_recipe(recipe(folder, *overrides, **SETTINGS), quiet=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder).stages["rl"]["step"] == LAST
    return folder / "run"


def goes_on(folder: Path, whole: Path) -> None:
    """The same command again ends as the undisturbed run did."""
    assert run(folder).stages["rl"]["step"] == LAST
    by_prompt, steps, states = trained(folder / "run")
    assert set(by_prompt.values()) == {1}
    assert steps == set(range(1, LAST + 1))
    assert states == {"trained": PROMPTS}
    assert numbers(folder / "run") == numbers(whole)
    assert weights(folder / "run/rl/model") == weights(whole / "rl/model")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run/rl/checkpoints").iterdir())


# -- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [".partial_step_000006", ".state.json"])
def test_no_space_when_a_file_is_flushed(
    target: str, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a disk allocates late, it is the flush that finds it full."""
    flush = os.fsync

    def fsync(handle: int) -> None:
        if f"/{target}" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises((CheckpointError, RunFolderError), match=r"[Ff]ree space there") as caught:
            run(tmp_path)
    assert str(tmp_path / "run") in str(caught.value)
    if "step" in target:
        assert checkpoints(tmp_path) == ["step_000003"]
    goes_on(tmp_path, whole)


def test_a_ledger_that_cannot_grow(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own limit of pages stands for the full disk: the error is the same one."""
    opening = Database._sqlite_open

    def small(self: Database) -> Any:
        connection = opening(self)
        self._raw(connection).execute("PRAGMA max_page_count=48")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_sqlite_open", small)
        with pytest.raises((LedgerError, BaseExceptionGroup)) as caught:
            run(tmp_path)
    assert "no space left for the ledger" in str(caught.value)
    assert str(tmp_path / "run/ledger.sqlite") in str(caught.value)
    assert "Free space" in str(caught.value)
    goes_on(tmp_path, whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)  # a traceback may still hold a file


def fill(path: Path) -> None:
    """Write until nothing more goes in."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_really_full(small_disk: Path, whole: Path) -> None:
    """Filled up after step 4: whatever is written next says so; with space again the run continues."""
    ballast = small_disk / "ballast"

    with killed_at(4):
        run(small_disk)
    fill(ballast)
    with pytest.raises(Exception, match=r"(?i)space") as caught:
        run(small_disk)
    from trivet.cli import readable_errors

    messages = readable_errors(caught.value)
    assert messages is not None, f"not an error for people: {caught.value!r}"
    assert str(small_disk) in messages[0]
    ballast.unlink()
    goes_on(small_disk, whole)


# -- kill -9 in a checkpoint ----------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from tests.runtime import test_run_disk as case
from trivet.buffer import StageLedger

def die():
    os.kill(os.getpid(), signal.SIGKILL)

rename, mark = Path.rename, StageLedger.checkpoint

def renaming(self, target):
    if self.name == ".partial_step_000006" and sys.argv[2] == "written":
        die()
    return rename(self, target)

def marking(self, step, *rest, **more):
    if step == 6 and sys.argv[2] == "renamed":
        die()
    out = mark(self, step, *rest, **more)
    if step == 6 and sys.argv[2] == "marked":
        die()
    return out

Path.rename, StageLedger.checkpoint = renaming, marking
case.run(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("written", [".partial_step_000006", "step_000003"]),
        ("renamed", ["step_000003", "step_000006"]),
        pytest.param("marked", ["step_000003", "step_000006"], marks=pytest.mark.slow),
    ],
)
def test_kill_minus_nine_in_a_checkpoint(place: str, kept: list[str], tmp_path: Path, whole: Path) -> None:
    """All files written but not renamed; renamed but the ledger does not know; the ledger knows."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), place],
        env={**os.environ, "PYTHONPATH": path},
        cwd=root,
        timeout=180,
        capture_output=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]
    assert checkpoints(tmp_path) == kept
    goes_on(tmp_path, whole)


def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with killed_at(7):
        run(tmp_path)
    file = tmp_path / "run/rl/checkpoints/step_000006/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    goes_on(tmp_path, whole)
    said = " ".join(capsys.readouterr().out.split())
    assert "step_000006 is passed over: model.safetensors: its checksum differs" in said


# -- a ledger in use ------------------------------------------------------------------------------


def test_a_ledger_held_by_another_process(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(4):
        run(tmp_path)
    opened = Database.__init__

    def impatient(self: Database, url: Any, *, busy_s: float) -> None:
        opened(self, url, busy_s=0.2)

    holder = sqlite3.connect(tmp_path / "run/ledger.sqlite", isolation_level=None)
    try:
        holder.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patch:
            patch.setattr(Database, "__init__", impatient)
            with pytest.raises(LedgerError, match=r"another process has held the ledger .*ledger\.sqlite"):
                run(tmp_path)
    finally:
        holder.close()
    goes_on(tmp_path, whole)
