"""Credit from a teacher: golden numbers, and the exact gradients of the divergences they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivet.algorithms import AlgorithmError, prepare, resolve
from trivet.algorithms.credit import JSD, ReverseKL

torch = pytest.importorskip("torch")


def taught(batch, gap: float):
    """The batch with a teacher that gives every sampled token `gap` more log-probability than the sampler."""
    batch.annotations["teacher_logp"] = batch.logprob_T + np.float32(gap)
    return batch


def test_reverse_kl_by_hand(batch_of):
    """log teacher - log mu = 0.7 at each sampled token; the prompt has no advantage."""
    batch = taught(batch_of([None, 1.0]), 0.7)
    advantage_T = ReverseKL()(batch)
    assert np.allclose(advantage_T[batch.sampled_T], 0.7, atol=1e-6)
    assert np.isnan(advantage_T[~batch.sampled_T]).all()


def test_jsd_by_hand(batch_of):
    """r = 3, beta = 0.25: 0.75 * log(0.25 * 3 + 0.75) = 0.75 * log 1.5 = 0.304099."""
    batch = taught(batch_of([0.0, 1.0]), math.log(3))
    assert np.allclose(JSD(beta=0.25)(batch)[batch.sampled_T], 0.304099, atol=1e-6)


def test_the_task_adds_its_own(batch_of):
    """Rewards 0 and 1: mean_only gives -0.5 and +0.5, twice that is added to 0.1."""
    batch = taught(batch_of([0.0, 1.0]), 0.1)
    advantage_T = ReverseKL(task="mean_only", task_weight=2.0)(batch)
    assert np.allclose(advantage_T[batch.sampled_T & (batch.rollout_T == 0)], -0.9, atol=1e-6)
    assert np.allclose(advantage_T[batch.sampled_T & (batch.rollout_T == 1)], 1.1, atol=1e-6)


def test_impossible_tokens_are_bounded(batch_of):
    batch = taught(batch_of([0.0, 1.0]), -1e4)
    assert np.nanmin(ReverseKL()(batch)) == -20
    assert np.nanmin(JSD(beta=0.5)(batch)) == pytest.approx(0.5 * math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_the_gradient_of_the_divergence(beta):
    """E_pi A grad log pi = -grad D, D the generalised Jensen-Shannon divergence over a vocabulary."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    teacher = torch.softmax(torch.randn(6, generator=g, dtype=torch.float64), -1)
    pi = torch.softmax(logits, -1)
    mixed = beta * teacher + (1 - beta) * pi
    divergence = (
        beta * (teacher * (teacher / mixed).log()).sum() + (1 - beta) * (pi * (pi / mixed).log()).sum()
    )
    (expected,) = torch.autograd.grad(-divergence, logits, retain_graph=True)
    advantage = (1 - beta) * torch.log(beta * teacher / pi + 1 - beta)
    (got,) = torch.autograd.grad((pi.detach() * advantage.detach() * pi.log()).sum(), logits)
    assert torch.allclose(got, expected, atol=1e-14)


def test_what_the_task_asks_for_is_asked_for():
    """A credit inside a credit: what it needs, and the smallest group it makes sense for, are known at plan
    time."""
    for name in ("on_policy_distillation", "jsd"):
        assert resolve({"kind": name, "task": "gae"}).credit_needs == {"teacher_logp", "value"}
        grouped = resolve({"kind": name, "task": "mean_only"})
        assert (grouped.group_min, grouped.greedy) == (2, False)
        assert resolve({"kind": name, "task": "remax"}).greedy
        with pytest.raises(AlgorithmError, match="unknown credit 'mean_onyl'; did you mean 'mean_only'"):
            resolve({"kind": name, "task": "mean_onyl"})


def test_algorithms_need_a_teacher(batch_of):
    for name in ("on_policy_distillation", "jsd"):
        algorithm = resolve(name)
        assert "teacher_logp" in algorithm.needs
        assert algorithm.group_min == 1
        with pytest.raises(AlgorithmError, match="teacher_logp"):
            prepare(batch_of([1.0]), algorithm)
        prepared = prepare(taught(batch_of([1.0]), 0.5), algorithm)
        assert prepared.trained_T.sum() == 2
    assert resolve({"kind": "jsd", "task": "mean_only"}).credit is not None
