"""Stores: by reference in memory, one atomic file a version on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from trivet.weights import DiskStore, MemoryStore, WeightsError, checksums, prove


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(50, 8, generator=generator)
    fused = torch.randn(12, 8, generator=generator)
    return {
        "embed.weight": embed,
        "q.weight": fused[:4],  # slices of one buffer
        "kv.weight": fused[4:],
        "t.weight": torch.randn(8, 50, generator=generator).t(),  # not contiguous
        "half.weight": torch.randn(7, generator=generator).bfloat16(),
        "lm_head.weight": embed,  # tied
    }


def test_memory_hands_over_references() -> None:
    store, named = MemoryStore(), weights()
    assert store.latest() is None
    published = store.publish(named, 3, step=2)
    assert store.fetch(3)["q.weight"] is named["q.weight"]
    assert published == store.published(3)
    assert store.latest() == 3
    assert published.tied == {"lm_head.weight": "embed.weight"}
    assert "lm_head.weight" not in store.fetch(3)
    with pytest.raises(WeightsError, match=r"version 2 .*holds version 3"):
        store.fetch(2)
    with pytest.raises(WeightsError, match="only increase"):
        store.publish(named, 3)


def test_memory_before_the_first() -> None:
    with pytest.raises(WeightsError, match="nothing was published yet"):
        MemoryStore().fetch(0)


def test_disk_round_trip(tmp_path: Path) -> None:
    store, named = DiskStore(tmp_path / "w"), weights()
    published = store.publish(named, 1, step=4)
    reader = DiskStore(tmp_path / "w")
    assert reader.latest() == 1
    assert reader.published(1) == published
    assert published.step == 4
    fetched = reader.fetch(1)
    prove(published.checksums, checksums(fetched), 1)
    assert torch.equal(fetched["t.weight"], named["t.weight"])
    assert fetched["half.weight"].dtype == torch.bfloat16
    assert len(published.total) == 16
    assert published.total != store.publish(weights(1), 2).total


def test_disk_keeps_the_last(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, keep=2)
    store.publish(weights(0), 1)
    mapped = store.fetch(1)
    for version in (2, 5, 9):
        store.publish(weights(version), version)
    assert store.versions() == [5, 9]
    assert torch.equal(mapped["q.weight"], weights(0)["q.weight"])  # a mapped file outlives its name
    with pytest.raises(WeightsError, match=r"version 2 is not in .*holds \[5, 9\]"):
        store.fetch(2)
    with pytest.raises(WeightsError, match="only increase"):
        store.publish(weights(), 9)


def test_what_a_killed_publisher_left_is_swept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    (tmp_path / ".v00000001.safetensors.1.part").write_bytes(b"half")
    assert store.latest() is None
    store.publish(weights(), 1)
    assert os.listdir(tmp_path) == ["v00000001.safetensors"]


def test_disk_errors_are_clear(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with pytest.raises(WeightsError, match="it is empty"):
        store.fetch(1)
    store.publish(weights(), 1)
    with open(store.path(1), "rb+") as file:
        file.truncate(700)
    for read in (store.fetch, store.published):
        with pytest.raises(WeightsError, match="damaged"):
            read(1)
    store.path(2).write_bytes(b"")
    with pytest.raises(WeightsError, match="damaged"):
        store.fetch(2)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be made"):
        DiskStore(tmp_path / "file" / "w")
    with pytest.raises(WeightsError, match="at least 1"):
        DiskStore(tmp_path, keep=0)


def test_a_flipped_bit_is_found_by_the_proof(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    published = store.publish(weights(), 1)
    size = store.path(1).stat().st_size
    with open(store.path(1), "rb+") as file:
        file.seek(size - 5)
        byte = file.read(1)
        file.seek(size - 5)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Exception, match="1 differing"):
        prove(published.checksums, checksums(store.fetch(1)), 1)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    store = DiskStore(tmp_path)
    store.publish(weights(), 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1))
    with pytest.raises(WeightsError, match=r"No space left.*MB needed.*Free disk space"):
        store.publish(weights(1), 2)
    assert os.listdir(tmp_path) == ["v00000001.safetensors"]


def test_a_write_that_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WeightsError, match="Input/output error"):
        store.publish(weights(), 1)
    assert os.listdir(tmp_path) == []
    assert store.latest() is None
