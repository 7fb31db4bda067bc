"""Which groups are worth training on, and what to say when too few are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trivet.algorithms.credit import ROUNDING
from trivet.recipe.schema import Window
from trivet.types import Group, Termination


def scores(group: Group) -> np.ndarray:
    """Scored rewards of the group's own attempts, shape (_G,); aborted and unscored ones are left out."""
    kept = (r for r in group.rollouts if r.role == "train" and r.termination is not Termination.ABORTED)
    return np.asarray([r.score for r in kept if r.score is not None], np.float64)


def all_equal(reward_G: np.ndarray) -> bool:
    """The scores are the same, but for the last bits that credit passes over too."""
    high, low = float(reward_G.max()), float(reward_G.min())
    return high - low <= ROUNDING * max(abs(high), abs(low))


def reject(group: Group, window: Window | None) -> str | None:
    """Why the window drops this group; None where it stays."""
    reward_G = scores(group)
    if len(reward_G) == 0:
        return "unscored"
    if window is None:
        return None
    if window.not_all_equal and all_equal(reward_G):
        return "all_equal"
    mean = float(reward_G.mean())
    if mean <= window.above:
        return "too_low"
    if mean > window.upto:
        return "too_high"
    return None


def solve_histogram(groups: Iterable[Group], bins: int = 5) -> str:
    """Group means as one line: how many lie in each fifth of the observed range (0..1 for 0/1 rewards)."""
    means = [float(s.mean()) for group in groups if len(s := scores(group))]
    if not means:
        return "no group has a score"
    low, high = min(0.0, *means), max(1.0, *means)
    counts, edges = np.histogram(means, bins=bins, range=(low, high))
    cells = (f"{a:.2g}-{b:.2g}: {n}" for a, b, n in zip(edges, edges[1:], counts, strict=False))
    return f"{len(means)} groups by mean reward: " + ", ".join(cells)
