"""Adapters: by hand; off is the start exactly; merged is what is sampled and exported; only they move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trivet.recipe.schema import Lora
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, checkpoint
from trivet.trainer.lora import Adapters
from trivet.trainer.optim import PatternError

IDS = np.arange(2, 24)


def trained(tools: Any, updates: int = 2, **lora: Any) -> Trainer:
    config = Config(lr=0.02, lora=Lora(rank=4, **lora))
    trainer = Trainer(tools.tiny_model(dtype=torch.float32), config, device="cpu")
    for step in range(updates):
        trainer.update(tools.make_prepared(tools.random_groups()), step=step + 1)
    return trainer


def test_a_layer_by_hand() -> None:
    """W = [[1, 2]], A = [[1, -1]], B = [[3]], alpha / r = 2: at x = [1, 3], 7 + 2 * 3 * (1 - 3) = -5."""
    module = nn.Sequential(nn.Linear(2, 1, bias=False))
    adapters = Adapters(module, Lora(rank=1, alpha=2.0))
    layer: Any = module[0]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_A.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_B.fill_(3.0)
    x = torch.tensor([[1.0, 3.0]])
    assert module(x).item() == -5.0
    assert adapters.merged(layer).tolist() == [[7.0, -4.0]]
    with adapters.off():
        assert module(x).item() == 7.0


def test_new_adapters_change_nothing_and_only_they_are_trained(tools: Any) -> None:
    plain = Trainer(tools.tiny_model(dtype=torch.float32), Config(), device="cpu")
    trainer = trained(tools, 0)
    assert np.array_equal(trainer.logprobs_of(IDS), plain.logprobs_of(IDS))
    before = {n: t.clone() for n, t in trainer.state_tensors().items()}
    trainer.update(tools.make_prepared(tools.random_groups()), step=1)
    moved = {n for n, t in trainer.state_tensors().items() if not torch.equal(t, before[n])}
    assert moved
    assert all(n.endswith((".lora_A", ".lora_B")) for n in moved)
    assert {n.split(".")[-2] for n in moved} >= {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
    moments = {n.split("/", 1)[1] for n in trainer.optimiser_tensors()}
    assert moments <= {n for n in before if "lora" in n}


def test_published_weights_are_a_plain_model_with_the_same_answers(tools: Any) -> None:
    trainer = trained(tools)
    plain = tools.tiny_model(dtype=torch.float32)
    names = {n for n, _ in plain.named_parameters()}
    published = trainer.published_tensors()
    assert published.keys() == names
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(published[name])
    other = Trainer(plain, Config(), device="cpu")
    assert np.allclose(other.logprobs_of(IDS), trainer.logprobs_of(IDS), atol=1e-5)


def test_with_adapters_off_the_policy_is_its_own_reference(tools: Any) -> None:
    plain = Trainer(tools.tiny_model(dtype=torch.float32), Config(), device="cpu")
    trainer = trained(tools)
    batches = [tools.make_prepared(tools.random_groups()).batch for _ in range(2)]
    for one, batch in zip((plain, trainer), batches, strict=True):
        batch.annotations.clear()
        one.annotate(batch, {"ref_logp", "proximal_logp"})
    assert np.array_equal(*(b.annotations["ref_logp"] for b in batches), equal_nan=True)
    gap = batches[1].annotations["proximal_logp"] - batches[1].annotations["ref_logp"]
    assert np.nanmax(np.abs(gap)) > 1e-3
    assert not trainer._frozen  # no copy was made


def test_export_is_merged_and_training_goes_on_from_where_it_was(tools: Any, tmp_path: Path) -> None:
    trainer, twin = trained(tools), trained(tools)
    out = trainer.export(tmp_path / "model")
    again = Trainer(out, Config(), device="cpu")
    assert np.allclose(again.logprobs_of(IDS), trainer.logprobs_of(IDS), atol=1e-5)
    for one in (trainer, twin):
        one.update(tools.make_prepared(tools.random_groups()), step=3)
    for name, tensor in trainer.state_tensors().items():
        assert torch.equal(tensor, twin.state_tensors()[name]), name


def test_the_adapters_folder_is_what_peft_reads(tools: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = trained(tools, targets=["q_proj", "*.mlp.down_proj"])
    out = trainer.export(tmp_path / "model")
    base = tools.tiny_model(dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(out / "adapter"))
    merged = Trainer(model.merge_and_unload(), Config(), device="cpu")
    assert np.allclose(merged.logprobs_of(IDS), trainer.logprobs_of(IDS), atol=1e-5)


def test_a_checkpoint_brings_back_the_adapters(tools: Any, tmp_path: Path) -> None:
    trainer = trained(tools)
    checkpoint.write(tmp_path, 2, trainer, {})
    fresh = trained(tools, 0)
    checkpoint.read(checkpoint.latest(tmp_path), fresh)  # type: ignore[arg-type]
    for one in (trainer, fresh):
        one.update(tools.make_prepared(tools.random_groups()), step=3)
    for name, tensor in trainer.state_tensors().items():
        assert torch.equal(tensor, fresh.state_tensors()[name]), name
    plain = Trainer(tools.tiny_model(dtype=torch.float32), Config(), device="cpu")
    with pytest.raises(checkpoint.CheckpointError, match="another model's"):
        checkpoint.read(checkpoint.latest(tmp_path), plain)  # type: ignore[arg-type]


def test_targets_that_are_not_there_are_named(tools: Any) -> None:
    with pytest.raises(PatternError, match=r"'query' matches no linear layer; .*q_proj"):
        trained(tools, 0, targets=["query"])
    with pytest.raises(ValueError, match="choose layers with lora"):
        Config(lora=Lora(), trainable=["*.mlp.*"])
