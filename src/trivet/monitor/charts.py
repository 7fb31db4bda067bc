"""Panels as inline SVG for the report: themed by CSS, read by hovering, no script.

Colours are classes (`c0` to `c7`) whose values the page's style sheet sets for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet.monitor.fields import tick_text, ticks, write
from trivet.monitor.panels import History, Panel, Series
from trivet.monitor.safe_text import esc

WIDTH, HEIGHT = 420, 224
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 20, 24
MAX_HITS = 64
"""Places of a chart that answer to the pointer."""


class Frame:
    """Maps data to the picture."""

    def __init__(self, panel: Panel) -> None:
        self.low, self.high = panel.limits()
        self.first, self.last = panel.ends()
        if panel.kind == "stack":  # bars need room at both ends
            half = (self.last - self.first) / max(1, 2 * len(panel.series[0].x))
            self.first, self.last = self.first - half, self.last + half

    def x(self, value: Any) -> float:
        return LEFT + (value - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: Any) -> float:
        share = (value - self.low) / (self.high - self.low)
        return TOP + (1 - min(1.02, max(-0.02, share))) * (HEIGHT - TOP - BOTTOM)


def chart(panel: Panel, history: History) -> str:
    """A figure: caption with the last value and a legend, then the picture."""
    frame = Frame(panel)
    parts = [*_axes(panel, frame)]
    if panel.kind == "stack":
        parts += _bars(panel, frame)
    else:
        for colour, series in zip(panel.colours(), panel.series, strict=True):
            parts += _curve(panel, series, frame, colour)
    parts += _hits(panel, frame, history)
    label = esc(f"{panel.title}, {len(panel.series)} series")
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="chart" id="chart-{esc(panel.id)}">{_caption(panel)}{picture}</figure>'


def _caption(panel: Panel) -> str:
    last = panel.series[0].last if len(panel.series) == 1 else None
    value = f'<span class="last">{esc(_number(panel, last))}</span>' if last is not None else ""
    names = ""
    if len(panel.series) > 1:
        pairs = zip(panel.colours(), panel.series, strict=True)
        keys = [f'<span><i class="c{i}"></i>{esc(series.name)}</span>' for i, series in pairs]
        names = f'<div class="legend">{"".join(keys)}</div>'
    return f"<figcaption><h3>{esc(panel.title)}</h3>{value}{names}</figcaption>"


def _number(panel: Panel, value: float) -> str:
    if panel.unit == "percent":
        return f"{100 * value:.1f}%"
    return f"{value:.3g}" if panel.unit == "number" else write(value, panel.unit)


def _axes(panel: Panel, frame: Frame) -> list[str]:
    out = []
    marks = ticks(frame.low, frame.high, 5)
    gap = marks[1] - marks[0] if len(marks) > 1 else abs(marks[0])
    for value in marks:
        y = frame.y(value)
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        out.append(
            f'<text class="ty" x="{LEFT - 6}" y="{y + 3.5:.1f}">{tick_text(value, panel.unit, gap)}</text>'
        )
    for value in ticks(max(0.0, frame.first - panel.origin), frame.last - panel.origin, 5):
        if float(value).is_integer():
            text = f"{value:.0f}" if value < 1e5 else f"{value / 1000:.0f}k"
            x = frame.x(value + panel.origin)
            out.append(f'<text class="tx" x="{x:.1f}" y="{HEIGHT - 7}">{text}</text>')
    for i, span in enumerate(panel.spans):
        x = frame.x(span.start) if i else LEFT
        if i:
            out.append(f'<path class="stage" d="M{x:.1f} {TOP - 12}V{HEIGHT - BOTTOM}"/>')
        room = (frame.x(max(span.stop, span.start + 1)) - x) / 6.2
        name = span.name if len(span.name) <= room else span.name[: max(0, int(room) - 1)] + "…"
        if room >= 2.5:
            out.append(f'<text class="ts" x="{x + (4 if i else 0):.1f}" y="{TOP - 6}">{esc(name)}</text>')
    return out


def _runs(*columns: np.ndarray) -> list[np.ndarray]:
    """Indices of the unbroken stretches in which all columns are finite."""
    good = np.all([np.isfinite(c) for c in columns], axis=0)
    edges = np.flatnonzero(np.diff(good.astype(np.int8)))
    return [run for run in np.split(np.arange(len(good)), edges + 1) if len(run) and good[run[0]]]


def _path(series: Series, y: np.ndarray, frame: Frame) -> str:
    out = []
    for run in _runs(y):
        points = [f"{frame.x(series.x[i]):.1f} {frame.y(y[i]):.1f}" for i in run]
        out.append("M" + "L".join(points) + ("h.1" if len(run) == 1 else ""))
    return "".join(out)


def _curve(panel: Panel, series: Series, frame: Frame, colour: int) -> list[str]:
    out = []
    low, high = series.low, series.high
    if low is not None and high is not None:
        for run in _runs(low, high):
            upper = [f"{frame.x(series.x[i]):.1f} {frame.y(high[i]):.1f}" for i in run]
            lower = [f"{frame.x(series.x[i]):.1f} {frame.y(low[i]):.1f}" for i in run[::-1]]
            out.append(f'<path class="band c{colour}" d="M{"L".join(upper + lower)}Z"/>')
            if panel.kind == "points" and len(run) <= 12:
                bars = "".join(
                    f"M{frame.x(series.x[i]):.1f} {frame.y(low[i]):.1f}V{frame.y(high[i]):.1f}" for i in run
                )
                out.append(f'<path class="whisker c{colour}" d="{bars}"/>')
    if series.smooth is not None:
        out.append(f'<path class="raw c{colour}" d="{_path(series, series.y, frame)}"/>')
        out.append(f'<path class="line c{colour}" d="{_path(series, series.smooth, frame)}"/>')
    else:
        out.append(f'<path class="line c{colour}" d="{_path(series, series.y, frame)}"/>')
    if panel.kind == "points" and len(series.x) <= 60:
        dots = [
            f'<circle class="dot c{colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.8"/>'
            for x, y in zip(series.x, series.y, strict=True)
            if math.isfinite(y)
        ]
        out += dots
    return out


def _bars(panel: Panel, frame: Frame) -> list[str]:
    x = panel.series[0].x
    gap = float(np.diff(x).min()) if len(x) > 1 else 1.0
    width = max(1.0, 0.9 * (frame.x(gap) - frame.x(0)))
    out, bottom = [], np.zeros(len(x))
    for colour, series in zip(panel.colours(), panel.series, strict=True):
        top = bottom + np.nan_to_num(series.y)
        rects = []
        for at, a, b in zip(x, bottom, top, strict=True):
            if b > a:
                left = frame.x(at) - width / 2
                rects.append(f"M{left:.1f} {frame.y(a):.1f}h{width:.1f}V{frame.y(b):.1f}h-{width:.1f}Z")
        out.append(f'<path class="bar c{colour}" d="{"".join(rects)}"/>')
        bottom = top
    return out


def _hits(panel: Panel, frame: Frame, history: History) -> list[str]:
    """Strips that show a line and the values under the pointer (plain CSS, no script)."""
    places = np.unique(np.concatenate([s.x[np.isfinite(s.y)] for s in panel.series]))
    if len(places) > MAX_HITS:
        places = places[np.linspace(0, len(places) - 1, MAX_HITS).round().astype(int)]
    centres = [frame.x(place) for place in places]
    out = []
    for i, (place, x) in enumerate(zip(places.tolist(), centres, strict=True)):
        left = (centres[i - 1] + x) / 2 if i else LEFT - 4
        right = (x + centres[i + 1]) / 2 if i + 1 < len(centres) else WIDTH
        box = f'<rect x="{left:.1f}" y="{TOP}" width="{max(0.5, right - left):.1f}" height="{HEIGHT - TOP}"/>'
        out.append(f'<g class="hit">{box}{_tip(panel, history, place, x)}</g>')
    return out


def _tip(panel: Panel, history: History, place: float, x: float) -> str:
    stage, step = history.where(round(place))
    rows: list[tuple[int, str]] = [(-1, f"{stage} {step}")]
    for colour, series in list(zip(panel.colours(), panel.series, strict=True))[:7]:
        finite = np.flatnonzero(np.isfinite(series.y))
        nearest = finite[np.argmin(np.abs(series.x[finite] - place))] if len(finite) else None
        if nearest is not None and (panel.kind != "points" or abs(series.x[nearest] - place) < 0.5):
            text = _number(panel, float(series.y[nearest]))
            if panel.kind == "points" and series.low is not None and series.high is not None:
                low, high = float(series.low[nearest]), float(series.high[nearest])
                if math.isfinite(low) and math.isfinite(high):
                    text += f" ({_number(panel, low)} to {_number(panel, high)})"
            name = f"{series.name[:24]} " if len(panel.series) > 1 else ""
            rows.append((colour, name + text))
    width = 12 + 6.1 * max(len(text) for _, text in rows)
    at = x + 8 if x + 8 + width < WIDTH else max(2.0, x - 8 - width)
    lines = "".join(
        f'<text class="{_class(i)}" x="{at + 6:.0f}" y="{TOP + 16 + 14 * n}">{esc(text)}</text>'
        for n, (i, text) in enumerate(rows)
    )
    size = f'width="{width:.0f}" height="{14 * len(rows) + 6}"'
    box = f'<rect class="box" x="{at:.0f}" y="{TOP + 3}" {size} rx="4"/>'
    return f'<g class="tip"><path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>{box}{lines}</g>'


def _class(i: int) -> str:
    return "tt" if i < 0 else f"c{i}"


def spark(values: Sequence[float]) -> str:
    """A small curve without axes."""
    y = np.asarray(values, np.float64)
    if len(y) < 2:
        return ""
    low, gap = y.min(), (y.max() - y.min()) or 1.0
    x = np.linspace(3, 117, len(y))
    points = "L".join(f"{a:.1f} {25 - 20 * (b - low) / gap:.1f}" for a, b in zip(x, y, strict=True))
    end = f'<circle class="dot c0" cx="117" cy="{25 - 20 * (y[-1] - low) / gap:.1f}" r="2.6"/>'
    line = f'<path class="line c0" d="M{points}"/>'
    return f'<svg class="spark" viewBox="0 0 120 30" aria-hidden="true">{line}{end}</svg>'
