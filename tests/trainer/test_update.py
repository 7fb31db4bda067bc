"""The trainer against a slow reference, and against itself under every cut of the same batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from trivet.algorithms import (
    NothingToTrain,
    ObjectiveInputs,
    StreamSpec,
    register_algorithm,
    register_objective,
)
from trivet.algorithms.base import Algorithm
from trivet.algorithms.registry import make_part
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import PlanError, Trainer, attention, split
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace


def still(**more: Any) -> Config:
    """A configuration under which gradients can be looked at: the weights barely move, nothing is clipped."""
    return Config(lr=1e-30, clip_grad_norm=1e30, **more)


def cross_entropy(logp_T: torch.Tensor, prepared: Any) -> torch.Tensor:
    """Token mean by hand: sum of w (-log p) over the sum of w."""
    weight = torch.from_numpy(np.asarray(prepared.batch.train_T, np.float64)).to(logp_T.dtype)
    return -(weight * logp_T).sum() / weight.sum()


def grpo(logp_T: torch.Tensor, prepared: Any) -> torch.Tensor:
    """First update: rho = 1, so the gradient is A * grad log p; sequence mean over rollouts that can teach,
    with the truncated importance weight exp(log p - log mu) in 0.5..2."""
    batch = prepared.batch
    total, count = logp_T.new_zeros(()), 0
    for g in range(batch.groups):
        members = np.flatnonzero(batch.group_N == g)
        reward = batch.reward_N[members]
        advantage = (reward - reward.mean()) / reward.std(ddof=1)
        for n, a in zip(members, advantage, strict=True):
            at = torch.from_numpy(np.flatnonzero((batch.rollout_T == n) & (batch.train_T > 0)))
            logp, mu = logp_T[at], torch.from_numpy(batch.logprob_T[at.numpy()]).to(logp_T.dtype)
            factor = torch.exp(logp.detach() - mu).clamp(0.5, 2.0)
            total = total - (factor * torch.exp(logp - logp.detach()) * a).mean()
            count += 1
    return total / count


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("share", [True, False])
def test_sft_equals_padded_reference(tools: Any, family: str, share: bool) -> None:
    model = tools.tiny_model(family)
    prepared = tools.make_prepared(tools.sft_groups(), "sft")
    loss = tools.padded_loss(model, prepared, cross_entropy)
    expected = tools.gradients(model)
    metrics = Trainer(model, still(share_prefix=share), device="cpu", micro_tokens=50).update(
        prepared, step=1
    )
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-9)
    assert tools.worst_gap(tools.gradients(model), expected) < 1e-9


@pytest.mark.parametrize("share", [True, False])
def test_grpo_equals_padded_reference(tools: Any, share: bool) -> None:
    model = tools.tiny_model()
    prepared = tools.make_prepared(tools.random_groups(temperature=0.7), "grpo")
    loss = tools.padded_loss(model, prepared, grpo)
    expected = tools.gradients(model)
    metrics = Trainer(model, still(share_prefix=share), device="cpu", micro_tokens=64).update(
        prepared, step=1
    )
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-9)
    assert tools.worst_gap(tools.gradients(model), expected) < 1e-9
    norm = float(torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt())
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert (metrics["train/tokens_shared"] > 0) == share


def run(model: Any, prepared: Any, micro_tokens: int = 4096, **config: Any) -> tuple[dict[str, float], Any]:
    trainer = Trainer(model, still(**config), device="cpu", micro_tokens=micro_tokens)
    return trainer.update(prepared, step=1), {
        n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None
    }


# -- the cut does not matter ---------------------------------------------------------------------


def _tree_groups(rng: np.random.Generator) -> list[Group]:
    """Rollouts that branch anywhere, up to seven turns deep: compaction, sub-agents, rewritten history."""
    out = []
    for g in range(2):
        prompt, rollouts = rng.integers(2, 61, rng.integers(4, 12)), []
        for attempt in range(4):
            trace = Trace()
            nodes = [trace.add(-1, prompt)]
            for _ in range(7):
                node = trace.add(int(rng.choice(nodes)), rng.integers(2, 61, rng.integers(1, 6)))
                n, temperature = int(rng.integers(1, 7)), float(rng.choice([0.7, 1.0]))
                logprob = -rng.uniform(3, 5, n)
                nodes.append(
                    trace.add_sampled(node, rng.integers(2, 61, n), logprob, 0, temperature=temperature)
                )
            task, score = Task("test", (Message("user", "?"),)), Scored(float(rng.normal()))
            rollouts.append(Rollout(task, trace, score, Termination.FINISHED, attempt=attempt))
        out.append(Group(f"g{g}", IssueKey(f"t{g}", 0), rollouts))
    return out


@pytest.mark.parametrize(("long", "block"), [(512, 128), (9, 5)])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3", {}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True}),
    ],
)
def test_deep_trees_equal_padded_reference(
    tools: Any, family: str, more: dict[str, Any], long: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LONG", long)
    monkeypatch.setattr(attention, "BLOCK", block)
    model = tools.tiny_model(family, **more)
    prepared = tools.make_prepared(_tree_groups(np.random.default_rng(long)), "grpo")
    loss = tools.padded_loss(model, prepared, grpo)
    expected = tools.gradients(model)
    longest = int(prepared.batch.row_length_R.max())
    for share, micro_tokens in ((True, longest), (True, 4096), (False, longest)):
        metrics, got = run(model, prepared, micro_tokens, share_prefix=share, head_chunk=7)
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-9)
        assert tools.worst_gap(got, expected) < 1e-9
        assert (metrics["train/tokens_shared"] > 0) == share


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_cut_does_not_matter(tools: Any, algorithm: str) -> None:
    """Float64: any micro-batch size, order of groups, and sharing give one loss and one gradient."""
    groups = tools.random_groups() if algorithm == "grpo" else tools.sft_groups()
    model = tools.tiny_model()
    first, expected = run(model, tools.make_prepared(groups, algorithm))
    for micro_tokens, order, share, chunk in (
        (44, 1, True, 1024),
        (44, -1, True, 1),
        (100, -1, False, 7),
        (4096, -1, True, 3),
        (4096, 1, False, 1024),
    ):
        prepared = tools.make_prepared(groups[::order], algorithm)
        metrics, got = run(model, prepared, micro_tokens, share_prefix=share, head_chunk=chunk)
        assert metrics["train/loss"] == pytest.approx(first["train/loss"], abs=1e-9)
        assert metrics["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-9)
        assert tools.worst_gap(got, expected) < 1e-9
        assert (metrics["train/micro_batches"] > 1) == (micro_tokens < 4096)


def test_the_cut_does_not_matter_in_float32(tools: Any) -> None:
    groups, model = tools.random_groups(8, 8), tools.tiny_model(dtype=torch.float32)
    first, _ = run(model, tools.make_prepared(groups))
    for micro_tokens, share in ((44, True), (300, False), (4096, False)):
        metrics, _ = run(model, tools.make_prepared(groups), micro_tokens, share_prefix=share)
        assert metrics["train/loss"] == pytest.approx(first["train/loss"], rel=1e-6, abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("micro_tokens", [4, 6, 4096])
@pytest.mark.parametrize("share", [True, False])
def test_two_answers_token_mean(tools: Any, micro_tokens: int, share: bool) -> None:
    """1 and 3 tokens, advantages +1 and -1, ratio 1: -(1 - 3) / 4 = 0.5, however it is cut."""
    group = tools.rl_group(0, [2, 3], [[4], [5, 6, 7]], [2.0, 0.0])
    prepared = tools.make_prepared(
        [group], {"kind": "grpo", "credit": "mean_only", "aggregation": "token_mean", "tis": None}
    )
    metrics, _ = run(tools.tiny_model(), prepared, micro_tokens, share_prefix=share)
    assert metrics["train/loss"] == pytest.approx(0.5, abs=1e-12)
    assert metrics["train/pg/ratio"] == 1.0


def test_nothing_to_train_changes_nothing(tools: Any) -> None:
    """All advantages 0: prepare refuses; an update that is empty is skipped, with its weights untouched."""
    equal = tools.rl_group(0, [2, 3], [[4], [5, 6, 7]], [1.0, 1.0])
    with pytest.raises(NothingToTrain):
        tools.make_prepared([equal])
    unequal = tools.rl_group(1, [2, 3], [[4], [5, 6, 7]], [1.0, 0.0])
    first, second = split(tools.make_prepared([equal, unequal], {"kind": "grpo", "proximal": "behaviour"}), 2)
    model = tools.tiny_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(model, Config(lr=0.1), device="cpu")
    metrics = trainer.update(first, step=1)
    assert metrics == {"train/skipped": 1.0, "train/loss": 0.0, "train/grad_norm": 0.0}
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert trainer.updates == 0
    trainer.update(second, step=1)
    assert trainer.updates == 1


def test_rows_without_advantage_are_not_forwarded(tools: Any) -> None:
    equal = tools.rl_group(0, [2, 3], [[4] * 9, [5] * 9], [1.0, 1.0])
    unequal = tools.rl_group(1, [2, 3], [[4], [5, 6, 7]], [1.0, 0.0])
    metrics, _ = run(tools.tiny_model(), tools.make_prepared([equal, unequal]), share_prefix=False)
    assert metrics["train/tokens_forwarded"] == 2 + 4


# -- the ratio -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_ratio_is_one(tools: Any, temperature: float) -> None:
    """Behaviour log-probabilities of the model's own forward, float32: nothing is off by more than 1e-3."""
    model = tools.tiny_model(dtype=torch.float32)
    groups = tools.random_groups(temperature=temperature)
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.from_numpy(np.array(rollout.trace.rows()[0].ids_T, np.int64))
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
            logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
            column = rollout.trace._data["logprob"]
            sampled = rollout.trace.column("sampled")
            column[: len(ids)][sampled] = logp[sampled[1:]]
    metrics, _ = run(model, tools.make_prepared(groups, {"kind": "grpo", "proximal": "behaviour"}))
    assert metrics["train/pg/abs_log_diff_max"] < 1e-3
    assert metrics["train/pg/ratio"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["train/kl"] < 1e-6


def test_annotations(tools: Any) -> None:
    """proximal_logp follows the weights, ref_logp does not; both are the model's own log-probabilities."""
    model = tools.tiny_model(dtype=torch.float32)
    trainer = Trainer(model, Config(lr=0.02), device="cpu", micro_tokens=64)
    prepared = tools.make_prepared(tools.random_groups(temperature=0.8))
    batch = prepared.batch
    trainer.annotate(batch, {"proximal_logp", "ref_logp"})
    first = {name: column.copy() for name, column in batch.annotations.items()}
    wanted = batch.train_T > 0
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = tools.padded_logprobs(model, prepared).numpy()
        model.set_attn_implementation("trivet_packed")
    assert np.allclose(first["ref_logp"][wanted], expected[wanted], atol=1e-4)
    assert np.isnan(first["ref_logp"][~wanted]).all()
    for part in split(prepared, 2):
        trainer.update(part, step=1)
    del batch.annotations["ref_logp"]  # a stored one would stay
    trainer.annotate(batch, {"proximal_logp", "ref_logp"})
    assert np.array_equal(batch.annotations["ref_logp"], first["ref_logp"], equal_nan=True)
    assert np.abs(batch.annotations["proximal_logp"] - first["proximal_logp"])[wanted].max() > 0.01


def test_annotations_of_some_tokens(tools: Any) -> None:
    """`only_T`: the same numbers there, NaN elsewhere, and the other rows are not forwarded."""
    trainer = Trainer(tools.tiny_model(), Config(share_prefix=False), device="cpu")
    batch = tools.make_prepared(tools.random_groups(2, 3)).batch
    trainer.annotate(batch, {"proximal_logp"})
    whole = batch.annotations["proximal_logp"]
    only_T = (batch.row_T == 1) | ((batch.row_T == 4) & (batch.position_T < 12))
    seen: list[int] = []
    forward = trainer.model.forward

    def counting(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(ids, *rest, **more)

    with mock.patch.object(trainer.model, "forward", counting):
        trainer.annotate(batch, {"proximal_logp"}, only_T=only_T)
    part, wanted_T = batch.annotations["proximal_logp"], only_T & (batch.train_T > 0)
    assert np.allclose(part[wanted_T], whole[wanted_T], rtol=0, atol=1e-6)
    assert np.isnan(part[~wanted_T]).all()
    last_R = [int(batch.position_T[wanted_T & (batch.row_T == r)].max()) for r in (1, 4)]
    assert sum(seen) == sum(last_R)  # fed are the tokens before the last one that is wanted


def test_a_stored_reference_is_used(tools: Any) -> None:
    """What is there already is not computed again: no frozen copy is made."""
    trainer = Trainer(tools.tiny_model(), Config(), device="cpu")
    batch = tools.make_prepared(tools.random_groups()).batch
    stored = np.full(batch.tokens, -2.5, np.float32)
    batch.annotations["ref_logp"] = stored
    trainer.annotate(batch, {"ref_logp", "proximal_logp"})
    assert batch.annotations["ref_logp"] is stored
    assert not trainer._frozen


def test_reference_must_not_be_trained_weights(tools: Any) -> None:
    trainer = Trainer(tools.tiny_model(), Config(), device="cpu")
    prepared = tools.make_prepared(tools.random_groups())
    trainer.update(prepared, step=1)
    with pytest.raises(RuntimeError, match="already trained"):
        trainer.annotate(prepared.batch, {"ref_logp"})
    with pytest.raises(ValueError, match=r"cannot compute \['value'\]"):
        trainer.annotate(prepared.batch, {"value"})


# -- objectives over units, and entropy ----------------------------------------------------------


@register_objective("test_update_sequence_ratio", level="unit", unit="rollout", advantage=True)
def sequence_ratio(x: ObjectiveInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A exp(mean of log p over the rollout's tokens): needs the whole rollout at once."""
    assert x.advantage_P is not None
    zeros = x.logp_P.new_zeros(x.units)
    count = zeros.index_add(0, x.unit_P, torch.ones_like(x.logp_P))
    mean = zeros.index_add(0, x.unit_P, x.logp_P) / count
    advantage = zeros.index_add(0, x.unit_P, x.advantage_P) / count
    return -advantage * mean.exp(), {"unit/mean": mean.detach().sum()}


@register_objective("test_entropy_bonus", entropy=True)
def entropy_bonus(x: ObjectiveInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert x.entropy_P is not None
    return x.weight_P * (-x.logp_P - 0.5 * x.entropy_P), {}


def _algorithm(objective: str, credit: bool) -> Algorithm:
    stream = StreamSpec("s", make_part("objective", objective), make_part("aggregation", "token_mean"))
    part = make_part("credit", "mean_only") if credit else None
    return Algorithm("test", (stream,), credit=part)


@register_algorithm("test_units")
def units_algorithm() -> Algorithm:
    return _algorithm("test_update_sequence_ratio", credit=True)


@register_algorithm("test_entropy")
def entropy_algorithm() -> Algorithm:
    return _algorithm("test_entropy_bonus", credit=False)


@pytest.mark.parametrize("micro_tokens", [44, 4096])
def test_unit_level_objective(tools: Any, micro_tokens: int) -> None:
    model, prepared = tools.tiny_model(), tools.make_prepared(tools.random_groups(), "test_units")

    def formula(logp_T: torch.Tensor, prepared: Any) -> torch.Tensor:
        batch, total = prepared.batch, logp_T.new_zeros(())
        for n in range(batch.rollouts):
            at = torch.from_numpy(np.flatnonzero((batch.rollout_T == n) & (batch.train_T > 0)))
            same = batch.reward_N[batch.group_N == batch.group_N[n]]
            total = total - (batch.reward_N[n] - same.mean()) * logp_T[at].mean().exp()
        return total

    loss = tools.padded_loss(model, prepared, formula)
    expected = tools.gradients(model)
    metrics, got = run(model, prepared, micro_tokens)
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-9)
    assert tools.worst_gap(got, expected) < 1e-9


def test_a_unit_must_fit(tools: Any) -> None:
    prepared = tools.make_prepared(tools.random_groups(), "test_units")
    with pytest.raises(PlanError, match=r"raise batch\.micro_tokens"):
        run(tools.tiny_model(), prepared, 8)


def test_differentiated_entropy(tools: Any) -> None:
    model, prepared = tools.tiny_model(), tools.make_prepared(tools.random_groups(), "test_entropy")
    batch = prepared.batch
    total = torch.zeros((), dtype=torch.float64)
    for start, n in zip(batch.row_start_R, batch.row_length_R, strict=True):
        ids = torch.from_numpy(batch.ids_T[start : start + n].astype(np.int64))
        full = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
        trained = torch.from_numpy(batch.train_T[start + 1 : start + n] > 0)
        entropy = -(full.exp() * full).sum(-1)
        total = total - (full.gather(1, ids[1:, None])[:, 0] + 0.5 * entropy)[trained].sum()
    loss = total / int((batch.train_T > 0).sum())
    loss.backward()
    expected = tools.gradients(model)
    metrics, got = run(model, prepared, 64)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-9)
    assert tools.worst_gap(got, expected) < 1e-9


# -- a larger model against the reference --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_larger_model_equals_padded_reference(tools: Any, algorithm: str) -> None:
    """Rows beyond the length from which the flash kernel takes over; untied head; float64."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
    }
    model = tools.tiny_model("llama", **shape)
    if algorithm == "grpo":
        groups, formula = tools.random_groups(3, 6, longest=380, seed=4), grpo
    else:
        groups, formula = tools.sft_groups(8, longest=240, seed=4), cross_entropy
    prepared = tools.make_prepared(groups, algorithm)
    loss = tools.padded_loss(model, prepared, formula)
    expected = tools.gradients(model)
    for share in (True, False):
        metrics, got = run(model, prepared, 1500, share_prefix=share)
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-9)
        assert tools.worst_gap(got, expected) < 1e-9
