"""New weights: in place, all or nothing, proved by checksums, exact versions per token."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from trivet.engine import EngineError, Generation, Sampling
from trivet.weights import checksum, checksums

KINDS = ["llama", "llama-biased-tied-scaled", "qwen2", "qwen3-tied", "gpt2"]


def _named(model: Any) -> dict[str, torch.Tensor]:
    """What a trainer publishes: every parameter once."""
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_arrives_whole(kind: str, models, engines, prompt, reference) -> None:
    old, new, ids = models(kind), models(kind, seed=1), prompt(40)
    engine = engines(old, version=3)
    assert np.abs(engine.logprobs(ids) - reference(old, ids)).max() < 1e-4
    sums = engine.update(_named(new), 7)
    assert engine.version == 7
    assert sums == checksums(_named(new))
    assert np.abs(engine.logprobs(ids) - reference(new, ids)).max() < 1e-4
    g = asyncio.run(engine.generate(ids, Sampling(max_tokens=8, seed=0), session="s"))
    assert g.version_T.tolist() == [7] * 8
    expected = reference(new, np.concatenate([ids, g.ids_T]))[39:]
    assert np.abs(g.logprob_T - expected).max() < 1e-4


def test_checksums_are_read_back_from_the_engines_own_storage(models, engines) -> None:
    """An engine that accepts an update and keeps something else cannot answer with the right checksum."""
    new = _named(models("qwen3", seed=1))
    engine = engines(models("qwen3"))
    name = "model.layers.1.self_attn.k_proj.weight"

    class Lossy(torch.Tensor):
        pass

    kept = engine._model.tensors[name].clone()
    refresh = engine._model.refresh

    def lose() -> None:
        engine._model.tensors[name].copy_(kept)
        refresh()

    engine._model.refresh = lose  # type: ignore[method-assign]
    sums = engine.update(new, 1)
    assert sums[name] == checksum(kept) != checksum(new[name])
    assert {n for n in new if sums[n] != checksum(new[n])} == {name}


def test_caches_die_with_the_version(models, engines, prompt, reference) -> None:
    engine = engines(models("llama"))

    async def ask() -> Generation:
        return await engine.generate(prompt(40), Sampling(max_tokens=4, seed=0), session="s")

    asyncio.run(ask())
    assert asyncio.run(ask()).counters["reused"] == 39
    engine.update(_named(models("llama", seed=1)), 1)
    g = asyncio.run(ask())
    assert (g.counters["reused"], g.counters["prefilled"]) == (0, 39)
    expected = reference(models("llama", seed=1), np.concatenate([prompt(40), g.ids_T]))[39:]
    assert np.abs(g.logprob_T - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_tokens_keep_their_version_across_an_update(kind, models, engines, prompt, reference) -> None:
    old, new = models(kind), models(kind, seed=1)
    engine = engines(old, slots=8, context=700)
    prompts = [prompt(20), prompt(20), prompt(33)]

    async def play() -> list[Generation]:
        tasks = [
            asyncio.create_task(
                engine.generate(p, Sampling(max_tokens=600, seed=i, temperature=0.8), session=f"{i}")
            )
            for i, p in enumerate(prompts)
        ]
        while engine._scheduler.slots.size.min() < 0 or not (engine._scheduler.slots.size > 60).sum() >= 3:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(engine.update, _named(new), 5)
        return await asyncio.gather(*tasks)

    generations = asyncio.run(play())
    for p, g in zip(prompts, generations, strict=True):
        changed = int((g.version_T == 0).sum())
        assert 20 < changed < 600
        assert g.version_T.tolist() == [0] * changed + [5] * (600 - changed)
        ids = np.concatenate([p, g.ids_T])
        before, after = (reference(m, ids, 0.8)[len(p) - 1 :] for m in (old, new))
        assert np.abs(g.logprob_T - before)[:changed].max() < 1e-4
        assert np.abs(g.logprob_T - after)[changed:].max() < 1e-4
        assert g.counters["recomputed"] == len(p) + changed - 1
    metrics = engine.metrics()
    assert metrics["recomputed_tokens"] == sum(g.counters["recomputed"] for g in generations)


def test_names_and_shapes_that_do_not_fit_are_listed(models, engines, prompt) -> None:
    engine = engines(models("llama"))
    before = engine.logprobs(prompt(9))
    good = _named(models("llama", seed=1))
    bad = dict(good)
    bad["model.norm.weight"] = torch.zeros(5)
    bad["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    del bad["lm_head.weight"]
    with pytest.raises(EngineError) as caught:
        engine.update(bad, 1)
    for part in (
        "unknown: model.layers.9.mlp.up_proj.weight",
        "missing: lm_head.weight",
        r"wrong shape: model.norm.weight [5] instead of [32]",
    ):
        assert part in str(caught.value)
    assert engine.version == 0  # nothing was touched: the engine is still good for its old version
    assert np.array_equal(engine.logprobs(prompt(9)), before)
    assert (
        len(asyncio.run(engine.generate(prompt(9), Sampling(max_tokens=2, seed=0), session="s")).ids_T) == 2
    )


def test_a_failure_half_way_takes_the_engine_off_the_line(models, engines, prompt) -> None:
    engine = engines(models("llama"), context=1000)
    good = _named(models("llama", seed=1))

    class Breaks(dict):
        """Reads well once (names and shapes), then fails at a tensor in the middle."""

        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            if name == "model.layers.1.mlp.up_proj.weight":
                self.reads += 1
                if self.reads > 1:
                    raise OSError("disk is gone")
            return super().__getitem__(name)

    async def play() -> Any:
        running = asyncio.create_task(
            engine.generate(prompt(9), Sampling(max_tokens=900, seed=0), session="s")
        )
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match=r"version 4 failed half way.*disk is gone"):
            await asyncio.to_thread(engine.update, Breaks(good), 4)
        with pytest.raises(EngineError, match="mixture"):
            await running
        with pytest.raises(EngineError, match="until a whole update has succeeded"):
            await engine.generate(prompt(9), Sampling(max_tokens=2, seed=0), session="s")
        engine.update(good, 5)
        return await engine.generate(prompt(9), Sampling(max_tokens=2, seed=0), session="s")

    assert asyncio.run(play()).version_T.tolist() == [5, 5]


def test_tied_embeddings_under_both_names(models, engines) -> None:
    new = _named(models("qwen3-tied", seed=1))
    engine = engines(models("qwen3-tied"))
    head = {"lm_head.weight": new["model.embed_tokens.weight"].clone()}
    sums = engine.update({**head, **new}, 1)
    assert sums["lm_head.weight"] == sums["model.embed_tokens.weight"]
    assert sums == checksums({**head, **new})
    only_head = {**head, **{n: t for n, t in new.items() if n != "model.embed_tokens.weight"}}
    assert engine.update(only_head, 2) == checksums(only_head)
    with pytest.raises(EngineError, match="untied"):
        engine.update({**new, "lm_head.weight": head["lm_head.weight"] + 1}, 3)


def test_weights_of_another_dtype_and_from_numpy(models, engines, prompt, reference) -> None:
    new = _named(models("llama", seed=1))
    engine = engines(models("llama"))
    engine.update({name: t.numpy() for name, t in new.items()}, 1)
    assert np.abs(engine.logprobs(prompt(9)) - reference(models("llama", seed=1), prompt(9))).max() < 1e-4
    sums = engine.update({name: t.bfloat16() for name, t in new.items()}, 2)
    assert all(value.startswith("float32") for value in sums.values())  # as the engine holds them
