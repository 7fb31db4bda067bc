"""The tiny model: loads like any model, short prompts, refuses what it cannot spell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trivet.recipe.schema import TinyModel
from trivet.render import RenderError, get_renderer
from trivet.render.tiny import make_tiny
from trivet.types import Message

USER = Message("user", "12+7=")


def test_stored_ids(tiny_tokenizer: Any) -> None:
    """pad 0, end 1, start 2, system user assistant tool 3-6, unk 7, then the alphabet: '0' is 8."""
    renderer = get_renderer(tiny_tokenizer)
    prompt = renderer.render([USER], generate=True)
    assert prompt.ids_T.tolist() == [4, 9, 10, 18, 15, 22, 1, 5]  # three tokens more than characters
    whole = renderer.render([Message("system", "a"), USER, Message("assistant", "19")])
    assert whole.ids_T.tolist() == [3, 28, 1, 4, 9, 10, 18, 15, 22, 1, 5, 9, 17, 1]
    assert whole.ids_T[whole.mask_T()].tolist() == [9, 17, 1]
    assert renderer.stop_ids == (1,)
    assert renderer.decode(whole.ids_T) == (
        "<|im_start|>systema<|im_end|><|im_start|>user12+7=<|im_end|><|im_start|>assistant19<|im_end|>"
    )


def test_loads_with_transformers(tiny_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 500_000
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert torch.isfinite(model(**ids).logits).all()
    assert tokenizer.decode(tokenizer.encode("Say: {a b}\n")) == "Say: {a b}\n"


def test_same_seed_same_weights(tiny_dir: Path, tmp_path: Path) -> None:
    again = load_file(make_tiny(TinyModel(), tmp_path / "again") / "model.safetensors")
    other = load_file(make_tiny(TinyModel(seed=1), tmp_path / "other") / "model.safetensors")
    first = load_file(tiny_dir / "model.safetensors")
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_making_it_leaves_torch_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    make_tiny(TinyModel(layers=1), tmp_path / "m")
    assert torch.equal(torch.rand(3), want)


def test_an_existing_folder(tmp_path: Path) -> None:
    small = TinyModel(layers=1, hidden=16, mlp=16)
    made = make_tiny(small, tmp_path / "m")
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    make_tiny(small, made)  # the very same: left alone
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(RenderError, match="already holds something else"):
        make_tiny(TinyModel(layers=2, hidden=16, mlp=16), made)
    make_tiny(TinyModel(layers=2, hidden=16, mlp=16), made, force=True)
    assert (made / "model.safetensors").stat().st_mtime_ns != stamp
    assert [p.name for p in tmp_path.iterdir()] == ["m"]  # no temporary folder is left


def test_refused_shapes(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="even head size"):
        make_tiny(TinyModel(hidden=65), tmp_path / "a")
    with pytest.raises(RenderError, match="multiple of kv_heads"):
        make_tiny(TinyModel(heads=4, kv_heads=3), tmp_path / "b")
    with pytest.raises(RenderError, match="alphabet is empty"):
        make_tiny(TinyModel(alphabet=""), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_unknown_characters_are_refused_by_name(tiny_tokenizer: Any) -> None:
    renderer = get_renderer(tiny_tokenizer)
    with pytest.raises(RenderError, match=r"does not know 'é' '§' in 'café §'"):
        renderer.render([Message("user", "café §")])
    with pytest.raises(RenderError, match="does not know"):
        renderer.extend(
            [USER, Message("assistant", "1"), Message("user", "é")], 1, renderer.render([USER]).ids_T
        )
    assert tiny_tokenizer.encode("é") == [7]  # a plain call gives <|unk|>


def test_making_and_using_it_says_nothing(tmp_path: Path) -> None:
    """No bar of transformers' own, and no word about prompts longer than the (short) context."""
    code = (
        "import sys; from pathlib import Path\n"
        "from trivet.recipe.schema import TinyModel\n"
        "from trivet.render import get_renderer, load_tokenizer\n"
        "from trivet.render.tiny import make_tiny\n"
        "from trivet.types import Message\n"
        "made = make_tiny(TinyModel(layers=1, context=16), Path(sys.argv[1]) / 'm')\n"
        "get_renderer(load_tokenizer(made)).render([Message('user', 'a' * 40)])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_force_replaces_models_only(tmp_path: Path) -> None:
    """`--force` with the wrong path must not take somebody's work away."""
    (tmp_path / "thesis.txt").write_text("three years")
    with pytest.raises(RenderError, match=r"no config\.json.*not a model's folder"):
        make_tiny(TinyModel(layers=1, hidden=16, mlp=16), tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "three years"
    with pytest.raises(RenderError, match="is a file"):
        make_tiny(TinyModel(layers=1, hidden=16, mlp=16), tmp_path / "thesis.txt", force=True)
    (tmp_path / "empty").mkdir()
    assert make_tiny(TinyModel(layers=1, hidden=16, mlp=16), tmp_path / "empty").is_dir()


def test_a_damaged_marker_is_another_model(tmp_path: Path) -> None:
    made = make_tiny(TinyModel(layers=1, hidden=16, mlp=16), tmp_path / "m")
    (made / "tiny.json").write_text("{")
    with pytest.raises(RenderError, match="already holds something else"):
        make_tiny(TinyModel(layers=1, hidden=16, mlp=16), made)
