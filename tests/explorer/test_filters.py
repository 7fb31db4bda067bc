"""Windows on the mean group reward."""

from __future__ import annotations

import pytest

from trivet.explorer import reject, reward_metrics, rollout_metrics, solve_histogram
from trivet.recipe.schema import Window
from trivet.types import Group, IssueKey, Message, Reward, Rollout, Scored, Task, Termination, Trace, Unscored

TASK = Task("math", (Message("user", "?"),))


def group(*rewards: float | Reward, **kwargs: object) -> Group:
    made = [Scored(r) if isinstance(r, int | float) else r for r in rewards]
    rollouts = [Rollout(TASK, Trace(), r, Termination.FINISHED, **kwargs) for r in made]  # type: ignore[arg-type]
    return Group("g", IssueKey(TASK.id, 1), rollouts)


@pytest.mark.parametrize(
    ("rewards", "window", "cause"),
    [
        ((0, 0), None, None),
        ((0, 0), Window(), "too_low"),  # (0, 1]: never solved teaches nothing
        ((1, 1), Window(), None),
        ((1, 1), Window(upto=0.8), "too_high"),
        ((1, 0), Window(upto=0.5), None),  # the upper end belongs to the window
        ((0.5, 0.5), Window(above=0.5), "too_low"),  # the lower end does not
        ((0.3, 0.3), Window(not_all_equal=True), "all_equal"),
        ((0.3, 0.4), Window(not_all_equal=True), None),
    ],
)
def test_window(rewards: tuple[float, ...], window: Window | None, cause: str | None) -> None:
    assert reject(group(*rewards), window) == cause


def test_unscored_and_aborted_attempts_do_not_count() -> None:
    assert reject(group(Unscored("x"), Unscored("x")), None) == "unscored"
    assert reject(group(1, 1, Unscored("x")), Window(upto=0.9)) == "too_high"
    mixed = group(1, 0)
    mixed.rollouts[1].termination = Termination.ABORTED
    assert reject(mixed, Window(upto=0.9)) == "too_high"


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    assert reject(group(0.1 + 0.2, 0.3), Window(not_all_equal=True)) == "all_equal"
    assert reject(group(0.3 + 1e-9, 0.3), Window(not_all_equal=True)) is None


def test_a_greedy_attempt_is_only_compared_with() -> None:
    compared = group(0, 0)
    compared.rollouts += group(1, role="baseline").rollouts
    assert reject(compared, Window(not_all_equal=True)) == "all_equal"
    assert reject(compared, Window()) == "too_low"


def test_the_histogram_counts_the_ends() -> None:
    """Means 0, 0.5, 1: the first, third and last fifth; rewards beyond 0..1 widen the range to -1..1."""
    text = solve_histogram([group(0, 0), group(0, 1), group(1, 1)])
    assert text == "3 groups by mean reward: 0-0.2: 1, 0.2-0.4: 0, 0.4-0.6: 1, 0.6-0.8: 0, 0.8-1: 1"
    assert "-1--0.6: 1" in solve_histogram([group(-1, -1), group(1, 1)])


def test_the_histogram_names_every_group() -> None:
    text = solve_histogram([group(0, 0), group(0, 1), group(1, 1), group(Unscored("x"))])
    assert text.startswith("3 groups by mean reward")
    assert text.count("1") >= 3
    assert solve_histogram([]) == "no group has a score"


def test_metrics_leave_unscored_out() -> None:
    metrics = reward_metrics([group(1, 0, Unscored("x")), group(1, 1)])
    assert metrics["reward/mean"] == pytest.approx(3 / 4)
    assert metrics["reward/unscored"] == pytest.approx(1 / 5)
    assert metrics["group/all_solved"] == 0.5
    assert metrics["group/all_equal"] == 0.5
    assert metrics["reward/unscored/x"] == pytest.approx(1 / 5)
    assert reward_metrics([group(Unscored("x"))]) == {"reward/unscored": 1.0, "reward/unscored/x": 1.0}
    assert reward_metrics([]) == {"reward/unscored": 0.0}


def test_lengths_are_sampled_tokens() -> None:
    rollouts = group(1, 0).rollouts
    node = rollouts[0].trace.add(-1, [1, 2, 3])
    rollouts[0].trace.add_sampled(node, [4, 5], [-1, -1], 0)
    metrics = rollout_metrics(rollouts)
    assert metrics["rollout/tokens"] == 2
    assert metrics["rollout/tokens_per_solve"] == 2
    assert metrics["rollout/ended/finished"] == 1.0
    assert rollout_metrics([]) == {}
