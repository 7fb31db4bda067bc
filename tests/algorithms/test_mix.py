"""Imitation beside rewards: streams, weights and schedules by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trivet.algorithms import AlgorithmError, NothingToTrain, finalise, prepare, resolve, stream_loss
from trivet.algorithms.experts import Alternate, EntropyShare, OldSuccesses, best_of
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace, Unscored

torch = pytest.importorskip("torch")


def example(name, tokens):
    trace = Trace()
    trace.add(trace.add(-1, [1, 2]), list(range(3, 3 + tokens)), train=1.0)
    task = Task("t", (Message("user", "?"),))
    made = Rollout(task, trace, Unscored("supervised"), Termination.FINISHED, source="expert")
    return Group(name, IssueKey(name, 1), [made], "sft")


@pytest.fixture
def mixed(make_rollout, make_group):
    """A group with rewards 1 and 0 (two tokens each) and an example of three tokens."""
    played = make_group("g", [make_rollout(1.0, attempt=0), make_rollout(0.0, attempt=1)])
    return collate([played, example("e", 3)])


def test_each_term_has_its_own_denominator(mixed):
    """mu 0.1: 0.9 over the rollouts' means, 0.1 over the example's three tokens."""
    prepared = prepare(mixed, resolve("mix"))
    pg, imitate = prepared.streams
    expert_T = mixed.rollout_T == 2
    assert pg.weight_T[~expert_T & mixed.sampled_T] == pytest.approx([0.9 / 4] * 4)
    assert not pg.weight_T[expert_T].any()
    assert imitate.weight_T[expert_T & (mixed.train_T > 0)] == pytest.approx([0.1 / 3] * 3)
    assert not imitate.weight_T[~expert_T].any()
    assert prepared.counters["rollouts_unscored"] == 0
    assert prepared.counters["masked_tokens/unscored"] == 0


def test_the_expert_is_in_no_baseline(mixed):
    advantage_T = prepare(mixed, resolve("mix")).columns["advantage"]
    assert advantage_T[mixed.rollout_T == 0] == pytest.approx(math.sqrt(0.5))
    assert np.isnan(advantage_T[mixed.rollout_T == 2]).all()


def test_phi_by_hand(mixed):
    """p = 0.5, 0.9, 0.1: phi = 0.25, 0.09, 0.09; mu 0.1 over three tokens; the gradient is -w phi."""
    algorithm = resolve({"kind": "chord", "variant": "phi", "mu": 0.1, "end": 0.1})
    prepared = prepare(mixed, algorithm)
    stream = prepared.streams[1]
    index = np.flatnonzero(stream.active_T)
    logp = torch.log(torch.tensor([0.5, 0.9, 0.1], dtype=torch.float64)).requires_grad_()
    loss, stats = stream_loss(prepared, stream, index, logp)
    (grad,) = torch.autograd.grad(loss, logp)
    assert grad.numpy() == pytest.approx([-0.1 / 3 * phi for phi in (0.25, 0.09, 0.09)])
    assert finalise(stats)["imitate/phi"] == pytest.approx((0.25 + 0.09 + 0.09) / 3)


@pytest.fixture
def guided(make_rollout, make_group):
    """Two failures of two tokens and an expert's success of four: rewards 0, 0, 1."""
    (expert,) = example("g", 4).rollouts
    expert.reward, expert.attempt = Scored(1.0), 2
    return collate([make_group("g", [make_rollout(0.0, attempt=0), make_rollout(0.0, attempt=1), expert])])


def test_an_experts_reward_is_in_no_baseline_unless_asked(guided):
    """The two failures are equal: nothing to learn from them; the expert's tokens are imitated."""
    prepared = prepare(guided, resolve("mix"))
    assert prepared.columns["advantage"][guided.rollout_T < 2] == pytest.approx([0.0] * 8)
    assert np.isnan(prepared.columns["advantage"][guided.rollout_T == 2]).all()
    pg, imitate = prepared.streams
    assert not pg.active_T.any()
    assert imitate.weight_T.sum() == pytest.approx(0.1)
    assert prepared.counters["masked_tokens/no_advantage"] == 0  # they are trained: by imitation


def test_experts_inside_the_loss_by_hand(guided):
    """Mean 1/3, standard deviation sqrt(1/3): A = -0.577350 and 1.154701. Three rollouts: 1/3 each, over
    two, two and four tokens. At ratio 1 the gradient is -w A; the sampler's factor is the policy's alone."""
    prepared = prepare(guided, resolve({"kind": "mix", "imitate": "in_loss", "tis": [0.5, 2.0]}))
    own, expert = prepared.streams
    low, high = -1 / math.sqrt(3), 2 / math.sqrt(3)
    trained = np.flatnonzero(guided.train_T > 0)
    behaviour = np.where(guided.sampled_T, guided.logprob_T, -1.0)[trained] + math.log(1.5)
    grads = []
    for stream in (own, expert):
        logp = torch.tensor(behaviour, dtype=torch.float64, requires_grad=True)
        loss, _ = stream_loss(prepared, stream, trained, logp)
        grads.append(torch.autograd.grad(loss, logp)[0].numpy())
    assert grads[0] == pytest.approx([-1.5 * low / 6] * 4 + [0.0] * 4, rel=1e-6)
    assert grads[1] == pytest.approx([0.0] * 4 + [-high / 12] * 4, rel=1e-6)
    assert own.weight_T.sum() + expert.weight_T.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"proximal": "behaviour"}, "set proximal: recompute"),
        ({"schedule": "entropy"}, "does not use"),
        ({"mu": 2.0}, "mu"),
    ],
)
def test_what_an_expert_in_the_loss_cannot_do(more, why):
    with pytest.raises(AlgorithmError, match=why):
        resolve({"kind": "mix", "imitate": "in_loss", **more})


def test_alternation():
    """Period 3: steps 3 and 6 imitate; the control is asked after a step for the next one."""
    imitate, reward = Alternate("imitate", 3), Alternate("reward", 3)
    assert [imitate(0.0, step, {}) for step in range(1, 7)] == [0, 1, 0, 0, 1, 0]
    assert [reward(1.0, step, {}) for step in range(1, 7)] == [1, 0, 1, 1, 0, 1]


def test_shares_by_entropy():
    """mu 0.2, H = log 2: 0.1 and 0.9; a step without an entropy leaves the scale."""
    line = {"train/entropy": math.log(2)}
    assert EntropyShare("imitate", 0.2)(0.5, 1, line) == pytest.approx(0.1)
    assert EntropyShare("reward", 0.2)(0.5, 1, line) == pytest.approx(0.9)
    assert EntropyShare("imitate", 0.2)(0.5, 1, {}) == 0.5


def test_chord_falls_and_rises():
    algorithm = resolve({"kind": "chord", "mu": 0.9, "end": 0.1, "steps": 4})
    pg, imitate = algorithm.streams
    scales = [(imitate.scale, pg.scale)]
    for step in range(1, 7):
        down, up = scales[-1]
        scales.append((imitate.control(down, step, {}), pg.control(up, step, {})))
    assert [round(a, 6) for a, _ in scales] == [0.9, 0.7, 0.5, 0.3, 0.1, 0.1, 0.1]
    assert all(a + b == pytest.approx(1) for a, b in scales)


def test_own_old_successes(make_rollout, make_group):
    rollouts = [
        make_rollout(1.0, attempt=0, versions=[3]),
        make_rollout(1.0, attempt=1, versions=[4]),
        make_rollout(0.0, attempt=2, versions=[3]),
        make_rollout(None, attempt=3, versions=[3]),
    ]
    batch = collate([make_group("g", rollouts)])
    assert OldSuccesses(1.0, older=True)(batch).tolist() == [True, False, False, False]
    assert OldSuccesses(1.0, older=False)(batch).tolist() == [True, True, False, False]
    algorithm = resolve({"kind": "mix", "imitate": "own"})
    assert algorithm.consumes == {"rollout"}
    assert prepare(batch, algorithm).streams[1].weight_T.sum() == pytest.approx(0.1)


def test_best_of_by_hand(batch_of):
    """The first of equal ones; nothing at or below the bound; unscored rollouts are never the best."""
    batch = batch_of([0.2, 0.9, 0.9, None], [0.0, 0.0, 0.0, 0.0], [0.5, 0.1, 0.3, 0.4])
    assert np.flatnonzero(best_of(batch)).tolist() == [1, 8]
    assert np.flatnonzero(best_of(batch, k=2, above=0.3)).tolist() == [1, 2, 8, 11]
    prepared = prepare(batch, resolve("raft"))
    assert prepared.trained_T.sum() == 4
    assert prepared.streams[0].weight_T.sum() == pytest.approx(1)
    with pytest.raises(NothingToTrain):
        prepare(batch_of([0.0, 0.0]), resolve("raft"))


def test_examples_without_a_stream_for_them_are_refused(mixed):
    with pytest.raises(AlgorithmError, match="sft"):
        prepare(mixed, resolve("grpo"))
