"""Talking to a checkpoint: finding it, and a few words with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trivet.chat import ChatError, find_model, open_chat
from trivet.recipe.schema import TinyModel


def test_finding_a_model(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert find_model(model) == (model, str(model))
    with pytest.raises(ChatError, match="holds neither"):
        find_model(run)
    state = {"stages": {"sft": {"model": "m/sft"}, "rl": {"model": "m/rl"}, "bench": {"evals": {}}}}
    (run / "state.json").write_text(json.dumps(state))
    assert find_model(run) == (run / "m/rl", f"{run}, stage rl")
    assert find_model(run, "sft")[0] == run / "m/sft"
    with pytest.raises(ChatError, match="no model of a stage 'x'; there are sft, rl"):
        find_model(run, "x")
    with pytest.raises(ChatError, match="is a model directory"):
        find_model(model, "sft")
    (run / "state.json").write_text(json.dumps({"stages": {}}))
    with pytest.raises(ChatError, match="left a model yet"):
        find_model(run)


def test_a_few_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from trivet.render.tiny import make_tiny

    model = make_tiny(
        TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32, context=64), tmp_path / "tiny"
    )

    capfd.readouterr()
    with open_chat(model, stage=None, system=None, temperature=0.0, max_tokens=4, seed=0) as talk:
        first = talk.answer("1+1=")
        assert first
        talk.answer("2+2=")
        talk.start_over()
        assert talk.answer("1+1=") == first  # greedy, and nothing of the earlier talk is left
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")  # no progress bars, no warnings of libraries
