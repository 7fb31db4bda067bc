"""The curves as files: plots/*.svg and plots/*.png, drawn with matplotlib (imported when drawing)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from trivet.monitor.fields import tick_text, ticks
from trivet.monitor.panels import Panel, Series
from trivet.monitor.safe_text import printable

COLOURS = ("#2f6bd8", "#d9730d", "#0f8b8d", "#8a55d7", "#c9356e", "#6f7d00", "#8c6d5a", "#5f6b7a")
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3af",
    "axes.labelcolor": "#4b5563",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 18,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "trivet",
    "text.parse_math": False,
}


def draw_plots(panels: list[Panel], folder: Path) -> list[Path]:
    """Draw every panel as SVG and PNG into `folder`; the files. Plots that have no data now go."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        for panel in panels:
            figure = Figure(figsize=(7.2, 3.9), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            _draw(figure.add_subplot(), panel)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once for both files
            for suffix in ("svg", "png"):
                path = folder / f"{panel.id}.{suffix}"
                figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
    for old in folder.iterdir():
        if old.suffix in (".svg", ".png") and old not in written:
            old.unlink()
    return written


def _draw(axes: Any, panel: Panel) -> None:
    if panel.kind == "stack":
        _bars(axes, panel)
    else:
        for series, colour in zip(panel.series, panel.colours(), strict=True):
            _curve(axes, panel, series, COLOURS[colour])
    axes.set_title(_label(panel.title, 70), color="#111827")
    axes.set_xlabel("step")
    low, high = panel.limits()
    axes.set_ylim(low, high)
    places = ticks(low, high, 5)
    gap = places[1] - places[0] if len(places) > 1 else abs(places[0])
    axes.set_yticks(places, [tick_text(place, panel.unit, gap) for place in places])
    left, right = panel.ends()
    pad = 0.02 * (right - left)
    axes.set_xlim(left - pad, right + pad)
    steps = [place for place in ticks(0.0, right - panel.origin, 6) if float(place).is_integer()]
    steps = [place for place in steps if place + panel.origin >= left]
    axes.set_xticks([place + panel.origin for place in steps], [f"{place:.0f}" for place in steps])
    axes.grid(visible=False, axis="x")
    axes.tick_params(length=0)
    _stages(axes, panel)
    if len(panel.series) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.2)


def _label(text: str, limit: int = 28) -> str:
    """Text that fits a figure and that any font can draw."""
    text = printable(text)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.lstrip("_") or "-"  # a leading underscore would hide it from a legend


def _curve(axes: Any, panel: Panel, series: Series, colour: str) -> None:
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    if panel.kind == "points":
        axes.plot(
            series.x,
            series.y,
            color=colour,
            linewidth=1.8,
            marker="o",
            markersize=4,
            label=_label(series.name),
        )
        if series.low is not None and series.high is not None and len(series.x) == 1:
            gaps = np.abs(np.stack([series.y - series.low, series.high - series.y]))
            axes.errorbar(series.x, series.y, yerr=gaps, color=colour, capsize=3)
    elif series.smooth is not None:
        axes.plot(series.x, series.y, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(series.x, series.smooth, color=colour, linewidth=2.0, label=_label(series.name))
    else:
        marker = "o" if np.isfinite(series.y).sum() < 3 else None
        axes.plot(series.x, series.y, color=colour, linewidth=1.8, marker=marker, label=_label(series.name))


def _bars(axes: Any, panel: Panel) -> None:
    bottom = np.zeros(len(panel.series[0].x))
    x = panel.series[0].x
    width = 0.85 * float(np.diff(x).min()) if len(x) > 1 else 0.85
    for series, colour in zip(panel.series, panel.colours(), strict=True):
        axes.bar(x, series.y, width, bottom, color=COLOURS[colour], label=_label(series.name))
        bottom += series.y


def _stages(axes: Any, panel: Panel) -> None:
    """A line where a stage begins, its name above the frame."""
    left, right = panel.ends()
    for i, span in enumerate(panel.spans):
        if i:
            axes.axvline(span.start, color="#9aa3af", linewidth=0.9, linestyle=(0, (3, 3)))
        share = (max(span.stop, span.start + 1) - span.start) / (right - left)
        room = math.floor(share * 70)
        name = span.name if len(span.name) <= room else span.name[: max(0, room - 1)] + "…"
        if room >= 2:
            place = ("data", "axes fraction")
            offset = {"xytext": (3 if i else 0, 3), "textcoords": "offset points"}
            axes.annotate(
                _label(name), (span.start, 1.0), xycoords=place, color="#6b7280", fontsize=9, **offset
            )
