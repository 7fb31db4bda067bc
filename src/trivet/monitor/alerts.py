"""Rules that say aloud what the numbers of a reinforcement-learning stage mean, before it is too late.

A rule looks at the metrics of a stage's steps, oldest first, and gives a sentence while its condition holds.
It is said when the condition begins, and again only after it has ended: once an episode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

History = Sequence[Mapping[str, float]]
Rule = Callable[[History], "str | None"]

KEPT = 50
"""Steps a rule can look back."""


def _last(history: History, key: str, steps: int) -> list[float] | None:
    """The key's values in the last `steps` steps; None where there are fewer, or one is not finite."""
    values = _values(history[-steps:], key)
    return values if len(values) >= steps else None


def _values(history: History, key: str) -> list[float]:
    """The finite values a key has: a NaN compares as nothing, and would hold up or set off any rule."""
    return [line[key] for line in history if key in line and math.isfinite(line[key])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def entropy_rising(
    history: History, *, factor: float = 1.5, least: float = 0.1, steps: int = 5
) -> str | None:
    """train/entropy over the last `steps` steps is `factor` times, and `least` nats above, what it was at its
    lowest in as many steps before: the policy loses what it knew, often by stale or inexact samplers."""
    values = _values(history, "train/entropy")
    if len(values) < 2 * steps:
        return None
    now = _mean(values[-steps:])
    stretches = [_mean(values[i : i + steps]) for i in range(len(values) - 2 * steps + 1)]
    low = min(stretches)
    if now < factor * low or now < low + least:
        return None
    return (
        f"entropy rises: {now:.2f} nats, {low:.2f} at its lowest; look at train/kl and the samples; lower "
        "trainer.lr, or correct for the sampler (tis, score_centering)"
    )


def entropy_collapsed(history: History, *, below: float = 0.02, steps: int = 5) -> str | None:
    """train/entropy is below `below` nats in `steps` steps in a row: answers of a group are all alike."""
    values = _last(history, "train/entropy", steps)
    if values is None or max(values) >= below:
        return None
    return (
        f"entropy is {values[-1]:.3f} nats: the policy hardly varies, groups teach nothing. Raise "
        "sampling.temperature or entropy_weight, or end the stage"
    )


def truncation_high(history: History, *, above: float = 0.5, steps: int = 3) -> str | None:
    """rollout/truncated is over `above` in `steps` steps in a row: most answers never reach their end."""
    values = _last(history, "rollout/truncated", steps)
    if values is None or min(values) <= above:
        return None
    return (
        f"{100 * values[-1]:.0f}% of the answers are cut off: the reward says little about them. Raise "
        "sampling.max_tokens, or mask them (masks: [truncated])"
    )


def zero_advantage_high(history: History, *, above: float = 0.8, steps: int = 5) -> str | None:
    """train/zero_advantage_share is over `above` in `steps` steps in a row: tasks are always or never
    solved."""
    shares = _last(history, "train/zero_advantage_share", steps)
    if shares is None or min(shares) <= above:
        return None
    return (
        f"{100 * shares[-1]:.0f}% of the groups have no advantage: their answers are all as good or as bad. "
        "Set explorer.window, or take other tasks"
    )


def all_fail(history: History, *, above: float = 0.95, steps: int = 5) -> str | None:
    """group/none_solved is over `above` in `steps` steps in a row."""
    values = _last(history, "group/none_solved", steps)
    if values is None or min(values) <= above:
        return None
    return (
        f"in {100 * values[-1]:.0f}% of the groups nothing is solved: tasks are too hard, or the verifier "
        "refuses what is right; look at the samples"
    )


def all_pass(history: History, *, above: float = 0.95, steps: int = 5) -> str | None:
    """group/all_solved is over `above` in `steps` steps in a row."""
    values = _last(history, "group/all_solved", steps)
    if values is None or min(values) <= above:
        return None
    return (
        f"in {100 * values[-1]:.0f}% of the groups everything is solved: nothing is left to teach here, "
        "or the verifier can be cheated; look at the samples"
    )


def kl_to_sampler_high(history: History, *, above: float = 0.1, steps: int = 3) -> str | None:
    """train/kl is over `above` nats a token in `steps` steps in a row: what is trained was sampled by another
    policy."""
    values = _last(history, "train/kl", steps)
    if values is None or min(values) <= above:
        return None
    return (
        f"the policy is {values[-1]:.2f} nats a token from its sampler: updates are off-policy. Sync more "
        "often, make fewer updates a batch, or lower trainer.lr"
    )


def lost_to_infrastructure(history: History, *, above: float = 0.2, steps: int = 3) -> str | None:
    """explorer/lost, the share of groups nobody could play, is over `above` in `steps` steps in a row."""
    values = _last(history, "explorer/lost", steps)
    if values is None or min(values) <= above:
        return None
    return (
        f"{100 * values[-1]:.0f}% of the groups are lost to infrastructure: what is left is a biased sample. "
        "Look at the warnings of their causes"
    )


def no_tool_calls(history: History, *, steps: int = 3) -> str | None:
    """Tools are declared (conduct/tool_calls is there) and not one was called in `steps` steps in a row."""
    values = _last(history, "conduct/tool_calls", steps)
    if values is None or max(values) > 0:
        return None
    return (
        f"no tool was called in {steps} steps although tools are declared: is the call format the model's "
        "own? Look at the samples"
    )


def malformed_calls_high(history: History, *, above: float = 0.25, steps: int = 3) -> str | None:
    """Over `above` of the tool calls could not be read, in `steps` steps in a row."""
    values = _last(history, "conduct/malformed_calls", steps)
    if values is None or min(values) <= above:
        return None
    return f"{100 * values[-1]:.0f}% of the tool calls cannot be read; look at samples and template"


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(entropy_rising, entropy_collapsed, truncation_high, zero_advantage_high, all_fail, all_pass),
        *(kl_to_sampler_high, lost_to_infrastructure, no_tool_calls, malformed_calls_high),
    )
}
"""All rules by name: that is what a warning is called."""


@dataclass(slots=True)
class Alerts:
    """The rules of one stage over its last steps."""

    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    _history: list[Mapping[str, float]] = field(default_factory=list)
    _holding: set[str] = field(default_factory=set)

    def look(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """(name, sentence) of the rules whose condition begins with this step."""
        self._history = [*self._history[1 - KEPT :], metrics]
        said = {name: text for name, rule in self.rules.items() if (text := rule(self._history))}
        new = [(name, text) for name, text in said.items() if name not in self._holding]
        self._holding = set(said)
        return new
