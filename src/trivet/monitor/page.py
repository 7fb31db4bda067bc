"""report.html and plots/: what a run came to, from what its folder holds. Works on any run, at any time."""

from __future__ import annotations

import time
import warnings
from importlib import resources
from pathlib import Path

from trivet.monitor import sections
from trivet.monitor.files import write_text
from trivet.monitor.panels import History, Panel, panels
from trivet.monitor.run_folder import RunFolder
from trivet.monitor.safe_text import esc

# No script, no request, nothing from elsewhere: what a model wrote stays text even if escaping had a hole.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def report(run_dir: str | Path, *, plots: bool = True) -> Path:
    """Write `report.html` (one file, nothing external) and, with `plots`, `plots/*.svg` and `.png`.

    Returns the report's path. Raises MonitorError when `run_dir` is no run folder. Without matplotlib the
    plots are left out with a warning.
    """
    folder = RunFolder.read(Path(run_dir))
    history = History(folder.records) if folder.records else None
    shown = panels(history) if history is not None else []
    if plots and shown:
        _plots(shown, folder.path / "plots")
    path = folder.path / "report.html"
    write_text(path, page(folder, history, shown))
    return path


def _plots(shown: list[Panel], folder: Path) -> None:
    try:
        from trivet.monitor.plots import draw_plots

        draw_plots(shown, folder)
    except ImportError as error:
        warnings.warn(f"no plots were drawn: matplotlib cannot be imported ({error})", stacklevel=3)


def page(folder: RunFolder, history: History | None, shown: list[Panel]) -> str:
    """The whole page as text."""
    parts = [
        sections.results(folder),
        sections.curves(history, shown),
        sections.tables(folder),
        sections.stages(folder),
        sections.samples(folder),
        sections.warnings(folder),
        sections.recipe(folder),
        sections.environment(folder),
    ]
    names = ("Results", "Curves", "Tables", "Stages", "Samples", "Warnings", "Recipe", "Environment")
    links = "".join(
        f'<a href="#{name.lower()}">{name}</a>' for name, part in zip(names, parts, strict=True) if part
    )
    style = resources.files("trivet.monitor").joinpath("report.css").read_text(encoding="utf-8")
    written = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()).lstrip("0")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{esc(folder.name)} · trivet</title><style>{style}</style></head>\n<body><main>\n"
        f"<header>{sections.header(folder)}<nav>{links}</nav></header>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>Written by trivet, {written}.</footer></main></body></html>\n"
    )
