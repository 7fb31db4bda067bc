"""Schedules rollouts: concurrency, retries, deadlines, filters."""

from trivet.explorer.conduct import conduct_metrics
from trivet.explorer.explorer import Explorer, Filled, Game, TooManyUnscored
from trivet.explorer.filters import reject, scores, solve_histogram
from trivet.explorer.metrics import reward_metrics, rollout_metrics, unscored_causes
from trivet.explorer.play import Played, play

__all__ = [
    "Explorer",
    "Filled",
    "Game",
    "Played",
    "TooManyUnscored",
    "conduct_metrics",
    "play",
    "reject",
    "reward_metrics",
    "rollout_metrics",
    "scores",
    "solve_histogram",
    "unscored_causes",
]
