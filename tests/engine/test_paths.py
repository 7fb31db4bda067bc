"""Every path against the model's own full forward, over ragged concurrent requests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from trivet.engine import EngineError, Generation, Sampling
from trivet.engine.torch import TorchEngine

LENGTHS = (1, 2, 17, 40, 40, 5, 9)
TEMPERATURES = (1.0, 0.7)


async def _play(engine: TorchEngine, prompts: list[np.ndarray]) -> list[Generation]:
    return await asyncio.gather(
        *[
            engine.generate(
                p,
                Sampling(max_tokens=4 + 3 * i, seed=i, temperature=TEMPERATURES[i % 2], order=(i,)),
                session=f"s{i}",
            )
            for i, p in enumerate(prompts)
        ]
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kind", "fused", "path"),
    [
        ("llama", True, "FusedModel"),
        ("llama-biased-tied-scaled", True, "FusedModel"),
        ("qwen2", True, "FusedModel"),
        ("qwen3", True, "FusedModel"),
        ("qwen3-tied", True, "FusedModel"),
        ("llama", False, "CachedModel"),
        ("qwen3", False, "CachedModel"),
        ("gpt2", True, "CachedModel"),
        ("gpt-neox", True, "CachedModel"),
        ("mistral-window", True, "CachedModel"),  # windows shorter than most of the prompts
        ("qwen2-window", True, "CachedModel"),
        ("gemma3-window", True, "CachedModel"),
        ("bloom", True, "RecomputeModel"),  # positions come from a mask our slots cannot give
    ],
)
def test_logprobs_equal_the_full_forward(
    kind: str, fused: bool, path: str, deterministic: bool, models, engines, prompt, reference
) -> None:
    model = models(kind)
    engine = engines(model, fused=fused, deterministic=deterministic)
    assert engine.path == path
    prompts = [prompt(n) for n in LENGTHS]  # two are equal: shared
    generations = asyncio.run(_play(engine, prompts))
    for i, (p, g) in enumerate(zip(prompts, generations, strict=True)):
        assert len(g.ids_T) == 4 + 3 * i
        assert g.finish == "length"
        expected = reference(model, np.concatenate([p, g.ids_T]), TEMPERATURES[i % 2])[len(p) - 1 :]
        assert np.abs(g.logprob_T - expected).max() < 1e-4
    assert engine.metrics()["reused_tokens"] == 39


@pytest.mark.parametrize("kind", ["llama-biased-tied-scaled", "qwen3", "gpt2"])
def test_probe_equals_the_full_forward(kind: str, models, engines, prompt, reference) -> None:
    ids = prompt(50)
    got = engines(models(kind)).logprobs(ids)
    assert got.shape == (49,)
    assert np.abs(got - reference(models(kind), ids)).max() < 1e-4


def test_parallel_equals_single(models, engines, prompt) -> None:
    prompts = [prompt(n) for n in LENGTHS]
    together = asyncio.run(_play(engines(models("qwen3")), prompts))
    alone = engines(models("qwen3"), slots=1)

    async def one_by_one() -> list[Generation]:
        out = []
        for i, p in enumerate(prompts):
            sampling = Sampling(max_tokens=4 + 3 * i, seed=i, temperature=TEMPERATURES[i % 2])
            out.append(await alone.generate(p, sampling, session=f"s{i}"))
        return out

    for a, b in zip(together, asyncio.run(one_by_one()), strict=True):
        assert np.array_equal(a.ids_T, b.ids_T)
        assert np.abs(a.logprob_T - b.logprob_T).max() < 1e-4


def test_rows_grouped_by_length_give_the_same(models, engines, prompt, reference, monkeypatch) -> None:
    """Large models decode rows in groups of similar length, exchanging rows when that order breaks."""
    monkeypatch.setattr("trivet.engine.torch.scheduler.GROUP_BYTES", 1)
    monkeypatch.setattr("trivet.engine.torch.scheduler.GROUP_ROWS", 2)
    model = models("qwen3")
    engine = engines(model, slots=6)
    prompts = [prompt(3 + 7 * (i * 5 % 11), seed=i) for i in range(14)]
    generations = asyncio.run(_play(engine, prompts))
    for i, (p, g) in enumerate(zip(prompts, generations, strict=True)):
        expected = reference(model, np.concatenate([p, g.ids_T]), TEMPERATURES[i % 2])[len(p) - 1 :]
        assert np.abs(g.logprob_T - expected).max() < 1e-4
    assert engine.metrics()["moved_rows"] > 0


def test_long_prompts_are_prefilled_in_chunks(models, engines, prompt, reference, monkeypatch) -> None:
    monkeypatch.setattr("trivet.engine.torch.scheduler.CHUNK", 16)
    monkeypatch.setattr("trivet.engine.torch.scheduler.PREFILL_TOKENS", 32)
    model = models("llama")
    engine = engines(model)
    prompts = [prompt(n, seed=n) for n in (100, 90, 33, 7, 60)]
    generations = asyncio.run(_play(engine, prompts))
    for i, (p, g) in enumerate(zip(prompts, generations, strict=True)):
        expected = reference(model, np.concatenate([p, g.ids_T]), TEMPERATURES[i % 2])[len(p) - 1 :]
        assert np.abs(g.logprob_T - expected).max() < 1e-4
    assert engine.metrics()["prefilled_tokens"] == sum(len(p) - 1 for p in prompts)


def test_a_context_beyond_the_models_is_refused(models, engines) -> None:
    with pytest.raises(EngineError, match=r"context is 2000.*positions up to 1024"):
        engines(models("llama"), context=2000)


def test_a_window_that_hides_nothing_keeps_the_fast_path(models, engines) -> None:
    assert engines(models("qwen2-window"), context=21).path == "FusedModel"


def test_a_module_that_a_trainer_took_can_be_handed_over(models, engines, prompt, reference) -> None:
    """Training gives it an attention that works inside the trainer only."""
    import copy

    from transformers import AttentionInterface

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("called outside the trainer")

    AttentionInterface.register("test_elsewhere", elsewhere)
    model = copy.deepcopy(models("qwen3"))
    model.set_attn_implementation("test_elsewhere")
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for fused in (True, False):
        engine = engines(model, fused=fused)
        assert np.abs(engine.logprobs(prompt(30)) - reference(models("qwen3"), prompt(30))).max() < 1e-4
    assert all(p.grad is None for p in engine._model.model.parameters())
    assert model.config._attn_implementation == "test_elsewhere"


def test_a_directory_is_read_and_a_module_is_copied(tmp_path, models, engines, prompt) -> None:
    model: Any = models("qwen3-tied")
    model.save_pretrained(tmp_path / "model")
    from_disk, from_module = engines(tmp_path / "model"), engines(model)
    assert np.array_equal(from_disk.logprobs(prompt(9)), from_module.logprobs(prompt(9)))
    theirs = {t.data_ptr() for t in model.parameters()}
    assert not theirs & {t.data_ptr() for t in from_module._model.tensors.values()}
