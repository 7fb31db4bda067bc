"""Packed documents are trained as the examples they are: same loss, same gradient, own positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.conftest import sft_groups, tiny_model

from trivet.algorithms import resolve
from trivet.algorithms.base import AlgorithmError
from trivet.algorithms.prepare import prepare
from trivet.data.shards import Pack, PackedData, ShardError
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, collate, split
from trivet.trainer.labels import LossByLabel, metric_name
from trivet.trainer.packs import collate_packs
from trivet.types import Group


def packed(groups: Sequence[Group], sizes: Sequence[int]) -> list[Pack]:
    """The groups' rows, `sizes` of them in each pack."""
    rows = [group.rollouts[0].trace.rows()[0] for group in groups]
    packs, at = [], 0
    for size in sizes:
        own, names = rows[at : at + size], tuple(group.id for group in groups[at : at + size])
        packs.append(
            Pack(
                np.concatenate([row.ids_T for row in own]),
                np.concatenate([row.train_T for row in own]),
                np.asarray([len(row) for row in own], np.int32),
                names,
                tuple("ab"[i % 2] for i in range(at, at + size)),
                tuple("" if i % 3 else "third" for i in range(at, at + size)),
            )
        )
        at += size
    return packs


def gradient(trainer: Trainer) -> dict[str, np.ndarray]:
    named = trainer.model.module.named_parameters()
    return {name: p.grad.double().numpy().copy() for name, p in named if p.grad is not None}


def updated(batch, micro_tokens: int, aggregation: str = "token_mean") -> tuple[float, dict[str, np.ndarray]]:
    trainer = Trainer(
        tiny_model(dtype=torch.float32), Config(lr=1e-3, clip_grad_norm=1e9), micro_tokens=micro_tokens
    )
    prepared = prepare(batch, resolve({"kind": "sft", "aggregation": aggregation}))
    metrics = trainer.update(prepared, step=1)
    return metrics["train/loss"], gradient(trainer)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("sizes", "micro"), [([12], 4096), ([5, 1, 6], 4096), ([1] * 12, 60), ([4, 8], 64)])
def test_loss_and_gradient_are_those_of_the_examples(sizes: list[int], micro: int, aggregation: str) -> None:
    groups = sft_groups(12, seed=1)
    loss, wanted = updated(collate(groups), 4096, aggregation)
    batch, _ = collate_packs(packed(groups, sizes))
    own, found = updated(batch, micro, aggregation)
    assert own == pytest.approx(loss, rel=1e-6)
    norm = np.sqrt(sum((g**2).sum() for g in wanted.values()))
    for name, g in wanted.items():
        assert np.abs(found[name] - g).max() <= 1e-6 * norm, name


@given(st.integers(1, 9), st.integers(0, 5))
def test_the_batch_is_that_of_the_examples(documents: int, seed: int) -> None:
    groups = sft_groups(documents, seed=seed)
    wanted = collate(groups, step=7)
    batch, labels = collate_packs(packed(groups, [documents]), step=7)
    for name in ("ids_T", "position_T", "row_T", "train_T", "row_start_R", "row_length_R", "row_rollout_R"):
        own, theirs = getattr(batch, name), getattr(wanted, name)
        assert own.dtype == theirs.dtype
        assert np.array_equal(own, theirs)
    for name in ("length_N", "group_N", "source_N", "kind_G", "termination_N"):
        assert np.array_equal(getattr(batch, name), getattr(wanted, name))
    assert batch.group_ids == wanted.group_ids
    assert batch.step == 7
    assert len(labels["source"]) == documents


def test_updates_take_whole_documents() -> None:
    groups = sft_groups(10, seed=2)
    batch, _ = collate_packs(packed(groups, [4, 6]))
    parts = split(prepare(batch, resolve("sft")), 3)
    assert [part.batch.groups for part in parts] == [4, 3, 3]
    assert sum(part.batch.tokens for part in parts) == batch.tokens


def test_a_documents_first_token_is_never_trained() -> None:
    pack = packed(sft_groups(2), [2])[0]
    train_T = pack.train_T.copy()
    train_T[pack.lengths_D[0]] = 1.0
    bad = Pack(pack.ids_T, train_T, pack.lengths_D, pack.examples, pack.sources, pack.categories)
    with pytest.raises(AlgorithmError, match="nothing predicts it"):
        collate_packs([bad])


@pytest.mark.parametrize("fault", ["short", "names", "weight", "empty"])
def test_columns_that_do_not_fit_are_refused(fault: str) -> None:
    pack = packed(sft_groups(2), [2])[0]
    columns = {
        "ids_T": pack.ids_T[:-1] if fault == "short" else pack.ids_T,
        "train_T": np.full(len(pack.ids_T), np.nan, np.float32) if fault == "weight" else pack.train_T,
        "lengths_D": np.asarray([0, len(pack.ids_T)]) if fault == "empty" else pack.lengths_D,
        "examples": pack.examples[:1] if fault == "names" else pack.examples,
    }
    with pytest.raises(ShardError, match="build again"):
        collate_packs([Pack(**columns, sources=pack.sources, categories=pack.categories)])


@pytest.mark.parametrize("micro", [4096, 60])
def test_loss_by_label_adds_up_to_the_loss(micro: int) -> None:
    """By the loss's own weights, whatever the cut; each label as its documents alone would say."""
    groups = sft_groups(12, seed=4)
    batch, labels = collate_packs(packed(groups, [12]))
    trainer = Trainer(tiny_model(), Config(lr=1e-9), micro_tokens=micro)
    prepared = prepare(batch, resolve("sft"))
    sums = LossByLabel(labels)
    metrics = trainer.update(prepared, step=1, observe=sums.observer(batch, prepared.streams[0].weight_T))
    assert sums.loss == pytest.approx(metrics["train/loss"], rel=1e-9)
    assert sums.weight == pytest.approx(1.0)
    found = sums.metrics()
    assert set(found) == {"source/a", "source/b", "category/third"}
    for label, start in (("source/a", 0), ("source/b", 1)):
        alone = Trainer(tiny_model(), Config(lr=1e-9), micro_tokens=4096)
        one = prepare(collate(groups[start::2]), resolve("sft"))
        assert found[label] == pytest.approx(alone.update(one, step=1)["train/loss"], rel=1e-6)


@given(st.text(max_size=12), st.text(max_size=12))
def test_names_in_metrics(one: str, other: str) -> None:
    assert metric_name(one) == metric_name(other) or one != other
    assert not set("/ @") & set(metric_name(one))
    if (
        one
        and all(c.isascii() and (c.isalnum() or c in "_.-") for c in one.strip("_"))
        and one == one.strip("_")
    ):
        assert metric_name(one) == one


def test_the_recipe_of_adamw_works_with_packs() -> None:
    """Warm-up, cosine to a floor, decay, betas, eps, clip: as torch's own AdamW on the same gradient."""
    groups = sft_groups(6, seed=5)
    config = Config(
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.1,
        clip_grad_norm=0.05,
        schedule="cosine",
        warmup_steps=2,
        min_lr_ratio=0.1,
    )
    trainer = Trainer(tiny_model(), config, total_steps=6)
    plain = tiny_model()
    plain.load_state_dict(trainer.model.module.state_dict())
    named = list(plain.named_parameters())
    torch_own = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    rates = []
    for step in range(1, 7):
        batch, _ = collate_packs(packed(groups, [2, 4]), step=step)
        metrics = trainer.update(prepare(batch, resolve("sft")), step=step)
        rates.append(metrics["train/lr"])
        plain.zero_grad()
        total, weight = torch.zeros(()), float(batch.train_T.sum())
        for r in range(batch.rows):
            t = slice(int(batch.row_start_R[r]), int(batch.row_start_R[r] + batch.row_length_R[r]))
            ids = torch.from_numpy(batch.ids_T[t].astype(np.int64))
            logp = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            total = total - (torch.from_numpy(batch.train_T[t][1:].astype(np.float64)) * logp).sum() / weight
        total.backward()
        assert metrics["train/loss"] == pytest.approx(float(total.detach()), rel=1e-9)
        norm = float(torch.sqrt(sum(p.grad.square().sum() for p in plain.parameters())))
        assert norm > 0.05
        for p in plain.parameters():
            p.grad *= 0.05 / norm
        for group in torch_own.param_groups:
            group["lr"] = rates[-1]
        torch_own.step()
    cosine = [1e-2 * (0.1 + 0.9 * (1 + np.cos(np.pi * k / 4)) / 2) for k in range(4)]
    assert rates == pytest.approx([0.5e-2, 1e-2, *cosine])
    ours = dict(trainer.model.module.named_parameters())
    for name, p in named:
        assert torch.allclose(ours[name], p, rtol=1e-5, atol=1e-8), name


def test_what_is_written_is_what_is_trained(tmp_path: Path) -> None:
    from tests.runtime.packed_support import examples, packs_of, rendered, write_packs

    rows = examples(30)
    data = PackedData(write_packs(tmp_path, packs_of(rows)))
    batch, labels = collate_packs(list(data))
    assert np.array_equal(batch.ids_T, np.concatenate([ids for ids, _ in rendered(rows)]))
    assert np.array_equal(batch.train_T, np.concatenate([train for _, train in rendered(rows)]))
    assert labels["source"] == [row["source"] for row in rows]
