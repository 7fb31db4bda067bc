"""Whether a short run was stable, by rules over its losses and gradient norms. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

WINDOW = 16
"""Steps before a step that it is compared with; at least `LEAST` of them."""
LEAST = 8
SPIKE_SIGMA = 6.0
"""A loss is a spike when it lies above the median of those before it by more than so many deviations and by
more than `SPIKE_SHARE` of it. The deviation is that of a step's noise, from the differences of neighbours
among all steps before it, so that a falling loss has no more of it than a level one."""
SPIKE_SHARE = 0.1
SPIKE_NORM = 5.0
"""A gradient norm is a spike when it is more than so many times the median of those before it."""
RISE_SIGMA = 3.0
"""An end above the start (or a climb out of the lowest part) counts from so many deviations on, and from
`RISE_SHARE` of the start on."""
RISE_SHARE = 0.02
LOST = 0.5
"""Share of what was gained until the lowest part that may be lost again."""
PARTS = 5
"""The course of a loss is looked at in so many parts of equal length, by their medians."""

Mark = Literal["stable", "spiking", "diverging"]


class Verdict(NamedTuple):
    """The mark, and the rule that gave it, for a person."""

    mark: Mark
    why: str


def verdict(losses: Sequence[float | None], norms: Sequence[float | None]) -> Verdict:
    """diverging: a loss or gradient norm was not a finite number (None stands for one), the loss ended above
    where it began, or it lost more than half of what it had gained. spiking: a step stood out. Else stable.

    Loss and gradient norm of each step, in order. What is less than ten steps long is judged by its numbers
    and spikes alone.
    """
    for what, values in (("loss", losses), ("gradient norm", norms)):
        bad = next((i for i, x in enumerate(values) if x is None or not math.isfinite(x)), None)
        if bad is not None:
            return Verdict("diverging", f"{what} of step {bad + 1} is no finite number")
    course = [float(x) for x in losses if x is not None]
    if why := _rise(course):
        return Verdict("diverging", why)
    spikes = loss_spikes(course)
    heights = norm_spikes([float(x) for x in norms if x is not None])
    if spikes or heights:
        said = [f"loss at step {', '.join(str(i + 1) for i in spikes[:3])}"] if spikes else []
        said += [f"gradient norm at step {', '.join(str(i + 1) for i in heights[:3])}"] if heights else []
        return Verdict("spiking", f"{len(set(spikes) | set(heights))} step(s) stand out: {'; '.join(said)}")
    return Verdict("stable", "")


def _deviation(values: Sequence[float]) -> float:
    """1.4826 times the median distance from the median: a deviation that spikes do not move."""
    middle = median(values)
    return 1.4826 * median(abs(x - middle) for x in values)


def _noise(values: Sequence[float]) -> float:
    """Deviation of single values about their course: that of neighbours' differences over sqrt 2."""
    return _deviation([b - a for a, b in pairwise(values)]) / math.sqrt(2)


def loss_spikes(losses: Sequence[float]) -> list[int]:
    """Steps (from 0) whose loss stands out above the `WINDOW` before it."""
    found = []
    for i in range(LEAST, len(losses)):
        middle = median(losses[max(0, i - WINDOW) : i])
        bound = max(SPIKE_SIGMA * _noise(losses[:i]), SPIKE_SHARE * abs(middle))
        if losses[i] - middle > bound:
            found.append(i)
    return found


def norm_spikes(norms: Sequence[float]) -> list[int]:
    """Steps (from 0) whose gradient norm stands out above the `WINDOW` before it."""
    return [
        i
        for i in range(LEAST, len(norms))
        if norms[i] > SPIKE_NORM * median(norms[max(0, i - WINDOW) : i]) > 0
    ]


def _rise(losses: Sequence[float]) -> str:
    """Why the course of the losses is one of divergence; "" where it is not."""
    if len(losses) < 2 * PARTS:
        return ""
    edges = [round(k * len(losses) / PARTS) for k in range(PARTS + 1)]
    parts = [losses[a:b] for a, b in pairwise(edges)]
    level = [median(part) for part in parts]
    noise = _noise(losses)
    tolerance = max(RISE_SIGMA * noise, RISE_SHARE * abs(level[0]))
    first, last, low = level[0], level[-1], min(level)
    if last - first > tolerance:
        return f"the loss ended at {last:.4g} and began at {first:.4g}"
    if last - low > tolerance and last - low > LOST * (first - low):
        return f"the loss fell from {first:.4g} to {low:.4g} and ended at {last:.4g}"
    return ""
