"""Losses of pairs: by hand, against a plain reference, and what happens to half a pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivet.algorithms import AlgorithmError, NothingToTrain, finalise, prepare, resolve, stream_loss
from trivet.algorithms.registry import register_mask
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Task, Termination, Trace, Unscored

torch = pytest.importorskip("torch")


def pair(name, chosen, rejected, weight=1.0, margin=0.0):
    rollouts = []
    for attempt, (side, n) in enumerate((("chosen", chosen), ("rejected", rejected))):
        trace = Trace()
        trace.add(trace.add(-1, [1, 2]), list(range(3, 3 + n)), train=weight)
        task = Task("t", (Message("user", "?"),))
        rollouts.append(
            Rollout(
                *(task, trace, Unscored("preference"), Termination.FINISHED),
                attempt=attempt,
                source="expert",
                preference=side,
                counters={"pair_margin": margin} if margin else {},
            )
        )
    return Group(name, IssueKey(name, 1), rollouts, "preference")


def evaluate(spec, logp, ref, lengths, proximal=None):
    """Loss, its gradient by log pi and metrics; `lengths`: pairs (chosen, rejected[, weight[, margin]])."""
    batch = collate([pair(f"g{i}", *one) for i, one in enumerate(lengths)])
    trained = np.flatnonzero(batch.train_T > 0)
    for key, values in (("ref_logp", ref), ("proximal_logp", proximal or logp)):
        column = np.full(batch.tokens, np.nan)
        column[trained] = values
        batch.annotations[key] = column
    prepared = prepare(batch, resolve(spec))
    (stream,) = prepared.streams
    current = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    loss, stats = stream_loss(prepared, stream, trained, current)
    (grad,) = torch.autograd.grad(loss, current)
    return float(loss.detach()), grad, finalise(stats)


LENGTHS = [(2, 1), (1, 3)]
LOGP = [-1.0, -0.5, -2.0, -0.3, -1.0, -1.2, -0.8]
REF = [-1.5, -1.0, -1.0, -0.3, -0.5, -1.0, -1.0]
H = [(1.0, -1.0), (0.0, -0.5)]  # per pair: sums of log pi - log pi_ref of chosen and rejected


def test_dpo_by_hand():
    """beta 0.5: z = 0.5 * (1 - -1) = 1 and 0.25; -log sigmoid: 0.313262 and 0.575939, mean 0.444600."""
    loss, grad, metrics = evaluate({"kind": "dpo", "beta": 0.5}, LOGP, REF, LENGTHS)
    assert loss == pytest.approx(0.444600, abs=1e-6)
    # d loss / d logp = -+ beta sigmoid(-z) / 2 at every token of the pair's sides
    first, second = 0.25 * (1 - 1 / (1 + math.exp(-1))), 0.25 * (1 - 1 / (1 + math.exp(-0.25)))
    assert grad.numpy() == pytest.approx([-first, -first, first, -second, second, second, second])
    assert metrics["preference/accuracy"] == 1
    assert metrics["preference/margin"] == pytest.approx((1 + 0.25) / 2)
    assert metrics["preference/chosen"] == pytest.approx(0.25)
    assert metrics["preference/rejected"] == pytest.approx((-0.5 - 0.25) / 2)


def test_cdpo_by_hand():
    """s = 0.1: 0.9 * 0.313262 + 0.1 * 1.313262 = 0.413262; 0.9 * 0.575939 + 0.1 * 0.825939 = 0.600939."""
    loss, *_ = evaluate({"kind": "cdpo", "beta": 0.5}, LOGP, REF, LENGTHS)
    assert loss == pytest.approx((0.413262 + 0.600939) / 2, abs=1e-6)


def test_pairs_of_their_own_weight_by_hand():
    """Weights 3 and 1: 0.75 * 0.313262 + 0.25 * 0.575939 = 0.378931; KTO's answers alike."""
    weighted = [(2, 1, 3.0), (1, 3, 1.0)]
    loss, grad, _ = evaluate({"kind": "dpo", "beta": 0.5}, LOGP, REF, weighted)
    assert loss == pytest.approx(0.378931, abs=1e-6)
    assert float(grad[0]) == pytest.approx(-0.75 * 0.5 * (1 - 1 / (1 + math.exp(-1))))
    loss, *_ = evaluate({"kind": "kto", "beta": 1.0}, LOGP, REF, weighted)
    assert loss == pytest.approx((3 * (0.268941 + 0.268941) + 0.5 + 0.377541) / 8, abs=1e-6)


def test_pairs_with_a_margin_by_hand():
    """z = 1 - 0.25 and 0.25 (no margin): -log sigmoid 0.386890 and 0.575939. cDPO: + 0.1 z each."""
    with_margin = [(2, 1, 1.0, 0.25), (1, 3)]
    loss, _, metrics = evaluate({"kind": "dpo", "beta": 0.5}, LOGP, REF, with_margin)
    assert loss == pytest.approx((math.log1p(math.exp(-0.75)) + 0.575939) / 2, abs=1e-6)
    assert metrics["preference/margin"] == pytest.approx(0.625)  # of the rewards, not what is asked of them
    smooth, *_ = evaluate({"kind": "cdpo", "beta": 0.5}, LOGP, REF, with_margin)
    assert smooth == pytest.approx(loss + 0.1 * (0.75 + 0.25) / 2, abs=1e-6)


@pytest.mark.parametrize("kind", ["ipo", "orpo", "kto"])
def test_a_margin_is_never_passed_over(kind):
    with pytest.raises(AlgorithmError, match=f"a margin, which {kind} does not read"):
        evaluate(kind, LOGP, REF, [(2, 1, 1.0, 0.25), (1, 3)])


@pytest.mark.parametrize("normalised", [True, False])
def test_ipo_by_hand(normalised):
    """beta 0.5, target 1. Sums: gaps 2 and 0.5: (1 + 0.25) / 2. Means: 0.5 + 1 = 1.5 and 0 + 0.5 / 3."""
    spec = {"kind": "ipo", "beta": 0.5, "length_normalised": normalised}
    loss, *_ = evaluate(spec, LOGP, REF, LENGTHS)
    expected = (0.5**2 + (1 / 6 - 1) ** 2) / 2 if normalised else 0.625
    assert loss == pytest.approx(expected)


def test_orpo_against_plain_arithmetic():
    beta = 0.3
    loss, grad, metrics = evaluate({"kind": "orpo", "beta": beta}, LOGP, REF, LENGTHS)
    at = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for c, r in ((at[:2], at[2:3]), (at[3:4], at[4:])):
        odds = [m.exp() / (1 - m.exp()) for m in (c.mean(), r.mean())]
        total = total + (-c.mean() - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))) / 2
    assert loss == pytest.approx(float(total.detach()))
    assert torch.allclose(grad, torch.autograd.grad(total, at)[0])
    assert metrics["preference/nll"] == pytest.approx((0.75 + 0.3) / 2)


def test_kto_by_hand():
    """h = 1, -1, 0, -0.5: their mean is below 0, so z0 = 0. beta 1: 1 - sigmoid(1), 1 - sigmoid(1),
    1 - sigmoid(0), 1 - sigmoid(0.5) with the sign of the rejected turned: 0.268941, 0.268941, 0.5, 0.377541.
    """
    loss, grad, metrics = evaluate({"kind": "kto", "beta": 1.0}, LOGP, REF, LENGTHS)
    assert loss == pytest.approx((0.268941 + 0.268941 + 0.5 + 0.377541) / 4, abs=1e-6)
    assert metrics["preference/reference_kl"] == 0
    assert (grad.numpy()[[0, 1, 3]] < 0).all() and (grad.numpy()[[2, 4, 5, 6]] > 0).all()
    moved = [v + 1.0 for v in LOGP]  # the policy before the update: h = 3, 0, 1, 2.5, mean 1.625
    loss, _, metrics = evaluate({"kind": "kto", "beta": 1.0}, LOGP, REF, LENGTHS, proximal=moved)
    assert metrics["preference/reference_kl"] == pytest.approx(1.625)
    one = [1 / (1 + math.exp(x)) for x in (1 - 1.625, 1.625 + 1, 0 - 1.625, 1.625 + 0.5)]
    assert loss == pytest.approx(sum(one) / 4)


def test_half_a_pair_leaves_the_batch():
    @register_mask("no_long_answers")
    def no_long_answers(batch):
        return batch.length_N < 3

    batch = collate([pair("a", 2, 1), pair("b", 1, 3)])
    batch.annotations["ref_logp"] = np.zeros(batch.tokens)
    from dataclasses import replace

    from trivet.algorithms.registry import make_part

    algorithm = replace(resolve("dpo"), masks=(make_part("mask", "no_long_answers"),))
    prepared = prepare(batch, algorithm)
    assert prepared.trained_T.sum() == 3  # the first pair alone
    assert prepared.counters["masked_rollouts/lone_side"] == 1
    assert prepared.streams[0].weight_T.sum() == pytest.approx(1)
    lone = collate([pair("b", 1, 3)])
    with pytest.raises(NothingToTrain, match="lone_side"):
        prepare(lone, algorithm)


def test_groups_of_another_kind_are_refused(batch_of):
    with pytest.raises(AlgorithmError, match="preference"):
        prepare(batch_of([1.0, 0.0]), resolve("dpo"))


@pytest.mark.parametrize("kind", ["dpo", "ipo", "orpo"])
def test_pairs_are_never_split_and_parts_add_up(kind):
    """Pair by pair gives the sum of the whole batch; half a pair is refused."""
    batch = collate([pair("a", 2, 1), pair("b", 1, 3)])
    trained = np.flatnonzero(batch.train_T > 0)
    batch.annotations["ref_logp"] = np.full(batch.tokens, np.nan)
    batch.annotations["ref_logp"][trained] = REF
    prepared = prepare(batch, resolve(kind))
    (stream,) = prepared.streams
    logp = torch.tensor(LOGP, dtype=torch.float64)
    whole, _ = stream_loss(prepared, stream, trained, logp)
    parts = [stream_loss(prepared, stream, trained[p], logp[p])[0] for p in (slice(3), slice(3, None))]
    assert float(sum(parts)) == pytest.approx(float(whole))
    with pytest.raises(AlgorithmError, match="a unit is never split"):
        stream_loss(prepared, stream, trained[:2], logp[:2])
