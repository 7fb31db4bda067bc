"""What is shipped: the wheel builds, installs by itself, and carries recipes and other data."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=170)
    [path] = target.glob("*.whl")
    return path


def test_the_wheel_holds_all_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "trivet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        [metadata] = [name for name in held if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert wanted <= held
    assert "trivet/recipes/quickstart.yaml" in held
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert not [name for name in held if name.split("/")[0] not in ("trivet",) and ".dist-info/" not in name]


@pytest.mark.slow
def test_it_installs_in_a_clean_environment_and_runs(wheel: Path, tmp_path: Path) -> None:
    """With --no-deps: what it depends on is lent by the environment that runs the tests."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    import typer

    lent = Path(typer.__file__).parents[1]
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Third-party packages only: an editable trivet would be in a .pth file, which is not followed from here.
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{lent}"}
    for arguments, expected in (
        (["recipes"], "quickstart"),
        (["plan", "--resolved", "quickstart"], "stages:"),
    ):
        script = [str(python), str(tmp_path / "venv" / "bin" / "trivet"), *arguments]
        done = subprocess.run(
            script, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=True
        )
        assert expected in done.stdout
    where = [str(python), "-c", "import trivet; print(trivet.__file__)"]
    done = subprocess.run(where, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert done.stdout.startswith(str(tmp_path))


def test_the_version_has_one_place() -> None:
    import trivet

    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/trivet/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {trivet.__version__}" in changelog


def test_every_import_of_the_package_is_declared() -> None:
    """Third-party modules that the sources import are dependencies or extras, by distribution."""
    import ast
    import re
    from importlib.metadata import packages_distributions

    declared = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        declared += extra
    names = {re.split(r"[\[<>=!~; ]", spec)[0].lower().replace("_", "-") for spec in declared}
    # Brought by a declared package (transformers, pydantic), of whose interface they are a part.
    names |= {"huggingface-hub", "pydantic-core", "annotated-types"}
    homes = packages_distributions()
    undeclared: dict[str, str] = {}
    for path in (ROOT / "src" / "trivet").rglob("*.py"):
        if path.parent.name == "inside":  # runs in a sandbox, beside modules that are laid there
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = [node.module]
            for module in (name.partition(".")[0] for name in found):
                if module == "trivet" or module in sys.stdlib_module_names:
                    continue
                owners = {name.lower().replace("_", "-") for name in homes.get(module, [module])}
                if owners.isdisjoint(names):
                    undeclared[module] = str(path.relative_to(ROOT))
    assert not undeclared
