"""Each rule at the edge of its condition; a warning is said once an episode."""

from __future__ import annotations

from functools import partial

import pytest

from trivet.monitor.alerts import RULES, Alerts


def lines(key, values, **fixed):
    return [{key: value, **fixed} for value in values]


@pytest.mark.parametrize(
    ("name", "history", "quiet"),
    [
        (
            "entropy_rising",  # 0.4 at its lowest stretch, 0.7 now
            lines("train/entropy", [0.8] * 5 + [0.4] * 5 + [0.7] * 5),
            lines("train/entropy", [0.8] * 5 + [0.5] * 5 + [0.7] * 5),  # 1.4 times
        ),
        (
            "entropy_rising",  # doubled, but by less than 0.1 nats: noise of a sharp policy
            lines("train/entropy", [0.1] * 5 + [0.21] * 5),
            lines("train/entropy", [0.05] * 5 + [0.1] * 5),
        ),
        (
            "entropy_collapsed",
            lines("train/entropy", [0.5, 0.019, 0.01, 0.01, 0.01, 0.01]),
            lines("train/entropy", [0.5, 0.021, 0.01, 0.01, 0.01, 0.01][:5]),
        ),
        (
            "truncation_high",
            lines("rollout/truncated", [0.51] * 3),
            lines("rollout/truncated", [0.9, 0.5, 0.9]),
        ),
        (
            "zero_advantage_high",
            lines("train/zero_advantage_share", [0.9] * 5),
            lines("train/zero_advantage_share", [0.9, 0.9, 0.8, 0.9, 0.9]),
        ),
        ("all_fail", lines("group/none_solved", [0.96] * 5), lines("group/none_solved", [0.95] * 5)),
        ("all_pass", lines("group/all_solved", [0.96] * 5), lines("group/all_solved", [0.95] * 5)),
        ("kl_to_sampler_high", lines("train/kl", [0.11] * 3), lines("train/kl", [0.11, 0.11])),
        ("lost_to_infrastructure", lines("explorer/lost", [0.21] * 3), lines("explorer/lost", [0.2] * 3)),
        (
            "no_tool_calls",
            lines("conduct/tool_calls", [0.0] * 3),
            lines("conduct/tool_calls", [0.0, 0.0, 0.1]),
        ),
        (
            "malformed_calls_high",
            lines("conduct/malformed_calls", [0.26] * 3),
            lines("conduct/malformed_calls", [0.25] * 3),
        ),
    ],
)
def test_rules_at_their_edges(name, history, quiet):
    said = RULES[name](history)
    assert said is not None
    assert len(said) > 40  # what it is, and what to do
    assert RULES[name](quiet) is None
    assert RULES[name]([]) is None
    assert RULES[name]([{"train/loss": 1.0}] * 20) is None  # a stage without its metric


@pytest.mark.parametrize("name", RULES)
def test_numbers_that_are_none_say_nothing(name):
    """Every metric a rule reads is NaN: with comparisons that are all false no rule may fire."""
    keys = ["train/entropy", "rollout/truncated", "train/zero_advantage_share", "group/none_solved"]
    keys += ["group/all_solved", "train/kl", "explorer/lost", "conduct/tool_calls", "conduct/malformed_calls"]
    for value in (float("nan"), float("inf"), -float("inf")):
        assert RULES[name]([dict.fromkeys(keys, value)] * 20) is None


def test_a_threshold_can_be_set():
    history = lines("rollout/truncated", [0.3, 0.3])
    assert RULES["truncation_high"](history) is None
    quick = partial(RULES["truncation_high"], above=0.2, steps=2)
    assert Alerts({"cut": quick}).look(history[0]) == []
    alerts = Alerts({"cut": quick})
    said = [alerts.look(line) for line in history]
    assert said[0] == []
    assert [name for name, _ in said[1]] == ["cut"]
    assert "30%" in said[1][0][1]


def test_said_once_an_episode():
    alerts, said = Alerts(), []
    for value in [0.9] * 5 + [0.1] + [0.9] * 4:
        said.append([name for name, _ in alerts.look({"rollout/truncated": value})])
    assert said == [[], [], ["truncation_high"], [], [], [], [], [], ["truncation_high"], []]


def test_the_past_is_bounded():
    alerts = Alerts()
    for _ in range(500):
        alerts.look({"train/entropy": 0.4})
    assert len(alerts._history) <= 50
