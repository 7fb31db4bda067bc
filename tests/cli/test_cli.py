"""The command line as a person meets it: in a process of its own where exit codes and output matter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trivet import cli
from trivet.cli import readable_errors
from trivet.recipe import RecipeError
from trivet.recipe.problems import Problem

RECIPE = """
name: small
stages:
  - name: rl
    steps: 2
    tasks: [{source: "generated:addition", limit: 20}]
    batch: {prompts: 4, group: 2}
    sampling: {max_tokens: 8}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of `trivet ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code is None or isinstance(caught.value.code, int)
    return caught.value.code or 0, out, err


def test_help_names_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for word in (
        "run",
        "plan",
        "recipes",
        "doctor",
        "tasks",
        "chat",
        "model",
        "report",
        "version",
        "Exit codes",
    ):
        assert word in out


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run"], ["plan"], ["chat"], ["tasks", "show"], ["model", "tiny"], ["model", "import"]):
        code, out, _ = call(capsys, *words, "--help")
        assert code == 0
        assert "Usage: trivet " + " ".join(words) in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rn"], "No such command 'rn'"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "quickstart", "--frsh"], "No such option"),
        (["tasks", "show", "x", "-n", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == cli.USAGE
    assert message in err


def test_recipes_lists_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "recipes")
    assert code == 0
    assert out.splitlines()[0].split() != ["quickstart"]
    assert "quickstart" in out


def test_a_bad_recipe_is_one_message_and_no_traceback(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, err = call(capsys, "run", "r.yaml", "stages.rl.trainer.lerning_rate=1")
    assert code == cli.USAGE
    assert out == ""
    assert err.startswith("error: override 'stages.rl.trainer.lerning_rate=1'")
    assert "did you mean `lr`?" in err
    assert "Traceback" not in err


def test_debug_lets_the_error_through(folder: Path) -> None:
    with pytest.raises(RecipeError):
        cli.main(["run", "nope", "--debug"])


def test_plan_counts_the_tasks(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for arguments in (["plan", "r.yaml"], ["run", "--dry-run", "r.yaml"], ["run", "r.yaml", "--dry-run"]):
        code, out, _ = call(capsys, *arguments)
        assert code == 0
        assert "4 prompts x 2 rollouts = 8 rollouts" in out
        assert "tasks           20" in out
    assert not (folder / "runs").exists()  # nothing was started


def test_a_plan_that_cannot_be_run(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = call(
        capsys, "plan", "r.yaml", "stages.rl.batch.group=1", "stages.rl.tasks.0.source=gone.jsonl"
    )
    assert code == cli.USAGE
    assert "cannot be run:" in out
    assert "nothing to compare" in out
    assert "stages.rl.tasks: " in out
    assert "gone.jsonl" in out
    code, _, err = call(capsys, "run", "r.yaml", "stages.rl.batch.group=1")
    assert code == cli.USAGE
    assert "nothing to compare" in err
    assert not (folder / "runs").exists()


def test_an_unknown_algorithm_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, _, err = call(capsys, "run", "r.yaml", "stages.rl.algorithm=gropo")
    assert code == cli.FAILED
    assert "unknown algorithm 'gropo'; did you mean 'grpo'" in err
    assert "--debug" in err


def test_the_users_own_code_is_imported_first(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from trivet.algorithms import register_algorithm, resolve\n"
        "@register_algorithm('mine_for_the_cli')\n"
        "def mine(*, clip: float = 0.2):\n"
        "    return resolve({'kind': 'grpo', 'clip': clip})\n"
    )
    code, out, _ = call(capsys, "plan", "r.yaml", "imports=[mine.py]", "stages.rl.algorithm=mine_for_the_cli")
    assert code == 0
    assert "both, mine_for_the_cli" in out


def test_the_resolved_recipe_can_be_run_again(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = call(capsys, "plan", "r.yaml", "--resolved", "seed=9")
    assert code == 0
    (folder / "resolved.yaml").write_text(out, encoding="utf-8")
    code, again, _ = call(capsys, "plan", "resolved.yaml", "--resolved")
    assert code == 0
    assert again == out
    assert "seed: 9" in out


def test_tasks_show(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = call(capsys, "tasks", "show", "generated:addition", "limit=5", "-n", "2")
    assert code == 0
    assert out.startswith("addition: 5 tasks, fingerprint ")
    assert out.count("user: ") == 2
    code, out, _ = call(capsys, "tasks", "show", "r.yaml", "-n", "1")
    assert code == 0
    assert "stages.rl.tasks addition: 20 tasks" in out
    code, _, err = call(capsys, "tasks", "show", "generated:addition", "limt=5")
    assert code == cli.USAGE
    assert "did you mean `limit`?" in err
    code, _, err = call(capsys, "tasks", "show", "gone.jsonl")
    assert code == cli.FAILED
    assert "gone.jsonl" in err


def test_report_of_no_run(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, _, err = call(capsys, "report", "nowhere")
    assert code == cli.FAILED
    assert "nowhere" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import trivet

    code, out, _ = call(capsys, "version")
    assert code == 0
    assert out.splitlines()[0].split() == ["trivet", trivet.__version__]


def test_chat_without_a_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, _, err = call(capsys, "chat", "nowhere")
    assert code == cli.FAILED
    assert "holds neither a model" in err


def test_which_errors_are_for_people() -> None:
    ours = RecipeError("r", [Problem("bad")])
    assert readable_errors(ours) == ["bad"]
    assert readable_errors(KeyError("x")) is None
    assert readable_errors(FileNotFoundError(2, "No such file", "x")) == ["[Errno 2] No such file: 'x'"]
    assert readable_errors(ExceptionGroup("g", [ours, ExceptionGroup("h", [ours])])) == ["bad"]
    assert readable_errors(ExceptionGroup("g", [ours, KeyError("x")])) is None


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdef123")
    assert readable_errors(RecipeError("r", [Problem("it said abcdef123")])) == ["it said ***"]


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trivet import recipe

    def interrupt() -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "packaged_recipes", interrupt)
    code, out, err = call(capsys, "recipes")
    assert code == cli.INTERRUPTED
    assert "Traceback" not in out + err


def test_a_closed_pipe_is_no_crash() -> None:
    command = f"{sys.executable} -m trivet.cli plan --resolved quickstart | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("# Resolved")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_import_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str
) -> None:
    (folder / "there.py").write_text("")
    (folder / "broken.py").write_text("raise TypeError('its own')")
    for name, words in (
        ("missing.py", r"no such file"),
        ("no_such_module_of_mine", "No module named 'no_such_module_of_mine'"),
        ("broken.py", "TypeError: its own"),
    ):
        code, _, err = call(capsys, command, "r.yaml", f"imports=[there.py, {name}]")
        assert code == cli.USAGE
        assert "imports.1" in err
        assert name in err
        assert words in err
    assert not (folder / "runs").exists()
