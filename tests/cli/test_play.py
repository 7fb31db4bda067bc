"""`trivet play`: a tiny model at a few tasks, printed with the scores."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trivet.cli import main
from trivet.cli.play import text_of
from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny
from trivet.types import Message, Rollout, Scored, Task, Termination, Trace, Unscored


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32, context=256)
    return make_tiny(config, tmp_path_factory.mktemp("model") / "tiny")


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_a_few_rollouts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["play", "generated:addition", "args.size=9", "--model", model, "--max-tokens", 4, "--n", 2]
    assert command(*asked, "--attempts", 2) == 0
    said = capsys.readouterr().out
    assert said.startswith("addition: 9 tasks, environment math\n")
    assert said.count("=== ") == 2 and said.count("  user: ") == 4 and said.count("  assistant: ") == 4
    assert len(re.findall(r"  score 0 \(answered 0\); (length|finished), [1-4] tokens in ", said)) == 4
    assert command(*asked, "--attempts", 2) == 0
    timeless = [line.partition(" in ")[0] for line in said.splitlines()]
    assert [line.partition(" in ")[0] for line in capsys.readouterr().out.splitlines()] == timeless


def test_the_layouts_environment(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"key": 1, "prompt": "2+2", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    file = tmp_path / "if.jsonl"
    file.write_text(json.dumps(row))
    assert command("play", file, "--model", model, "--max-tokens", 4) == 0
    said = capsys.readouterr().out
    assert said.startswith("if (layout ifeval): 1 tasks, environment instruct\n")
    assert "punctuation:no_comma" in said
    assert command("play", file, "--model", model, "--max-tokens", 4, "--env", "math") == 0
    assert "no score: no_gold" in capsys.readouterr().out


def test_what_cannot_be_played_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("play", "generated:additions", "--model", model) == 1
    assert "did you mean 'addition'" in capsys.readouterr().err
    assert command("play", "generated:addition", "--model", tmp_path) == 1
    assert "neither a model" in capsys.readouterr().err
    assert command("play", "generated:addition", "--model", model, "--env", "maths") == 1
    assert "did you mean 'math'" in capsys.readouterr().err


def test_text_is_safe_to_print() -> None:
    hostile = "\x1b[2J\u202eevil\r\x07" + "x" * 9000
    task = Task("qa", (Message("user", "q\nr"),), {"answer": 7})
    messages = [*task.messages, Message("assistant", hostile, reasoning="hm\x1b]0;t\x07")]
    rollout = Rollout(task, Trace(), Scored(0.5, {"a": 1}), Termination.LENGTH, messages=messages)
    said = text_of(rollout)
    assert not {char for char in said if not char.isprintable()} - {"\n"}
    assert "\\x1b[2J" in said and "(reasoning): hm" in said and "known answer: 7" in said
    assert "score 0.5 (a 1); length" in said and len(said) < 6000
    rollout.reward = Unscored("judge_timeout", "slow")
    assert "no score: judge_timeout (slow)" in text_of(rollout)
