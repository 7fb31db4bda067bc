"""Controls by hand, the regularisers they move, and what combinations are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, finalise, prepare, resolve, stream_loss
from trivet.algorithms.base import ObjectiveInputs
from trivet.algorithms.controls import AdaptiveKL, EntropyTarget, LinearDecay
from trivet.algorithms.objectives import KL, EntropyBonus
from trivet.algorithms.registry import make_part

torch = pytest.importorskip("torch")


# -- controls ------------------------------------------------------------------------------------


def test_adaptive_kl_by_hand():
    control = AdaptiveKL(target=0.1)
    # error 0.1 within 0.2: 2 (1 + 0.1 * 0.1); errors 9 and -1 are cut to 0.2 and -0.2
    assert control(2.0, 1, {"train/kl/k3": 0.11}) == pytest.approx(2.02)
    assert control(2.0, 1, {"train/kl/k3": 1.0}) == pytest.approx(2.04)
    assert control(2.0, 1, {"train/kl/k3": 0.0}) == pytest.approx(1.96)
    assert control(2.0, 1, {"train/kl/k3": math.nan}) == 2.0
    assert control(2.0, 1, {"train/skipped": 1.0}) == 2.0


def test_a_metric_nobody_logs_is_named():
    with pytest.raises(AlgorithmError, match="reads metric 'train/kl/k9'; did you mean 'train/kl/k3'"):
        AdaptiveKL(target=0.1, metric="train/kl/k9")(1.0, 1, {"train/kl/k3": 0.1, "train/loss": 2.0})


@given(st.lists(st.floats(0, 100), max_size=50))
def test_adaptive_kl_stays_above_zero_and_moves_by_two_percent_at_most(values):
    scale, control = 0.05, AdaptiveKL(target=0.1)
    for step, value in enumerate(values):
        after = control(scale, step + 1, {"train/kl/k3": value})
        assert 0.98 - 1e-12 <= after / scale <= 1.02 + 1e-12
        assert (after > scale) == (value > 0.1) or after == scale
        scale = after


def test_linear_decay_by_hand():
    # from 1 to 0.2 over 4 steps: steps 1..6 are trained with 1, 0.8, 0.6, 0.4, 0.2, 0.2
    control, used = LinearDecay(steps=4, end=0.2), [1.0]
    for step in range(1, 6):
        used.append(control(used[-1], step, {}))
    assert used == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_linear_decay_goes_on_after_a_resume():
    """It keeps no state: the scale and the step are all it needs."""
    assert LinearDecay(steps=10)(0.7, 4, {}) == pytest.approx(0.6)
    assert LinearDecay(steps=10)(0.05, 30, {}) == 0.0


def test_entropy_target_by_hand():
    control = EntropyTarget(target=0.5, delta=0.1, high=0.25)
    assert control(0.0, 1, {"train/entropy": 0.4}) == pytest.approx(0.1)
    assert control(0.2, 1, {"train/entropy": 0.4}) == pytest.approx(0.25)
    assert control(0.2, 1, {"train/entropy": 0.6}) == pytest.approx(0.1)
    assert control(0.05, 1, {"train/entropy": 0.6}) == 0.0
    assert control(0.2, 1, {"train/skipped": 1.0}) == 0.2


# -- regularisers --------------------------------------------------------------------------------


def inputs(d: Any, **fields: Any) -> ObjectiveInputs:
    logp = torch.full((len(d),), -1.0, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(len(d), dtype=torch.float64)
    other = -1.0 - torch.tensor(d, dtype=torch.float64)
    return ObjectiveInputs(logp, ones, torch.zeros(len(d), dtype=torch.int64), 0, ones, ref_P=other, **fields)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # d = 0.5, -0.5, 0: exp(-0.5) = 0.606531, exp(0.5) = 1.648721
        ("k1", [0.5, -0.5, 0], [1, 1, 1]),
        ("k2", [0.125, 0.125, 0], [0.5, -0.5, 0]),
        ("k3", [0.106531, 0.148721, 0], [0.393469, -0.648721, 0]),
        ("low_var", [0.106531, 0.148721, 0], [0.393469, -0.648721, 0]),
        ("abs", [0.5, 0.5, 0], [1, -1, 0]),
    ],
)
def test_kl_by_hand(estimator, values, gradients):
    x = inputs([0.5, -0.5, 0.0])
    terms, stats = KL(estimator)(x)
    assert terms.tolist() == pytest.approx(values, abs=1e-6)
    terms.sum().backward()
    assert x.logp_P.grad is not None
    assert x.logp_P.grad.tolist() == pytest.approx(gradients, abs=1e-6)
    assert stats["k1"].item() == pytest.approx(0.0)
    assert stats["k3"].item() == pytest.approx(0.255252, abs=1e-6)


def test_low_var_is_clamped_and_k3_is_not():
    # d = -5: exp(5) - 1 - 5 = 142.413
    x = inputs([-5.0])
    terms, _ = KL("low_var")(x)
    terms.sum().backward()
    assert x.logp_P.grad is not None
    assert (terms.item(), x.logp_P.grad.tolist()) == (10.0, [0.0])
    assert KL("k3")(inputs([-5.0]))[0].item() == pytest.approx(142.413, abs=1e-3)
    assert torch.isfinite(KL("k3")(inputs([-5000.0, 5000.0]))[0]).all()


def test_kl_estimators_and_gradients_over_a_whole_vocabulary():
    """Summed under pi: k1 and k3 give KL(pi || ref); k2's gradient is its, k3's that of KL(ref || pi)."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(7, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    pi = logp.detach().exp()

    def gradient(loss: Any) -> Any:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def loss(estimator: Any, weigh: bool = False) -> Any:
        zeros = torch.zeros(7, dtype=torch.int64)
        x = ObjectiveInputs(logp, pi, zeros, 0, ref, proximal_P=logp.detach(), ref_P=ref)
        return KL(estimator, weigh=weigh)(x)[0].sum()

    reverse = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    assert loss("k1").item() == pytest.approx(reverse.item())
    assert loss("k3").item() == pytest.approx(reverse.item())
    torch.testing.assert_close(gradient(loss("k1")), torch.zeros(7, dtype=torch.float64), atol=1e-14, rtol=0)
    torch.testing.assert_close(gradient(loss("k2")), gradient(reverse))
    torch.testing.assert_close(gradient(loss("k3")), gradient(forward))
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(gradient(loss(estimator, weigh=True)), gradient(reverse))


def test_entropy_bonus_raises_the_entropy():
    logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    x = inputs([0.0], entropy_P=-(logp.exp() * logp).sum()[None])
    terms, _ = EntropyBonus()(x)
    terms.sum().backward()
    # p = 0.8438, 0.1142, 0.0420, -p log p = 0.1433 + 0.2478 + 0.1332 = 0.5243
    assert terms.item() == pytest.approx(-0.5243, abs=1e-3)
    assert logits.grad[0] > 0 > logits.grad[2]  # a step down the gradient flattens


def test_regularisers_keep_tokens_without_a_signal(batch_of):
    """Equal rewards: no advantage, yet the distance and the entropy still pull at every token."""
    batch = batch_of([1.0, 1.0, 1.0], [1.0, 0.0])
    batch.annotations["ref_logp"] = batch.logprob_T.astype(np.float64) - 0.5
    spec = {"kind": "grpo", "kl": "k2", "kl_weight": 0.2, "entropy_weight": 0.1}
    prepared = prepare(batch, resolve(spec))
    streams = {stream.name: stream for stream in prepared.streams}
    trained = batch.train_T > 0
    assert (streams["kl"].active_T == trained).all()
    assert (streams["entropy"].active_T == trained).all()
    assert streams["pg"].active_T.sum() == trained.sum() - 6
    index = np.flatnonzero(trained)
    logp = torch.from_numpy(batch.logprob_T[index].astype(np.float64))
    loss, stats = stream_loss(prepared, streams["kl"], index, logp)
    assert loss.item() == pytest.approx(0.2 * 0.125)
    assert finalise(stats)["kl/k1"] == pytest.approx(0.5)
    entropy = torch.full_like(logp, 0.7)
    loss, _ = stream_loss(prepared, streams["entropy"], index, logp, entropy_P=entropy)
    assert loss.item() == pytest.approx(-0.07)


def test_a_control_moves_the_weight_of_the_next_step(batch_of):
    spec = {"kind": "grpo", "entropy_control": {"kind": "entropy_target", "target": 0.5}}
    algorithm = resolve(spec)
    assert [s.name for s in algorithm.streams] == ["pg", "entropy"]
    assert algorithm.entropy
    still = prepare(batch_of([1.0, 0.0]), algorithm).streams[1]
    assert not still.active_T.any()
    moved = prepare(batch_of([1.0, 0.0]), algorithm, scales={"entropy": 0.3}).streams[1]
    assert moved.weight_T.sum() == pytest.approx(0.3)


def test_what_a_distance_needs():
    assert "ref_logp" in resolve({"kind": "grpo", "kl": "k3", "kl_weight": 0.1}).needs
    assert "ref_logp" not in make_part("objective", {"kind": "kl", "to": "proximal"}).needs
    named = resolve({"kind": "grpo", "kl": {"estimator": "abs"}, "kl_weight": 0.1}).streams[1]
    assert named.objective.options["estimator"] == "abs"
    assert resolve({"kind": "grpo", "kl_weight": 0.1}).streams[1].objective.options["estimator"] == "k3"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kl": "k3"}, "weight 0 and no kl_control"),
        ({"kl_control": {"kind": "linear_decay", "steps": 5}}, "no distance to move"),
        ({"kl": "k3", "kl_control": {"kind": "adaptive_kl", "target": 0.1}}, "kl_weight is 0"),
        ({"entropy_control": {"kind": "adaptive_kl", "target": 0.1}}, "entropy_weight is 0"),
        ({"kl": "k7", "kl_weight": 0.1}, "estimator='k7'"),
        ({"kl": "k3", "kl_weight": -0.1}, "set it above 0"),
        (
            {"kl": "k3", "kl_weight": 0.1, "kl_control": {"kind": "adaptive_kl", "target": -1.0}},
            "greater than 0",
        ),
        (
            {"kl": "k3", "kl_weight": 0.1, "kl_control": {"kind": "adaptive_kl", "target": 1, "gain": 9}},
            "must lie below 1",
        ),
        ({"kl_weight": 0.1, "kl_control": "linear_decay"}, "needs option\\(s\\) steps"),
        ({"kl": {"to": "proximal"}, "kl_weight": 0.1, "proximal": None, "objective": "topr"}, "ratio to the"),
    ],
)
def test_what_cannot_work_is_refused(options, why):
    with pytest.raises(AlgorithmError, match=why):
        resolve({"kind": "grpo", **options})
