"""Small rollouts and groups to try algorithms on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trivet.algorithms import Batch
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace, Unscored


def make_rollout(
    reward: float | None,
    lengths: Sequence[int] = (2,),
    *,
    attempt: int = 0,
    versions: Sequence[int] | None = None,
    termination: Termination = Termination.FINISHED,
    rng: np.random.Generator | None = None,
    **fields: Any,
) -> Rollout:
    """A prompt of two tokens, then turns of `lengths` sampled tokens with one inserted token between."""
    rng = rng or np.random.default_rng(attempt)
    trace = Trace()
    node = trace.add(-1, [1, 2])
    for turn, length in enumerate(lengths):
        if turn:
            node = trace.add(node, [3])
        logprob = -rng.uniform(0.1, 2.0, length)
        version = 0 if versions is None else versions[turn]
        node = trace.add_sampled(node, rng.integers(4, 9, length), logprob, version)
    score = Unscored("judge_down") if reward is None else Scored(reward)
    task = Task("test", (Message("user", "?"),))
    return Rollout(task, trace, score, termination, attempt=attempt, **fields)


def make_group(name: str, rollouts: Sequence[Rollout], kind: Any = "rollout") -> Group:
    return Group(name, IssueKey(name, 0), list(rollouts), kind)


def batch_of(*groups: Sequence[float | None], lengths: Sequence[int] = (2,), **fields: Any) -> Batch:
    """One group per list of rewards; every rollout has the same lengths."""
    return collate(
        [
            make_group(
                f"g{i}", [make_rollout(r, lengths, attempt=a, **fields) for a, r in enumerate(rewards)]
            )
            for i, rewards in enumerate(groups)
        ]
    )


@pytest.fixture(scope="session", name="make_rollout")
def _make_rollout() -> Any:
    return make_rollout


@pytest.fixture(scope="session", name="make_group")
def _make_group() -> Any:
    return make_group


@pytest.fixture(scope="session", name="batch_of")
def _batch_of() -> Any:
    return batch_of
