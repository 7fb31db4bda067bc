"""Imports go one way; rules that the linters do not check."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "trivet").rglob("*.py"))
MAX_LINES = 500


def test_the_layers_are_the_designs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = project["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("(", "").replace(")", "") for layer in contract["layers"]]
    rooms = [sorted(layer.split(" | ")) for layer in reversed(layers)]
    assert contract["type"] == "layers"
    assert contract["exhaustive"]
    assert rooms[:9] == [
        ["types"],
        ["monitor", "recipe"],
        ["algorithms", "buffer", "render", "sandbox", "weights"],
        ["data", "engine"],
        ["rewards"],
        ["agents", "tasks"],
        ["serve"],
        ["envs"],
        ["explorer", "trainer"],
    ]
    assert rooms[-1] == ["cli", "studio"]


def test_imports_go_one_way() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([str(linter)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_files_are_short_and_name_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    for word in (
        "TO" + "DO",
        "FIX" + "ME",
        "/wo" + "rk/",
        "/ho" + "me/",
        "/ro" + "ot/",
        "raise NotImpl" + "emented",
    ):
        assert word not in text
