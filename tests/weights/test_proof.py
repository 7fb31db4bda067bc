"""The proof of arrival, with engines that lie (golden case 10)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from trivet.weights import MemoryStore, ProofFailed, checksums, prove, prove_probe


class FakeEngine:
    """Holds copies of tensors; `keeps` names those it silently does not update."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], keeps: frozenset[str] = frozenset()) -> None:
        self.held = {name: t.clone() for name, t in tensors.items()}
        self.keeps = keeps

    def update(self, tensors: Mapping[str, torch.Tensor], version: int) -> dict[str, str]:
        for name, tensor in tensors.items():
            if name not in self.keeps:
                self.held[name].copy_(tensor)
        return checksums(self.held)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(6, 5, generator=generator) for i in range(4)}


def test_an_honest_update_passes() -> None:
    store, new = MemoryStore(), weights(1)
    published = store.publish(new, 7)
    prove(published.checksums, FakeEngine(weights(0)).update(store.fetch(7), 7), 7)


def test_an_engine_that_keeps_old_weights_is_caught() -> None:
    store = MemoryStore()
    engine = FakeEngine(weights(0), keeps=frozenset(weights(0)))
    published = store.publish(weights(1), 7)
    with pytest.raises(ProofFailed, match=r"version 7 .* 4 differ.*layer\.0\.weight") as caught:
        prove(published.checksums, engine.update(store.fetch(7), 7), 7)
    assert caught.value.version == 7
    assert len(caught.value.names) == 4
    # the next start works
    prove(published.checksums, FakeEngine(weights(0)).update(store.fetch(7), 7), 7)


def test_one_stale_tensor_is_named() -> None:
    store = MemoryStore()
    engine = FakeEngine(weights(0), keeps=frozenset({"layer.2.weight"}))
    published = store.publish(weights(1), 8)
    with pytest.raises(ProofFailed, match=r"1 differing: layer\.2\.weight") as caught:
        prove(published.checksums, engine.update(store.fetch(8), 8), 8)
    assert caught.value.names == ("layer.2.weight",)


def test_missing_and_extra_are_counted() -> None:
    with pytest.raises(ProofFailed, match=r"1 missing: b; 1 extra: z"):
        prove({"a": "1", "b": "2"}, {"a": "1", "z": "9"}, 3)
    with pytest.raises(ProofFailed, match="and 2 more"):
        prove({f"t{i}": "1" for i in range(5)}, {}, 3)
    with pytest.raises(ProofFailed, match="nothing was published"):
        prove({}, {}, 3)


TIED = {"lm_head.weight": "embed.weight"}


def test_tied_embeddings_may_be_reported_under_either_name() -> None:
    for got in ({"embed.weight": "1"}, {"lm_head.weight": "1"}, {"embed.weight": "1", "lm_head.weight": "1"}):
        prove({"embed.weight": "1"}, got, 1, tied=TIED)


def test_a_stale_head_beside_new_embeddings_is_caught() -> None:
    with pytest.raises(ProofFailed, match=r"1 differing: lm_head\.weight"):
        prove({"embed.weight": "1"}, {"embed.weight": "1", "lm_head.weight": "0"}, 1, tied=TIED)
    # also where the trainer lists the tied tensor once and the engine's head is a tensor of its own
    prove({"embed.weight": "1"}, {"embed.weight": "1", "lm_head.weight": "1"}, 1)
    with pytest.raises(ProofFailed, match=r"1 extra: lm_head\.weight"):
        prove({"embed.weight": "1"}, {"embed.weight": "1", "lm_head.weight": "0"}, 1)


def test_training_on_after_publishing_is_caught() -> None:
    store, new = MemoryStore(), weights(1)
    published = store.publish(new, 2)
    new["layer.1.weight"] += 1e-3  # the trainer stepped before the engine read
    with pytest.raises(ProofFailed, match=r"layer\.1\.weight"):
        prove(published.checksums, FakeEngine(weights(0)).update(store.fetch(2), 2), 2)


def test_probe() -> None:
    want = np.array([-1.0, -2.0, -np.inf])
    assert prove_probe(want, np.array([-1.0, -2.0005, -np.inf]), 4) == pytest.approx(0.0005)
    with pytest.raises(ProofFailed, match=r"version 4: probe: token 2 .*1 of 3 tokens"):
        prove_probe(want, np.array([-1.0, -2.5, -np.inf]), 4)
    with pytest.raises(ProofFailed, match="token 1 "):
        prove_probe(want, np.array([np.nan, -2.0, -np.inf]), 4)
    with pytest.raises(ProofFailed, match="shape"):
        prove_probe(want, want[:2], 4)
    with pytest.raises(ProofFailed, match="at least 2 tokens"):
        prove_probe(want[:0], want[:0], 4)
