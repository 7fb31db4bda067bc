"""What the curves show: metrics of a run as panels of series, thinned so that any run fits a page.

Plots (matplotlib) and the report (its own SVG) draw the same panels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trivet.monitor.fields import Kind, guess_kind
from trivet.monitor.files import stage_order
from trivet.monitor.summary import eval_metrics, main_metric

MAX_POINTS = 320
"""Of one series in a panel."""
MAX_BARS = 48
"""Of a panel of stacked bars."""


@dataclass(slots=True)
class Series:
    """One curve; arrays have shape (points,). A NaN in `y` breaks the line; `low`/`high`: a band."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    smooth: np.ndarray | None = None
    grey: bool = False

    @property
    def last(self) -> float | None:
        """The last value; None without any."""
        finite = self.y[np.isfinite(self.y)]
        return float(finite[-1]) if len(finite) else None


@dataclass(frozen=True, slots=True)
class Span:
    """A stage's place on the common step axis: from `start` (its step 0) to `stop`."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class Panel:
    """One picture: `line` (many steps), `points` (evaluations, intervals) or `stack` (parts of a whole)."""

    id: str
    title: str
    kind: Literal["line", "points", "stack"]
    unit: Kind
    series: list[Series] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def ends(self) -> tuple[float, float]:
        """The x axis: the stages that have something to show."""
        first = float(self.spans[0].start)
        return first, max(float(self.spans[-1].stop), first + 1)

    def colours(self) -> list[int]:
        """A number from 0 to 7 for each series; 7 is grey."""
        return [7 if series.grey else i % 7 for i, series in enumerate(self.series)]

    @property
    def origin(self) -> int:
        """What the labels of the x axis count from: a panel of one stage counts that stage's own steps."""
        return self.spans[0].start if len(self.spans) == 1 else 0

    def limits(self) -> tuple[float, float]:
        """The y axis: robust against a few spikes, with 0 in it where that costs little."""
        if self.kind == "stack":
            total = np.sum([np.nan_to_num(s.y) for s in self.series], axis=0)
            return 0.0, float(total.max(initial=0.0)) * 1.05 or 1.0
        values = np.concatenate(
            [a for s in self.series for a in (s.y, s.low, s.high) if a is not None] or [np.zeros(1)]
        )
        values = values[np.isfinite(values)]
        if not len(values):
            return 0.0, 1.0
        low, high = float(values.min()), float(values.max())
        if len(values) > 50:
            a, b = (float(q) for q in np.quantile(values, [0.01, 0.99]))
            margin = 0.5 * (b - a)
            low, high = max(low, a - margin), min(high, b + margin)
        if low > 0 and low < 0.6 * high:
            low = 0.0
        gap = (high - low) or abs(high) * 0.1 or 1.0
        top = high + 0.06 * gap
        if self.unit == "percent" and 0.7 < high <= 1.001:
            low, top = min(low, 0.9), 1.03  # shares near all: a thousandth does not fill the picture
        return (low - 0.06 * gap if low else 0.0), top


_LINES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", "Reward", (("reward/mean", "mean"),)),
    (
        "outcome",
        "Outcome of rollouts",
        (
            ("reward/solved", "solved"),
            ("rollout/truncated", "cut off"),
            ("reward/unscored", "unscored"),
            ("conduct/malformed_calls", "malformed tool calls"),
        ),
    ),
    (
        "groups",
        "Groups",
        (
            ("group/all_solved", "all solved"),
            ("group/none_solved", "none solved"),
            ("group/all_equal", "all rewards equal"),
            ("group/filtered", "filtered"),
            ("train/zero_advantage_share", "trained without advantage"),
            ("explorer/lost", "lost to infrastructure"),
        ),
    ),
    ("loss", "Loss", (("train/loss", "loss"),)),
    ("accuracy", "Accuracy in training", (("train/accuracy", "accuracy"),)),
    ("margin", "Preference margin", (("train/margin", "margin"),)),
    ("entropy", "Entropy (nats)", (("train/entropy", "entropy"),)),
    ("kl", "KL (nats a token)", (("train/kl", "to the sampler"), ("train/ref_kl", "to the reference"))),
    ("gap", "Gap to the sampler (nats a token)", (("train/gap", "all tokens"),)),
    ("ess", "Effective sample size", (("train/ess", "share"),)),
    (
        "tokens",
        "Tokens that teach",
        (("train/trained_share", "trained"), ("train/clipped", "clipped")),
    ),
    ("grad_norm", "Gradient norm", (("train/grad_norm", "before clipping"),)),
    (
        "length",
        "Response length (tokens)",
        (
            ("rollout/length_mean", "mean"),
            ("rollout/length_p90", "90th percentile"),
            ("rollout/length_max", "longest"),
        ),
    ),
    ("solve", "Tokens for one solve", (("rollout/tokens_per_solve", "sampled tokens"),)),
    (
        "answer",
        "Final message (characters)",
        (("conduct/answer_characters", "answer"), ("conduct/reasoning_characters", "reasoning")),
    ),
    (
        "turns",
        "Turns",
        (
            ("conduct/winners/turns_p50", "winners, median"),
            ("conduct/winners/turns_p90", "winners, 90th percentile"),
            ("conduct/losers/turns_p50", "losers, median"),
            ("conduct/losers/turns_p90", "losers, 90th percentile"),
        ),
    ),
    (
        "tool_calls",
        "Tool calls",
        (
            ("conduct/tool_calls", "mean"),
            ("conduct/winners/tool_calls_p50", "winners, median"),
            ("conduct/losers/tool_calls_p50", "losers, median"),
        ),
    ),
    (
        "speed",
        "Tokens a second",
        (("engine/tokens_per_s", "sampling"), ("train/tokens_per_s", "training")),
    ),
    ("lag", "Lag of the sampling weights (steps)", (("buffer/lag", "lag"),)),
    ("lr", "Learning rate", (("train/lr", "learning rate"),)),
)


class History:
    """The metrics of a run on one step axis: each stage begins where the one before ended."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.records = records
        self.spans: list[Span] = []
        start = 0
        for name in stage_order(records):
            last = max((r["step"] for r in records if r["stage"] == name), default=0)
            self.spans.append(Span(name, start, start + last))
            start += max(last, 1)
        self._start = {span.name: span.start for span in self.spans}
        self.x = np.array([self._start[r["stage"]] + r["step"] for r in records], np.int64)
        index = {span.name: i for i, span in enumerate(self.spans)}
        self._stage = np.array([index[r["stage"]] for r in records], np.int64)
        self._order = np.lexsort((self.x, self._stage))

    @property
    def keys(self) -> set[str]:
        return {key for record in self.records for key in record}

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, values (NaN where null) and stage index of the steps that have `key`, in order."""
        values = [self.records[i].get(key, _ABSENT) for i in self._order]
        has = np.array([value is not _ABSENT for value in values], bool)
        y = np.array([np.nan if v is None or v is _ABSENT else v for v in values], np.float64)
        y = np.clip(y, -1e100, 1e100)  # a picture's arithmetic must not overflow
        return self.x[self._order][has], y[has], self._stage[self._order][has]

    def series(self, key: str, name: str, only: int | None = None) -> Series | None:
        """The curve of a metric (of stage number `only`), broken between stages; None without a value."""
        x, y, stage = self.column(key)
        if only is not None:
            x, y, stage = x[stage == only], y[stage == only], stage[stage == only]
        if not np.isfinite(y).any():
            return None
        parts = []
        for i in np.unique(stage):
            own = stage == i
            parts.append(_thin(x[own], y[own], max(8, round(MAX_POINTS * own.mean()))))
        return _joined(name, parts)

    def spread(self, key: str) -> dict[int, float]:
        """stage number -> the middle nine tenths of a metric's range in it."""
        _, y, stage = self.column(key)
        out = {}
        for i in np.unique(stage).tolist():
            own = y[(stage == i) & np.isfinite(y)]
            if len(own):
                out[i] = float(np.quantile(own, 0.95) - np.quantile(own, 0.05))
        return out

    def covered(self, panel: Panel) -> list[Span]:
        """From the first to the last stage in which a panel shows anything."""
        finite = np.concatenate([s.x[np.isfinite(s.y)] for s in panel.series])
        first, last = finite.min(), finite.max()
        kept = [s for s in self.spans if s.stop > first or s.start == s.stop == first]
        kept = [s for s in kept if s.start < last or s.start == s.stop == last] or kept[:1]
        return kept or self.spans[-1:]

    def where(self, x: int) -> tuple[str, int]:
        """(stage, step) of a place on the axis."""
        for span in reversed(self.spans):
            if x > span.start or span is self.spans[0]:
                return span.name, int(x - span.start)
        return "", int(x)


_ABSENT = object()


def _thin(x: np.ndarray, y: np.ndarray, room: int) -> Series:
    """At most `room` points: means of equal runs of steps, with their extremes as a band."""
    smooth = _smooth(y) if len(y) >= 40 else None
    if len(x) <= room:
        return Series("", x.astype(np.float64), y, smooth=smooth)
    starts = np.linspace(0, len(x), room + 1).astype(int)[:-1]
    counts = np.diff(np.append(starts, len(x)))
    finite = np.isfinite(y)
    n = np.add.reduceat(finite, starts)
    total = np.add.reduceat(np.where(finite, y, 0.0), starts)
    mean = np.where(n > 0, total / np.maximum(n, 1), np.nan)
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    low, high = np.where(n > 0, low, np.nan), np.where(n > 0, high, np.nan)
    last = starts + counts - 1
    return Series("", x[last].astype(np.float64), mean, low, high, None if smooth is None else smooth[last])


def _smooth(y: np.ndarray) -> np.ndarray:
    """A moving average over about a thirtieth of the run, forwards and backwards: it lags neither way."""
    return (_average(y) + _average(y[::-1])[::-1]) / 2


def _average(y: np.ndarray) -> np.ndarray:
    """The exponential moving average of the finite values, unbiased at its start."""
    keep = 1.0 - 1.0 / max(5.0, len(y) / 30)
    mean, weight = 0.0, 0.0
    out = np.empty(len(y))
    for i, value in enumerate(y.tolist()):
        if value == value:
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out[i] = mean / weight if weight else np.nan
    return out


def _joined(name: str, parts: list[Series]) -> Series:
    """Pieces of one curve with a NaN between them."""
    banded = any(part.low is not None for part in parts)
    smoothed = any(part.smooth is not None for part in parts)
    columns: dict[str, list[np.ndarray]] = {"x": [], "y": [], "low": [], "high": [], "smooth": []}
    for i, part in enumerate(parts):
        if i:
            for column in columns.values():
                column.append(np.array([np.nan]))
            columns["x"][-1] = part.x[:1]
        columns["x"].append(part.x)
        columns["y"].append(part.y)
        columns["low"].append(part.y if part.low is None else part.low)
        columns["high"].append(part.y if part.high is None else part.high)
        columns["smooth"].append(part.y if part.smooth is None else part.smooth)
    whole = {key: np.concatenate(column) for key, column in columns.items()}
    return Series(
        name,
        whole["x"],
        whole["y"],
        whole["low"] if banded else None,
        whole["high"] if banded else None,
        whole["smooth"] if smoothed else None,
    )


def panels(history: History) -> list[Panel]:
    """All panels that have data, evaluations first."""
    found = _evaluations(history)
    for id_, title, lines in _LINES:
        spreads = history.spread(lines[0][0]) if id_ in _SPLIT else {}
        widest = max(spreads.values(), default=0.0)
        if len(spreads) > 1 and any(8 * spread < widest for spread in spreads.values()):
            # One axis would flatten a stage (a loss of SFT beside one of RL): a panel for each.
            for i in spreads:
                name = history.spans[i].name
                found += _lines(history, _id(id_, name), f"{title}, {name}", lines, only=i)
        else:
            found += _lines(history, id_, title, lines)
        if id_ == "reward":
            found += _reward_parts(history)
        if id_ == "gap":
            found += _gaps(history)
    found += _times(history)
    for panel in found:
        panel.spans = panel.spans or history.covered(panel)
    return found


def _lines(
    history: History, id_: str, title: str, lines: Sequence[tuple[str, str]], only: int | None = None
) -> list[Panel]:
    panel = Panel(id_, title, "line", guess_kind(lines[0][0]))
    for key, name in lines:
        curve = history.series(key, name, only)
        if curve is not None and (key not in _QUIET or np.nanmax(curve.y) > 0):
            panel.series.append(curve)
    if id_ == "turns" and all(np.nanmax(curve.y) <= 1 for curve in panel.series):
        return []  # every game has one turn
    if len(lines) > 1 and len(panel.series) == 1:
        panel.title = f"{title}: {panel.series[0].name}"  # there is no legend to say it
    if only is not None:
        panel.spans = [history.spans[only]]
    return [panel] if panel.series else []


_SPLIT = {"loss", "grad_norm", "length"}
_QUIET = {"rollout/truncated", "reward/unscored", "buffer/lag"}
_QUIET |= {"conduct/malformed_calls", "group/filtered", "explorer/lost"}


def _evaluations(history: History) -> list[Panel]:
    """The main metric of all tasksets in one panel a metric, then all k of each taskset with several."""
    kinds: dict[str, set[str]] = {}
    for record in history.records:
        for name, metrics in eval_metrics(record).items():
            if "@" not in name:  # the models of a bench stage are no curve
                kinds.setdefault(name, set()).update(metrics)
    mains: dict[str, Panel] = {}
    several: list[Panel] = []
    for name, metrics in kinds.items():
        ks = sorted((m for m in metrics if _is_pass(m)), key=lambda m: int(m[5:]))
        main = ks[0] if ks else main_metric(dict.fromkeys(sorted(metrics)))
        if main is None:
            continue
        panel = mains.setdefault(
            main, Panel(_id("eval", main), f"Evaluation: {main}", "points", guess_kind(main))
        )
        _add_points(history, panel, f"eval/{name}/{main}", name)
        if len(ks) > 1:
            panel = Panel(_id("eval", name), f"{name}: pass@k", "points", "percent")
            for key in ks[:6]:
                _add_points(history, panel, f"eval/{name}/{key}", key)
            several.append(panel)
    return [panel for panel in [*mains.values(), *several] if panel.series]


def _is_pass(metric: str) -> bool:
    return metric.startswith("pass@") and metric[5:].isdigit()


def _id(*parts: str) -> str:
    """A file name of the parts."""
    return "_".join("".join(c if c.isalnum() and c.isascii() else "-" for c in part) for part in parts)


def _add_points(history: History, panel: Panel, key: str, name: str) -> None:
    """Evaluations are few and run on through the stages: no break, every point kept (up to the limit)."""
    x, y, _ = history.column(key)
    keep = np.flatnonzero(np.isfinite(y))
    keep = (
        keep[np.unique(np.linspace(0, len(keep) - 1, MAX_POINTS).round().astype(int))] if len(keep) else keep
    )
    if not len(keep):
        return
    bounds: list[np.ndarray | None] = []
    for side in ("low", "high"):
        at, values, _ = history.column(f"{key}/{side}")
        known = dict(zip(at.tolist(), values.tolist(), strict=True))
        edge = np.array([known.get(place, np.nan) for place in x[keep].tolist()])
        bounds.append(edge if np.isfinite(edge).any() else None)
    low, high = bounds if all(b is not None for b in bounds) else (None, None)
    panel.series.append(Series(name, x[keep].astype(np.float64), y[keep], low, high))


def _reward_parts(history: History) -> list[Panel]:
    keys = sorted(k for k in history.keys if k.startswith("reward/part/"))[:8]
    curves = [curve for key in keys if (curve := history.series(key, key.removeprefix("reward/part/")))]
    return [Panel("reward_parts", "Parts of the reward", "line", "number", curves)] if curves else []


def _gaps(history: History) -> list[Panel]:
    """The gap to the sampler by staleness, where there is more than one age."""
    keys = sorted(k for k in history.keys if k.startswith("train/") and "/gap/" in k)[:8]
    several = len({key.split("/")[1] for key in keys}) > 1
    curves = []
    for key in keys:
        _, stream, _, age = key.split("/")
        label = f"age {age.replace('_up', ' and more').replace('_', ' to ')}"
        curve = history.series(key, f"{stream}, {label}" if several else label)
        curves += [curve] if curve else []
    title = "Gap to the sampler by age (publications)"
    return [Panel("gap_by_age", title, "line", "number", curves)] if len(curves) > 1 else []


def _time_parts(keys: set[str]) -> dict[str, str]:
    """Metric -> name of the parts of a step; parts of parts (train_forward_s of train_s) left out."""
    names = {k: k.removeprefix("time/").removesuffix("_s") for k in sorted(keys) if k.startswith("time/")}
    names.pop("time/step_s", None)
    return {k: n for k, n in names.items() if not any(n.startswith(f"{other}_") for other in names.values())}


def _times(history: History) -> list[Panel]:
    """Where a step's time goes: its parts, and what is left of time/step_s as `other`."""
    parts = _time_parts(history.keys)
    keys = list(parts)
    steps = [r for r in history.records if any(r.get(k) is not None for k in (*keys, "time/step_s"))]
    steps = [r for r in steps if r["step"] > 0]
    if not steps or not keys:
        return []
    x = np.array([history._start[r["stage"]] + r["step"] for r in steps], np.float64)
    table = np.array([[r.get(k) or 0.0 for k in keys] for r in steps], np.float64)
    whole = np.array([r.get("time/step_s") or 0.0 for r in steps], np.float64)
    rest = np.maximum(whole - table.sum(1), 0.0)
    names = list(parts.values())
    if rest.sum() > 0.02 * max(whole.sum(), 1e-9):
        table, names = np.column_stack([table, rest]), [*names, "other"]
    order = sorted(range(len(names)), key=lambda i: (names[i] == "other", -table[:, i].sum()))
    starts = np.arange(0, len(x), -(-len(x) // MAX_BARS))  # equal bars stand at equal distances
    counts = np.diff(np.append(starts, len(x)))
    means = np.add.reduceat(table, starts, axis=0) / counts[:, None]
    middle = np.add.reduceat(x, starts) / counts
    curves = [Series(names[i], middle, means[:, i]) for i in order if means[:, i].any()]
    if len(curves) > 7:
        others = np.sum([c.y for c in curves[6:]], axis=0)
        curves = [*curves[:6], Series("other", middle, others)]
    for curve in curves:
        curve.grey = curve.name == "other"
    return [Panel("time", "Seconds a step", "stack", "seconds", curves)] if curves else []
