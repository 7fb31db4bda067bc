"""Whether a teacher or reference reads the policy's token ids as the policy does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.recipe.schema import TinyModel
from trivet.recipe.schema import Trainer as Config
from trivet.render.tiny import make_tiny
from trivet.trainer.model import ModelError
from trivet.trainer.trainer import Trainer
from trivet.trainer.vocabulary import check_vocabulary

SMALL = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 32, "context": 64}


def tiny(folder: Path, **more: Any) -> Path:
    return make_tiny(TinyModel(**{**SMALL, **more}), folder)


def rows(model: Path, number: int | None = None) -> int:
    """Rows for ids according to the configuration, after setting them."""
    config = json.loads((model / "config.json").read_text())
    if number is not None:
        config["vocab_size"] = number
        (model / "config.json").write_text(json.dumps(config))
    return int(config["vocab_size"])


def test_the_same_symbols_in_more_rows_are_let_through(tmp_path: Path) -> None:
    """Families pad the projections of their larger models; fewer rows than ids are refused."""
    policy, teacher = tiny(tmp_path / "policy"), tiny(tmp_path / "teacher", seed=3)
    have = rows(policy)
    check_vocabulary("teacher", teacher, policy, have)
    rows(teacher, have + 128)
    check_vocabulary("teacher", teacher, policy, have)
    rows(teacher, have - 1)
    with pytest.raises(ModelError, match=rf"the teacher has rows for {have - 1} ids, the policy for {have}"):
        check_vocabulary("teacher", teacher, policy, have)


def test_another_order_of_as_many_symbols_is_refused(tmp_path: Path) -> None:
    """Sizes agree, and every id would quietly mean another thing."""
    policy = tiny(tmp_path / "policy", alphabet="0123456789+=")
    teacher = tiny(tmp_path / "teacher", alphabet="123456789+=0")
    assert rows(policy) == rows(teacher)
    with pytest.raises(ModelError, match=r"12 of the policy's \d+ symbols differ, the first '0', id \d+"):
        check_vocabulary("teacher", teacher, policy, rows(policy))


def test_a_larger_tokenizer_may_teach_a_smaller_one_only(tmp_path: Path) -> None:
    small, large = tiny(tmp_path / "a", alphabet="0123"), tiny(tmp_path / "b", alphabet="012345")
    check_vocabulary("teacher", large, small, rows(small))
    with pytest.raises(ModelError, match=r"2 of the policy's .* and no symbol to it"):
        check_vocabulary("teacher", small, large, rows(large))


def test_without_tokenizers_sizes_must_agree(tools: Any) -> None:
    """Found when the trainer is made, not at the first step."""
    Trainer(tools.tiny_model(), Config(), device="cpu", teacher=tools.tiny_model(seed=1))
    for name in ("teacher", "reference"):
        other: dict[str, Any] = {name: tools.tiny_model(vocab_size=70)}
        with pytest.raises(ModelError, match=f"the {name} knows 70 symbols, the policy 61"):
            Trainer(tools.tiny_model(), Config(), device="cpu", **other)
