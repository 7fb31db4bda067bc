"""Winners and losers, tool calls, answers and reasoning: by hand."""

from __future__ import annotations

import pytest

from trivet.explorer import conduct_metrics
from trivet.types import Message, Rollout, Scored, Task, Termination, Trace, Unscored


def played(score, turns, answer="yes", reasoning=None, **counters):
    trace = Trace()
    node = trace.add(-1, [1])
    for _ in range(turns):
        node = trace.add_sampled(trace.add(node, [2]), [3, 4], [-1.0, -1.0], 0)
    said = [Message("user", "?"), Message("assistant", answer, reasoning=reasoning)]
    reward = Unscored("judge_down") if score is None else Scored(score)
    task = Task("test", (Message("user", "?"),))
    return Rollout(task, trace, reward, Termination.FINISHED, messages=said, counters=counters)


def test_by_hand():
    """Winners took 1, 2 and 3 turns (p50 2, p90 2.8), losers 5; the others are neither."""
    rollouts = [
        played(1.0, 1, tool_calls=1.0, malformed_calls=0.0),
        played(0.9, 2, tool_calls=3.0, malformed_calls=1.0),
        played(1.0, 3, tool_calls=2.0, malformed_calls=0.0),
        played(0.05, 5, tool_calls=4.0, malformed_calls=4.0),
        played(0.5, 9, tool_calls=0.0, malformed_calls=0.0),
        played(None, 9, tool_calls=0.0, malformed_calls=0.0),
    ]
    out = conduct_metrics(rollouts)
    assert out["conduct/winners/turns_p50"] == 2
    assert out["conduct/winners/turns_p90"] == pytest.approx(2.8)
    assert out["conduct/losers/turns_p50"] == out["conduct/losers/turns_p90"] == 5
    assert out["conduct/winners/tool_calls_p50"] == 2
    assert out["conduct/losers/tool_calls_p90"] == 4
    assert out["conduct/tool_calls"] == pytest.approx(10 / 6)
    assert out["conduct/malformed_calls"] == pytest.approx(5 / 10)


def test_answers_apart_from_reasoning():
    """ "yes" and "no": 2.5 characters; 10 characters were thought in one of two answers: 5."""
    out = conduct_metrics([played(1.0, 1, "yes", "0123456789"), played(0.0, 1, "no")])
    assert out["conduct/answer_characters"] == 2.5
    assert out["conduct/reasoning_characters"] == 5


def test_without_tools_there_are_no_tool_metrics():
    out = conduct_metrics([played(1.0, 1), played(0.0, 1)])
    assert not any("tool" in name or "malformed" in name for name in out)
    assert "conduct/reasoning_characters" not in out
    assert conduct_metrics([]) == {}
    calls = conduct_metrics([played(1.0, 1, tool_calls=0.0)])
    assert calls["conduct/tool_calls"] == 0
    assert "conduct/malformed_calls" not in calls  # of no calls no share is taken
