"""The way in: what `make` and CI would do, without doing it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def would_run(folder: Path, *arguments: str) -> list[str]:
    """The commands of `make -n ARGUMENTS` in a folder that has the Makefile and nothing installed."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def first(commands: list[str], pattern: str) -> int:
    return next(i for i, command in enumerate(commands) if re.search(pattern, command))


def test_quickstart_installs_torch_first_and_no_tools(tmp_path: Path) -> None:
    commands = would_run(tmp_path, "quickstart", "ARGS=seed=3")
    steps = [r"-m venv", r"install 'torch==", r"install -e \.$", r"trivet run quickstart seed=3$"]
    assert [first(commands, step) for step in steps] == sorted(first(commands, step) for step in steps)
    assert not [command for command in commands if "[dev" in command or "--index-url" in command]


def test_the_build_of_torch_can_be_chosen(tmp_path: Path) -> None:
    commands = would_run(tmp_path, "install", "TORCH=torch==2.13.0+cu130", "TORCH_INDEX=file:///wheels")
    assert commands[first(commands, "torch==")].endswith("'torch==2.13.0+cu130' --index-url file:///wheels")


def test_make_test_lints_and_tests(tmp_path: Path) -> None:
    commands = would_run(tmp_path, "test")
    steps = [r"ruff check", r"ruff format --check", r"pyright$", r"lint-imports$", r"pytest -n"]
    assert [first(commands, step) for step in steps] == sorted(first(commands, step) for step in steps)


def test_ci_runs_make_test() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "make test"


@pytest.mark.parametrize("name", ["Makefile", "pyproject.toml", ".ci/run", ".gitignore"])
def test_no_registry_is_named(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|pypi|--extra-index-url", text, re.IGNORECASE)
