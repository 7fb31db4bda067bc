"""The sampler's most probable tokens: from stored files through the batch into the gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet.algorithms import AlgorithmError, ObjectiveInputs, prepare, register_correction, resolve
from trivet.buffer import AttachmentStore
from trivet.recipe.schema import Trainer as Config
from trivet.trainer.batch import collate, split
from trivet.trainer.trainer import Trainer
from trivet.types import Group

VOCABULARY = 61


def with_top(group: Group, store: AttachmentStore, rng: np.random.Generator, most: int = 5) -> Group:
    """Random entries (0 .. most per sampled token) stored on every sampled node."""
    for rollout in group.rollouts:
        for index, node in enumerate(rollout.trace.nodes):
            if node.origin != "sampled":
                continue
            count = rng.integers(0, most + 1, node.length)
            ids = np.concatenate([rng.choice(VOCABULARY, k, replace=False) for k in count]).astype(np.uint32)
            logprob = np.log(rng.uniform(0.01, 0.2, len(ids))).astype(np.float16)
            offset = np.concatenate([[0], np.cumsum(count)]).astype(np.uint32)
            for kind, array in (("offset", offset), ("id", ids), ("logprob", logprob)):
                rollout.trace.attach(index, store.put(array, f"top.{kind}", 0, node.length))
    return group


@pytest.fixture
def groups(tools: Any, tmp_path: Path) -> tuple[list[Group], AttachmentStore]:
    store, rng = AttachmentStore(tmp_path / "heavy"), np.random.default_rng(0)
    prompts = [[3, 4, 5, 6, 7], [8, 9, 10, 11]]
    answers = [[[12, 13, 14], [15, 16]], [[17, 18, 19, 20], [21]]]
    made = [
        tools.rl_group(i, p, a, [1.0, 0.0]) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    return [with_top(group, store, rng) for group in made], store


def test_entries_reach_the_batch_token_by_token(groups: Any) -> None:
    made, store = groups
    batch = collate(made, needs={"top"}, attachments=store)
    assert batch.top is not None
    assert len(batch.top.offset_T1) == batch.tokens + 1
    count_T = np.diff(batch.top.offset_T1)
    assert not count_T[~batch.sampled_T].any()
    row, t = 0, 0
    for group in made:
        for rollout in group.rollouts:
            stored = {a.kind: store.open(a) for a in rollout.trace.nodes[-1].attachments}
            begin = int(batch.row_start_R[row] + batch.row_length_R[row]) - rollout.trace.nodes[-1].length
            for i in range(rollout.trace.nodes[-1].length):
                t = begin + i
                mine = slice(int(batch.top.offset_T1[t]), int(batch.top.offset_T1[t + 1]))
                his = slice(int(stored["top.offset"][i]), int(stored["top.offset"][i + 1]))
                assert batch.top.id_E[mine].tolist() == stored["top.id"][his].tolist()
                assert np.array_equal(
                    batch.top.logprob_E[mine], stored["top.logprob"][his].astype(np.float32)
                )
            row += 1
    second = batch.slice_groups(1, 2)
    assert second.top is not None
    assert np.array_equal(np.diff(second.top.offset_T1), count_T[batch.group_N[batch.rollout_T] == 1])


def test_none_stored_is_refused(tools: Any, tmp_path: Path) -> None:
    group = tools.rl_group(0, [3, 4], [[5, 6], [7]], [1.0, 0.0])
    with pytest.raises(AlgorithmError, match=r"engine\.top"):
        collate([group], needs={"top"}, attachments=AttachmentStore(tmp_path))
    assert collate([group]).top is None


@register_correction("test_top_unit", level="unit", unit="rollout")
def halved(x: ObjectiveInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """1/2 for every token; sees whole rollouts."""
    return torch.full_like(x.logp_P, 0.5).detach(), {}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("micro", [14, 4096])
@pytest.mark.parametrize("whole", [False, True])
def test_update_equals_a_plain_reference(
    groups: Any, tools: Any, share: bool, micro: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the whole trainer against autograd over padded rows, whatever the cut. `whole`: with a
    correction over units, for which the micro-batch's log-probabilities are read before any gradient."""
    made, store = groups
    model = tools.tiny_model()
    batch = collate(made, needs={"top"}, attachments=store)
    more = {"corrections": ["test_top_unit"]} if whole else {}
    prepared = prepare(batch, resolve({"kind": "score_centering", "tis": None, **more}))
    stream, top = prepared.streams[0], batch.top
    assert top is not None
    loss = torch.zeros((), dtype=torch.float64)
    for r in range(batch.rows):
        start, n = int(batch.row_start_R[r]), int(batch.row_length_R[r])
        ids = torch.from_numpy(batch.ids_T[start : start + n].astype(np.int64))
        full = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].double(), -1)
        for i in range(1, n):
            t = start + i
            if not stream.active_T[t]:
                continue
            span = slice(int(top.offset_T1[t]), int(top.offset_T1[t + 1]))
            score = full[i - 1, int(batch.ids_T[t])]
            if span.stop > span.start:
                q = torch.softmax(torch.from_numpy(top.logprob_E[span]).double(), -1)
                score = score - (q * full[i - 1, torch.from_numpy(top.id_E[span].astype(np.int64))]).sum()
            weight = float(stream.weight_T[t]) * (0.5 if whole else 1.0)
            loss = loss - weight * float(stream.columns["advantage"][t]) * score
    expected = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )
    trainer = Trainer(model, Config(share_prefix=share, head_chunk=3), micro_tokens=micro)
    grads: dict[str, torch.Tensor] = {}

    def catch(parameters: Any, norm: float, rate: float) -> None:
        grads.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(trainer, "_step", catch)
    metrics = trainer.update(prepared, step=1)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, e in expected.items():
        assert torch.allclose(grads[name], e, atol=1e-9), name


def test_rollouts_that_lack_them_are_counted(groups: Any, tools: Any) -> None:
    """The second group was sampled without: its tokens are trained, not centred."""
    made, store = groups
    bare = tools.rl_group(1, [8, 9, 10, 11], [[17, 18, 19, 20], [21]], [1.0, 0.0])
    batch = collate([made[0], bare], needs={"top"}, attachments=store)
    assert batch.top is not None
    assert batch.slice_groups(1, 2).top.offset_T1.tolist() == [0] * 14  # type: ignore[union-attr]
    prepared = prepare(batch, resolve("score_centering"))
    metrics = Trainer(tools.tiny_model(), Config()).update(prepared, step=1)
    none = np.diff(batch.top.offset_T1)[prepared.trained_T] == 0
    assert none.sum() >= 5
    assert metrics["train/pg/uncentred"] == pytest.approx(none.mean())


def test_damaged_entries_are_refused(tools: Any, tmp_path: Path) -> None:
    store = AttachmentStore(tmp_path)
    for offset, logprob, match in (
        ([0, 1, 2], [-0.5, np.nan], "not finite"),
        ([0, 1], [-0.5], "do not fit its 2 tokens"),
        ([0, 2, 1], [-0.5], "do not fit its 2 tokens"),
        ([0, 1, 2], [-0.5], "do not fit its 2 tokens"),
    ):
        group = tools.rl_group(0, [3, 4], [[5, 6]], [1.0])
        trace = group.rollouts[0].trace
        arrays = {
            "offset": np.asarray(offset, np.uint32),
            "id": np.arange(len(logprob), dtype=np.uint32),
            "logprob": np.asarray(logprob, np.float16),
        }
        for kind, array in arrays.items():
            trace.attach(1, store.put(array, f"top.{kind}", 0, 2))
        with pytest.raises(AlgorithmError, match=match):
            collate([group], needs={"top"}, attachments=store)


def test_entries_of_another_vocabulary_are_refused(groups: Any, tools: Any) -> None:
    made, store = groups
    prepared = prepare(collate(made, needs={"top"}, attachments=store), resolve("score_centering"))
    assert prepared.batch.top is not None
    prepared.batch.top.id_E[:] = VOCABULARY
    with pytest.raises(ValueError, match="name token 61, and the policy knows 61"):
        Trainer(tools.tiny_model(), Config()).update(prepared, step=1)


def test_split_updates_keep_their_entries(groups: Any) -> None:
    made, store = groups
    prepared = prepare(collate(made, needs={"top"}, attachments=store), resolve("score_centering"))
    parts = split(prepared, 2)
    assert [len(part.batch.top.id_E) for part in parts] == [  # type: ignore[union-attr]
        int(
            np.diff(prepared.batch.top.offset_T1)[prepared.batch.group_N[prepared.batch.rollout_T] == g].sum()
        )  # type: ignore[union-attr]
        for g in (0, 1)
    ]
    assert replace(parts[0].batch).top is parts[0].batch.top
