"""What may not cost anything: importing trivet, the recipe, the help."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = {
    "torch",
    "transformers",
    "renderers",
    "tokenizers",
    "sqlalchemy",
    "matplotlib",
    "math_verify",
    "pyarrow",
    "datasets",
    "gguf",
    "tensorboard",
}


def modules_after(statement: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint('MODULES', *sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.rpartition("MODULES")[2].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import trivet.recipe; trivet.recipe.load_recipe('quickstart')",
        "import trivet.types",
        "import trivet.algorithms",
        "import trivet.monitor",
        "import trivet.doctor",
        "import trivet.chat",
    ],
)
def test_light_rooms_import_nothing_heavy(statement: str) -> None:
    assert modules_after(statement).isdisjoint(HEAVY)


def test_importing_trivet_imports_nothing_at_all() -> None:
    assert modules_after("import trivet") - modules_after("") == {"trivet"}


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["recipes"], ["version"]])
def test_the_command_line_imports_nothing_heavy(arguments: list[str]) -> None:
    statement = f"from trivet.cli import main\ntry:\n    main({arguments!r})\nexcept SystemExit: pass"
    held = modules_after(statement)
    assert held.isdisjoint(HEAVY)
    if "--help" in arguments:
        assert held.isdisjoint({"yaml", "rich", "numpy"})


def test_help_is_there_at_once() -> None:
    """Half a second on an idle machine; the best of some tries, since other tests run beside this one."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "trivet.cli", "--help"], capture_output=True, timeout=60, check=True
        )
        best = min(best, time.perf_counter() - begin)
        if best < 0.5:
            break
    assert best < 1.5
