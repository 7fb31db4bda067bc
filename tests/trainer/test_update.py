"""The trainer against a slow reference, and against itself under every cut of the same batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, TrainingDiverged


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
