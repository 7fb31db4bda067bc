"""Optimiser, schedules, patterns, guards, dtypes, models: what surrounds the gradient."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet.recipe.schema import Trainer as Config
from trivet.trainer import ModelError, PatternError, Trainer, TrainingDiverged
from trivet.trainer.optim import gradient_norm, learning_rate


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def poison(model: Any, value: float = float("nan")) -> None:
    """A gradient that is not finite, made where real ones come from: in the final norm's backward pass."""
    model.model.norm.weight.register_hook(lambda grad: grad * value)


# -- bad updates ---------------------------------------------------------------------------------


def test_a_bad_update_touches_nothing_and_is_counted(tools: Any) -> None:
    model, prepared = tools.tiny_model(dtype=torch.float32), tools.make_prepared(tools.random_groups())
    trainer = Trainer(model, Config(lr=0.1, max_bad_updates=3), device="cpu")
    trainer.update(prepared, step=1)
    before, state = weights(model), {k: v.clone() for k, v in trainer.optimiser_tensors().items()}
    poison(model)
    for n in (1, 2):
        metrics = trainer.update(prepared, step=2)
        assert metrics["train/bad_updates"] == n
    with pytest.raises(
        TrainingDiverged, match=r"step 2: the gradient norm is nan.*model.norm.weight.*bad update 3"
    ):
        trainer.update(prepared, step=2)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert all(torch.equal(state[k], v) for k, v in trainer.optimiser_tensors().items())
    assert trainer.updates == 1


def test_good_updates_end_a_row_of_bad_ones(tools: Any) -> None:
    model, prepared = tools.tiny_model(dtype=torch.float32), tools.make_prepared(tools.random_groups())
    trainer = Trainer(model, Config(lr=1e-3, max_bad_updates=2), device="cpu")
    for _ in range(3):
        handle = model.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
        assert trainer.update(prepared, step=1)["train/bad_updates"] == 1.0
        handle.remove()
        assert trainer.update(prepared, step=1)["train/bad_updates"] == 0.0


def test_a_loss_that_is_not_finite_names_the_rows(tools: Any) -> None:
    model = tools.tiny_model(dtype=torch.float32)
    prepared = tools.make_prepared(tools.random_groups(), {"kind": "grpo", "clip": None, "tis": None})
    trainer = Trainer(model, Config(max_bad_updates=1), device="cpu")
    prepared.streams[0].weight_T[prepared.streams[0].weight_T > 0] = np.inf
    with pytest.raises(TrainingDiverged, match=r"the loss of rows 0\.\.15 is"):
        trainer.update(prepared, step=7)


def test_broken_weights_are_found_by_the_annotation(tools: Any) -> None:
    model, prepared = tools.tiny_model(dtype=torch.float32), tools.make_prepared(tools.random_groups())
    trainer = Trainer(model, Config(), device="cpu")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="weights are broken"):
        trainer.annotate(prepared.batch, {"proximal_logp"})


# -- optimiser -----------------------------------------------------------------------------------


def test_one_step_is_adamw_by_hand(tools: Any) -> None:
    """First step: p (1 - lr wd) - lr g / (|g| + eps) with g clipped; norms do not decay."""
    model, prepared = tools.tiny_model(), tools.make_prepared(tools.random_groups())
    before = weights(model)
    config = Config(lr=0.01, weight_decay=0.1, clip_grad_norm=0.5, eps=1e-8)
    metrics = Trainer(model, config, device="cpu").update(prepared, step=1)
    assert metrics["train/grad_norm"] > 0.5
    total = 0.0
    for name, p in model.named_parameters():
        assert p.grad is not None
        total += float(p.grad.square().sum())
        decay = 1 - 0.01 * 0.1 if p.ndim > 1 else 1.0
        expected = before[name] * decay - 0.01 * p.grad / (p.grad.abs() + 1e-8)
        assert torch.allclose(p, expected, rtol=0, atol=1e-12), name
    assert total**0.5 == pytest.approx(0.5, rel=1e-9)


def test_gradient_norm_is_exact_for_large_matrices() -> None:
    """torch's own float32 norm is wrong in the third digit here."""
    p = torch.nn.Parameter(torch.zeros(40_000, 256))
    p.grad = torch.full_like(p, 1e-3)
    assert gradient_norm([p]) == pytest.approx(1e-3 * (40_000 * 256) ** 0.5, rel=1e-6)


def test_schedules() -> None:
    def at(u: int, **more: Any) -> float:
        return learning_rate(Config(lr=1.0, warmup_steps=4, **more), u, 12)

    assert [at(u) for u in (0, 1, 3, 4, 50)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [at(u, schedule="linear") for u in (4, 8, 12, 20)] == [1.0, 0.5, 0.0, 0.0]
    assert [at(u, schedule="linear", min_lr_ratio=0.2) for u in (4, 8, 12)] == pytest.approx([1.0, 0.6, 0.2])
    assert [at(u, schedule="cosine") for u in (4, 6, 8, 12)] == pytest.approx([1.0, 0.85355339, 0.5, 0.0])


def test_a_schedule_without_an_end_is_refused(tools: Any) -> None:
    with pytest.raises(ValueError, match="give the stage `steps`"):
        Trainer(tools.tiny_model(), Config(schedule="cosine"), device="cpu")


def test_phases_change_the_learning_rate_and_what_moves(tools: Any) -> None:
    model, prepared = tools.tiny_model(), tools.make_prepared(tools.random_groups())
    trainer = Trainer(model, Config(lr=0.01), device="cpu")
    assert trainer.update(prepared, step=1)["train/lr"] == 0.01
    trainer.set(Config(lr=0.02, frozen=["model.layers.0.*"]))
    before = weights(model)
    assert trainer.update(prepared, step=2)["train/lr"] == 0.02
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p) == name.startswith("model.layers.0."), name
    with pytest.raises(ValueError, match=r"trainer\.dtype cannot change"):
        trainer.set(Config(dtype="bfloat16"))


# -- patterns ------------------------------------------------------------------------------------


def test_only_what_is_trainable_moves(tools: Any) -> None:
    model, prepared = tools.tiny_model(), tools.make_prepared(tools.random_groups())
    before = weights(model)
    config = Config(lr=0.01, trainable=["*mlp*", "*norm*"], frozen=["*layers.1*"])
    Trainer(model, config, device="cpu").update(prepared, step=1)
    for name, p in model.named_parameters():
        moves = ("mlp" in name or "norm" in name) and "layers.1" not in name
        assert torch.equal(before[name], p) != moves, name


def test_a_tied_head_is_matched_by_either_name(tools: Any) -> None:
    model = tools.tiny_model()
    Trainer(model, Config(frozen=["lm_head.weight"]), device="cpu")
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.model.norm.weight.requires_grad


def test_a_pattern_that_matches_nothing_is_an_error(tools: Any) -> None:
    with pytest.raises(
        PatternError, match=r"trainer\.frozen: 'model\.layer\.0\.mlp\*'.*model\.layers\.0\.mlp"
    ):
        Trainer(tools.tiny_model(), Config(frozen=["model.layer.0.mlp*"]), device="cpu")
    with pytest.raises(PatternError, match="leave nothing to train"):
        Trainer(tools.tiny_model(), Config(frozen=["*"]), device="cpu")


def test_only_the_head_is_trained(tools: Any) -> None:
    model, prepared = tools.tiny_model(tie_word_embeddings=False), tools.make_prepared(tools.random_groups())
    before = weights(model)
    Trainer(model, Config(lr=0.01, trainable=["lm_head.weight"]), device="cpu").update(prepared, step=1)
    moved = [n for n, p in model.named_parameters() if not torch.equal(before[n], p)]
    assert moved == ["lm_head.weight"]


# -- computation ---------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_nothing(tools: Any) -> None:
    prepared, out = tools.make_prepared(tools.random_groups()), []
    for on in (False, True):
        model = tools.tiny_model()
        trainer = Trainer(model, Config(lr=1e-30, gradient_checkpointing=on), device="cpu")
        metrics = trainer.update(prepared, step=1)
        out.append((metrics["train/loss"], tools.gradients(model)))
    assert out[0][0] == out[1][0]
    assert tools.worst_gap(out[1][1], out[0][1]) < 1e-12


def test_gradient_checkpointing_turns_no_dropout_on() -> None:
    """OPT's layers drop out where they are in training mode, and only there are they computed again."""
    import transformers as hf

    shape: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "vocab_size": 61}
    config = hf.OPTConfig(
        **shape, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, dropout=0.5
    )
    torch.manual_seed(0)
    model = hf.OPTForCausalLM(config)
    trainer = Trainer(model, Config(gradient_checkpointing=True), device="cpu")
    saved: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    ids, position, layout = _packed_row(trainer, 40)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        first = trainer.model.forward(ids, position, layout)
    assert sum(saved) < 40 * 32 * 8  # the layers' inputs, not what is inside them
    assert torch.equal(first, trainer.model.forward(ids, position, layout))
    first.sum().backward()
    again = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = Trainer(copy.deepcopy(model), Config(), device="cpu")
    hidden = plain.model.forward(ids, position, layout)
    assert torch.equal(hidden, first)
    hidden.sum().backward()
    for name, p in plain.model.module.named_parameters():
        assert p.grad is None or torch.allclose(p.grad, again[name], atol=1e-5)


def _packed_row(trainer: Trainer, tokens: int) -> tuple[Any, Any, Any]:
    from trivet.trainer.packing import plan

    ids, position = np.random.default_rng(0).integers(2, 61, tokens), np.arange(tokens)
    grid = plan(
        ids_T=ids,
        position_T=position,
        row_start_R=np.zeros(1, np.int64),
        row_length_R=np.asarray([tokens]),
        unit_R=np.zeros(1, np.int64),
        wanted_T=position > 0,
        micro_tokens=tokens,
    )
    return trainer.model.tokens(grid.micro[0], ids, position)


def test_dropout_is_off(tools: Any) -> None:
    model = tools.tiny_model("qwen3", attention_dropout=0.5).train()
    prepared = tools.make_prepared(tools.random_groups())
    trainer = Trainer(model, Config(lr=1e-30), device="cpu")
    assert trainer.update(prepared, step=1)["train/loss"] == trainer.update(prepared, step=2)["train/loss"]


def test_bfloat16_is_close_and_keeps_float32_weights(tools: Any) -> None:
    prepared, norms = tools.make_prepared(tools.random_groups()), []
    for dtype in ("float32", "bfloat16"):
        model = tools.tiny_model(dtype=torch.float32, initializer_range=0.05)
        trainer = Trainer(model, Config(lr=1e-3, dtype=dtype, clip_grad_norm=1e9), device="cpu")
        norms.append(trainer.update(prepared, step=1)["train/grad_norm"])
        assert all(t.dtype == torch.float32 for t in trainer.state_tensors().values())
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_sft_learns(tools: Any) -> None:
    model, prepared = tools.tiny_model(dtype=torch.float32), tools.make_prepared(tools.sft_groups(), "sft")
    trainer = Trainer(model, Config(lr=0.01), device="cpu")
    losses = [trainer.update(prepared, step=s)["train/loss"] for s in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_same_run_twice_is_bit_identical(tools: Any) -> None:
    ends = []
    for _ in range(2):
        model = tools.tiny_model(dtype=torch.float32)
        trainer = Trainer(model, Config(lr=1e-3), device="cpu", micro_tokens=64)
        for s in range(3):
            trainer.update(tools.make_prepared(tools.random_groups(seed=s)), step=s)
        ends.append(weights(model))
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_metrics_of_an_update(tools: Any) -> None:
    prepared = tools.make_prepared(tools.random_groups())
    metrics = Trainer(tools.tiny_model(), Config(), device="cpu").update(prepared, step=1)
    batch = prepared.batch
    assert metrics["train/tokens_trained"] == (batch.train_T > 0).sum()
    assert metrics["train/tokens_forwarded"] + metrics["train/tokens_shared"] == batch.tokens - batch.rows
    assert 0 < metrics["train/entropy"] < np.log(tools.vocabulary)
    for name in ("train/lr", "train/tokens_per_s", "time/train_forward_s", "train/kl"):
        assert metrics[name] > 0, name
    assert all(isinstance(v, float) for v in metrics.values())


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral"])
def test_probe_equals_the_models_own_forward(tools: Any, family: str) -> None:
    more = {"sliding_window": 9} if family == "mistral" else {}
    model = tools.tiny_model(family, dtype=torch.float32, **more)
    ids = np.random.default_rng(0).integers(2, tools.vocabulary, 40)
    with torch.no_grad():
        full = torch.log_softmax(model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1], -1)
    expected = full.gather(1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
    got = Trainer(model, Config(), device="cpu").logprobs_of(ids.astype(np.int32))
    assert got.shape == (39,)
    assert np.abs(got - expected).max() < 1e-4


@pytest.mark.parametrize("name", ["Gemma2", "Cohere"])
def test_models_that_do_more_are_refused(name: str) -> None:
    import transformers as hf

    config = getattr(hf, f"{name}Config")(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        pad_token_id=0,
    )
    model = getattr(hf, f"{name}ForCausalLM")(config)
    with pytest.raises(
        RuntimeError if name == "Gemma2" else ModelError, match=r"softcap|packed logits differ"
    ):
        Trainer(model, Config(), device="cpu")


def test_half_precision_excuses_no_other_computation() -> None:
    """Position biases change logits by less than bfloat16 may: the proof is in float32 first."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match="packed logits differ"):
        Trainer(hf.BloomForCausalLM(config), Config(dtype="bfloat16"), device="cpu")


def test_a_probe_of_one_token_is_refused(tools: Any) -> None:
    trainer = Trainer(tools.tiny_model(), Config(), device="cpu")
    with pytest.raises(ValueError, match="at least 2"):
        trainer.logprobs_of(np.asarray([3]))


def test_a_refused_phase_leaves_the_trainer_as_it_was(tools: Any) -> None:
    trainer = Trainer(tools.tiny_model(), Config(), device="cpu")
    for config, error in (
        (Config(frozen=["*"]), PatternError),
        (Config(frozen=["model.layers.0.*"], schedule="linear"), ValueError),  # no end is known
    ):
        with pytest.raises(error):
            trainer.set(config)
        assert all(p.requires_grad for p in trainer.model.module.parameters())


def test_export_is_a_directory_transformers_and_the_trainer_read(tools: Any, tmp_path: Path) -> None:
    import transformers as hf

    source = tmp_path / "source"
    tools.tiny_model(dtype=torch.float32).save_pretrained(source)
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    trainer = Trainer(source, Config(lr=0.01), device="cpu")
    trainer.update(tools.make_prepared(tools.random_groups()), step=1)
    out = trainer.export(tmp_path / "out" / "model")
    assert (out / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert (out / "chat_template.jinja").exists()
    ids = np.arange(2, 20)
    again = Trainer(out, Config(), device="cpu")
    assert np.array_equal(again.logprobs_of(ids), trainer.logprobs_of(ids))
    model = hf.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings
    assert list(trainer.state_tensors()) == [n for n, _ in model.named_parameters()]
    assert "lm_head.weight" not in trainer.state_tensors()
    trainer.update(tools.make_prepared(tools.random_groups()), step=2)  # exporting does not end training


def test_state_tensors_are_the_weights_themselves(tools: Any) -> None:
    model = tools.tiny_model()
    tensors = Trainer(model, Config(), device="cpu").state_tensors()
    assert tensors["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
    assert not any(t.requires_grad for t in tensors.values())
