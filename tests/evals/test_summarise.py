"""What an evaluation reports when some attempts have no score."""

from __future__ import annotations

import pytest

from trivet.evals import EvaluationError, summarise
from trivet.types import Message, Rollout, Scored, Task, Termination, Trace, Unscored

TASK = Task("math", (Message("user", "?"),))


def rollouts(*scores: float | None) -> list[Rollout]:
    out = []
    for score in scores:
        reward = Unscored("verifier_timeout") if score is None else Scored(score)
        out.append(Rollout(TASK, Trace(), reward, Termination.FINISHED))
    return out


def test_unscored_attempts_are_left_out_and_counted() -> None:
    result = summarise("t", {"a": rollouts(1, 0, None, 0), "b": rollouts(1, 1, 1, 1)}, [1, 2], 0.5)
    assert result.metrics["pass@1"] == pytest.approx((1 / 3 + 1) / 2)
    assert result.metrics["pass@2"] == pytest.approx((1 - 1 / 3 + 1) / 2)  # 1 - C(2,2)/C(3,2)
    assert result.metrics["unscored"] == pytest.approx(1 / 8)
    assert result.metrics["unscored/verifier_timeout"] == pytest.approx(1 / 8)
    assert result.metrics["reward"] == pytest.approx(5 / 7)


def test_a_task_with_too_few_scores_is_named_not_guessed() -> None:
    result = summarise("t", {"a": rollouts(1, None), "b": rollouts(0, 0)}, [2], 0.5)
    assert result.metrics["pass@2"] == 0.0
    assert result.metrics["pass@2/short"] == 1


def test_no_score_at_all_is_an_error() -> None:
    with pytest.raises(EvaluationError, match=r"none of 2 rollouts has a score: \{'verifier_timeout': 2\}"):
        summarise("t", {"a": rollouts(None, None)}, [1], 0.5)
    with pytest.raises(EvaluationError, match="no task has 4 scored attempts"):
        summarise("t", {"a": rollouts(1, 1)}, [4], 0.5)
