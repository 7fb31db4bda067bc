"""`trivet score`: answers through any environment's verifier, from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trivet.cli import main

SHARED = Path(os.environ.get("TRIVET_SHARED", Path(__file__).parents[2].parent / "shared"))


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def cells(text: str) -> list[list[str]]:
    """The lines of the tables, split at their blanks."""
    return [line.split() for line in text.splitlines() if line.strip()]


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}?", "answer": str(i), "response": f"\\boxed{{{i // 2 * 2}}}"} for i in range(10)]
    file = write(tmp_path / "a.jsonl", [*rows, {**rows[0], "response": ""}])
    output = tmp_path / "out" / "scores.jsonl"
    assert command("score", file, "--env", "math", "--output", output) == 0
    said = capsys.readouterr().out
    table = cells(said)
    assert "10 answers, environment math" in said
    for line in (["rows", "read", "11"], ["dropped:", "empty_response", "1"], ["scored", "10", "100.0%"]):
        assert line in table
    assert ["mean", "0.5"] in table and ["answered", "1", "10"] in table
    assert ["0", "5", "#" * 30] in table and ["1", "5", "#" * 30] in table
    values = [json.loads(line)["value"] for line in output.read_text().splitlines()]
    assert values == [1.0, 0.0] * 5
    assert command("score", file, "--env", "math", "--output", output) == 0
    assert ["of", "them", "kept", "from", "before", "10"] in cells(capsys.readouterr().out)
    assert command("score", file, "--env", "qa", "--env-arg", "read=box", "--output", output) == 1
    assert "another verifier" in capsys.readouterr().err


def test_arguments_of_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "q", "gold": 3, "said": "about 3.1"}])
    asked = ["score", file, "fields.answer=gold", "--response", "said", "--env", "qa"]
    tolerant = ["--env-arg", "match=number", "--env-arg", "relative=0.1"]
    assert command(*asked, *tolerant) == 0
    assert ["mean", "1"] in cells(capsys.readouterr().out)
    assert command(*asked) == 0
    assert ["mean", "0"] in cells(capsys.readouterr().out)
    assert command(*asked, "--env-arg", "colour=red") == 1
    assert "takes no argument 'colour'" in capsys.readouterr().err
    assert command("score", file, "fields.answer=gold", "--response", "said") == 1
    assert "--env NAME" in capsys.readouterr().err


def test_it_stops_where_there_is_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}?", "match": "no", "response": "1"} for i in range(10)]
    file = write(tmp_path / "b.jsonl", rows)
    assert command("score", file, "fields={payload.match: match}", "--env", "qa") == 1
    said = capsys.readouterr()
    assert ["unscored:", "bad_match", "10", "100.0%"] in cells(said.out)
    assert "10 of 10 answers have no score (bad_match 10), more than the 10% allowed" in said.err
    assert command("score", file, "fields={payload.match: match}", "--env", "qa", "--max-unscored", "1") == 0


def test_pairs_without_and_with_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = [{"role": "user", "content": "Say it short."}]
    rows = [
        {"context": user, "response1": "yes", "response2": "oh yes, it is", "overall_preference": -1},
        {"context": user, "response1": "well yes it is", "response2": "yes", "overall_preference": -2},
        {"context": user, "response1": "a", "response2": "b", "overall_preference": 0},
    ]
    file = write(tmp_path / "pairs.jsonl", rows)
    prompts = tmp_path / "prompts.jsonl"
    assert command("score", file, "--pairs", "--prompts", prompts) == 0
    table = cells(said := capsys.readouterr().out)
    assert "layout helpsteer3" in said and "1 prompts:" in said
    assert ["dropped:", "tie", "1", "33.3%"] in table and ["valid", "pairs", "2", "66.7%"] in table
    assert ["chosen", "0", "8.5", "2.5"] in table and ["rejected", "0", "8.0", "2.5"] in table
    assert json.loads(prompts.read_text())["messages"] == user
    short = tmp_path / "short.py"
    short.write_text("def score(text):\n    return float(len(text.split()) < 2)\n")
    scored = ["--env", "callable", "--env-arg", f"function={short}:score"]
    assert command("score", file, "--pairs", *scored) == 0
    said = capsys.readouterr().out
    assert ["chosen", "2", "0.5", "8.5", "2.5"] in cells(said)
    assert "2 pairs with two scores, the chosen answer's is higher in 50.0%, equal in 0.0%" in said


def test_real_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = SHARED / "data" / "preference" / "hh_rlhf" / "harmless_base_test.jsonl.gz"
    if not file.exists():
        pytest.skip(f"no {file}")
    assert command("score", file, "--pairs", "--prompts", tmp_path / "p.jsonl") == 0
    table = cells(capsys.readouterr().out)
    assert ["rows", "2,312"] in table and ["dropped:", "empty_answer", "4", "0.2%"] in table
    assert ["valid", "pairs", "2,308", "99.8%"] in table
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 2306


def test_hostile_text_does_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def score(text):\n    return {'value': 1.0, '\\x1b[2Jpart': 1.0}\n")
    file = write(tmp_path / "a.jsonl", [{"prompt": "q", "response": "x"}])
    assert command("score", file, "--env", "callable", "--env-arg", f"function={bad}:score") == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b[2Jpart" in said
