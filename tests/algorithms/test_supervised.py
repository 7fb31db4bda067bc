"""Imitation with weights of messages and of examples: loss and gradient by hand and against a plain sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, finalise, prepare, resolve, stream_loss
from trivet.algorithms.objectives import CrossEntropy
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Task, Termination, Trace, Unscored

torch = pytest.importorskip("torch")


def example(name: str, *turns: tuple[int, float]) -> Group:
    """Turns of (tokens, weight), an untrained token between them."""
    trace = Trace()
    node = trace.add(-1, [1, 2])
    for n, weight in turns:
        node = trace.add(trace.add(node, list(range(3, 3 + n)), train=weight), [9])
    task = Task("t", (Message("user", "?"),))
    made = Rollout(task, trace, Unscored("supervised"), Termination.FINISHED, source="expert")
    return Group(name, IssueKey(name, 1), [made], "sft")


def loss_of(groups: list[Group], logp: list[float], spec: Any = "sft") -> tuple[float, list[float], Any]:
    batch = collate(groups)
    prepared = prepare(batch, resolve(spec))
    (stream,) = prepared.streams
    at = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    loss, stats = stream_loss(prepared, stream, np.flatnonzero(batch.train_T > 0), at)
    (grad,) = torch.autograd.grad(loss, at)
    return float(loss.detach()), grad.tolist(), finalise(stats)


def test_weighted_token_mean_by_hand():
    """Weights 1, 1, 0.5 | 2: sum 4.5. Loss (1 * 1 + 1 * 2 + 0.5 * 3 + 2 * 0.5) / 4.5 = 5.5 / 4.5."""
    groups = [example("a", (2, 1.0), (1, 0.5)), example("b", (1, 2.0))]
    loss, grad, metrics = loss_of(groups, [-1.0, -2.0, -3.0, -0.5])
    assert loss == pytest.approx(5.5 / 4.5)
    assert grad == pytest.approx([-1 / 4.5, -1 / 4.5, -0.5 / 4.5, -2 / 4.5])
    assert metrics["ce/nll"] == pytest.approx(6.5 / 4)  # plain, for a reader: not weighed


def test_an_examples_own_weight_cancels_under_sequence_mean():
    """Each example weighs 1 / 2. Inside the first, 1, 1 and 0.5 of 2.5; the second's 2 of 2."""
    groups = [example("a", (2, 1.0), (1, 0.5)), example("b", (1, 2.0))]
    spec = {"kind": "sft", "aggregation": "sequence_mean"}
    loss, grad, _ = loss_of(groups, [-1.0, -2.0, -3.0, -0.5], spec)
    assert loss == pytest.approx((4.5 / 2.5 + 0.5) / 2)
    assert grad == pytest.approx([-0.2, -0.2, -0.1, -0.5])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0.01, 10), st.floats(-8, -0.01)), min_size=1, max_size=5),
    st.floats(0.1, 10),
)
def test_equals_a_plain_sum_and_knows_no_common_scale(turns, scale):
    """sum w nll / sum w, whatever all weights are multiplied by (the trace keeps them in float32)."""
    logp = [value for n, _, value in turns for _ in range(n)]
    weights = [float(np.float32(w)) for n, w, _ in turns for _ in range(n)]
    groups = [example(f"e{i}", (n, w)) for i, (n, w, _) in enumerate(turns)]
    expected = -sum(w * v for w, v in zip(weights, logp, strict=True)) / sum(weights)
    assert loss_of(groups, logp)[0] == pytest.approx(expected, rel=1e-6)
    scaled = [example(f"e{i}", (n, w * scale)) for i, (n, w, _) in enumerate(turns)]
    assert loss_of(scaled, logp)[0] == pytest.approx(expected, rel=1e-5)


def test_a_message_of_weight_0_is_in_no_denominator():
    """Log 2 and log 4 over two tokens; the silent turn's three tokens count for nothing."""
    logp = [-math.log(2), -math.log(4)]
    with_silent, _, metrics = loss_of([example("a", (3, 0.0), (2, 1.0))], logp)
    assert with_silent == pytest.approx(1.5 * math.log(2))
    assert metrics["ce/tokens"] == 2


def test_played_groups_are_refused(batch_of):
    with pytest.raises(AlgorithmError, match=r"of kind 'rollout'.*trains on \['sft'\]"):
        prepare(batch_of([1.0, 0.0]), resolve("sft"))


def test_it_is_where_its_name_says():
    assert CrossEntropy.__module__ == "trivet.algorithms.objectives.supervised"
