"""The monitor: one object a run writes to, for people and for files. Nothing here imports torch.

It keeps in the run folder: `metrics.jsonl` (a line a step), `events.jsonl` (stages, warnings, notes),
`run.json` (sessions, machine, versions), `tables.json`, `samples/`, `plots/` and `report.html`.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trivet.monitor.facts import machine, versions
from trivet.monitor.fields import duration
from trivet.monitor.files import (
    JsonLines,
    MonitorError,
    clean,
    read_json,
    read_metrics,
    stage_order,
    write_json,
)
from trivet.monitor.notices import Notices
from trivet.monitor.page import report
from trivet.monitor.progress import Bar, Board
from trivet.monitor.run_folder import RunFolder
from trivet.monitor.safe_text import printable
from trivet.monitor.samples import SamplePages
from trivet.monitor.summary import eval_line, first_evals, summary_rows
from trivet.monitor.terminal import StepLine, make_console, marks
from trivet.types import Rollout

if TYPE_CHECKING:
    from trivet.monitor.tensorboard import Board as TensorBoard


class StageHandle:
    """What `Monitor.stage` returns: used as a context manager it also writes the stage's end."""

    def __init__(self, monitor: Monitor, name: str) -> None:
        self._monitor, self.name = monitor, name
        self._since = time.monotonic()

    def __enter__(self) -> StageHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("" if kind is None else f"{kind.__name__}: {error}")

    def end(self, error: str = "") -> None:
        """The stage is over (`error`: why it ended before its time)."""
        self._monitor._end_stage(self.name, time.monotonic() - self._since, error)


class Monitor:
    """Metrics, samples, progress, warnings, tables and the report of one run.

    `samples_every`: steps between stored sample pages (0: never); `samples`: rollouts a page; `show`: further
    metrics in the line of a step; `quiet`: print warnings only (files are written all the same); `console`:
    a rich console to print to (default: standard output). Thread-safe.
    Raises MonitorError when `tensorboard` is asked for and not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        samples_every: int = 20,
        samples: int = 4,
        tensorboard: bool = False,
        plots: bool = True,
        show: Sequence[str] = (),
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics_path = self.run_dir / "metrics.jsonl"
        self.console = console if console is not None else make_console()
        self.quiet, self.plots, self._show = quiet, plots, tuple(show)
        self._lock = threading.RLock()
        self._metrics = JsonLines(self.metrics_path)
        self._events = JsonLines(self.run_dir / "events.jsonl")
        self._notices = Notices()
        self._board = Board(self.console, quiet=quiet)
        self._pages = SamplePages(self.run_dir / "samples", every=samples_every, size=samples)
        self._marks = marks(self.console)
        self._stage, self._step = "", 0
        self._line: StepLine | None = None
        self._logged = self._closed = False
        self._tensorboard: TensorBoard | None = None
        if tensorboard:
            from trivet.monitor.tensorboard import Board as TensorBoard

            self._tensorboard = TensorBoard(self.run_dir / "tensorboard")
        self._evals = first_evals(read_metrics(self.run_dir))
        self._session = {"start": time.time(), "end": time.time()}
        self._save_run(versions=versions())
        self.about(**machine())

    # -- what the run says ------------------------------------------------------------------------

    def about(self, *, name: str = "", **facts: Any) -> None:
        """For the report's header: the run's name, and facts beside the processor, cores and memory (which
        the monitor finds itself): `device="cpu"`, `threads=2`, `parameters="1.1M"` ..."""
        with self._lock:
            known = read_json(self.run_dir / "run.json", {}).get("machine", {})
            self._save_run(name=name, machine=known | facts)

    def stage(
        self, name: str, *, what: str = "", source: str = "", until: str = "", steps: int | None = None
    ) -> StageHandle:
        """Everything logged from here on belongs to stage `name`; prints its header.

        `what` it does, `source`: from which checkpoint, `until` when, in words for a person; `steps`: the
        number of steps when known (for ETA). The handle may be used as a context manager.
        """
        with self._lock:
            self._stage, self._step = name, 0
            self._line = StepLine(name, steps, self._show, self._marks)
            until = until or (f"{steps} steps" if steps else "")
            self._event("stage", text=what, source=source, until=until, steps=steps)
            parts = [what, f"from {source}" if source else "", f"until {until}" if until else ""]
            said = f" {self._marks['dot']} ".join(part for part in parts if part)
            rule = Rule(Text(name, "bold cyan"), align="left", characters=self._marks["rule"], style="dim")
            self._print(rule)
            if said:
                self._print(Text(printable(said)))
        return StageHandle(self, name)

    def log(self, step: int, metrics: Mapping[str, Any], line: bool = True) -> None:
        """One step's metrics: a line in metrics.jsonl and, with `line`, one for the person.

        Values are numbers (Python, numpy or torch scalars); what is not finite becomes null and a warning.
        Raises MonitorError on names that are not text or are reserved, and before `stage`.
        """
        with self._lock:
            values = self._write(step, metrics)
            if line and self._line is not None:
                self._print(self._line.format(self._step, values, self.console.width))

    def eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        """An evaluation on taskset `name` after `step` (0: before training).

        Written as `eval/<name>/<metric>`; bounds of an interval as `pass@1/low` and `pass@1/high`.
        """
        if not name or "/" in name:
            raise MonitorError(
                f"taskset name {name!r} must be text without a slash: it is part of a metric's name"
            )
        with self._lock:
            prefix = f"eval/{name}/"
            values = self._write(step, {f"{prefix}{key}": value for key, value in metrics.items()})
            own = {key.removeprefix(prefix): value for key, value in values.items()}
            first = self._evals.setdefault(name, own)
            width = self.console.width
            self._print(eval_line(self._stage, self._step, name, own, first, self._marks, width))

    def progress(self, description: str, total: int | None) -> Bar:
        """A bar (use it as a context manager), seen once the work has taken two seconds."""
        return self._board.add(printable(description), total)

    def warn(self, cause: str, text: str) -> None:
        """Something a person should know. The first of a cause is printed; repeats are counted and folded."""
        with self._lock:
            told = self._notices.add(cause, text)
            if told is not None:
                self._tell(cause, told)

    def info(self, text: str) -> None:
        """A line for the person."""
        with self._lock:
            self._event("info", text=text)
            self._print(Text(printable(text)))

    def samples(self, step: int, rollouts: Sequence[Rollout], *, force: bool = False) -> list[Path]:
        """Store a page of rollouts when one is due at `step`; the Markdown files written.

        Training rollouts: at every `samples_every`-th step (and the stage's first); those of role `eval`:
        always. `force` stores in any case. Each page has a JSONL twin.
        """
        with self._lock:
            return self._pages.write(self._need_stage(), operator.index(step), rollouts, force=force)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table and keep it for the report; one of the same title replaces the earlier."""
        cells = [[_cell(value) for value in row] for row in rows]
        if any(len(row) != len(columns) for row in cells):
            raise MonitorError(f"table {title!r}: every row must have {len(columns)} cells, one a column")
        with self._lock:
            path = self.run_dir / "tables.json"
            entry = {"title": title, "columns": list(columns), "rows": cells}
            entry |= {"stage": self._stage, "step": self._step, "time": time.time()}
            kept = [table for table in read_json(path, []) if table.get("title") != title]
            write_json(path, [*kept, entry])
            self._print(_rich_table(title, columns, cells))

    def rewind(self, stage: str, step: int) -> int:
        """A run resumes from the checkpoint of `step` (-1: from nothing): drop what was written after it.

        Takes metrics lines, sample pages and tables of `stage` after `step` and of all later stages; how
        many metrics lines went. Each file is replaced atomically.
        """
        with self._lock:
            order = stage_order(read_metrics(self.run_dir))
            later = set(order[order.index(stage) + 1 :]) if stage in order else set()

            def stays(record: Mapping[str, Any]) -> bool:
                at = record.get("stage")
                return at not in later and not (at == stage and record.get("step", 0) > step)

            dropped = self._metrics.keep(stays)
            path = self.run_dir / "tables.json"
            tables = read_json(path, [])
            if not all(map(stays, tables)):
                write_json(path, list(filter(stays, tables)))
            self._pages.rewind(stays)
            self._evals = first_evals(read_metrics(self.run_dir))
            if self._tensorboard is not None:
                self._tensorboard.rewind(stage, step, later)
            if dropped:
                self._event("rewind", text=f"resumed after step {max(0, step)}", at=stage, to=step)
        return dropped

    def report(self) -> Path:
        """Write plots/ and report.html from what the run folder holds now; the report's path."""
        with self._lock:
            self._flush_warnings()
            self._save_run()
        return report(self.run_dir, plots=self.plots)

    def close(self) -> None:
        """The run is over: remaining warnings, a final table, files closed. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._board.close()
            self._flush_warnings()
            self._save_run()
            if self._logged and not self.quiet:
                folder = RunFolder.read(self.run_dir)
                seconds = {stage.name: stage.seconds for stage in folder.stages()}
                columns, rows = summary_rows(folder.records, folder.run, seconds)
                self._print(_rich_table("Summary", columns, rows))
            self._metrics.close()
            self._events.close()
            if self._tensorboard is not None:
                self._tensorboard.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- within -----------------------------------------------------------------------------------

    def _need_stage(self) -> str:
        if not self._stage:
            raise MonitorError("no stage yet: call monitor.stage(name) before logging to it")
        return self._stage

    def _write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, int | float | None]:
        stage, step = self._need_stage(), operator.index(step)
        if step < 0:
            raise MonitorError(f"step {step} of stage {stage}: steps start at 0")
        values, bad = clean(metrics)
        record = {"stage": stage, "step": step, "time": round(time.time(), 3), **values}
        if bad:
            record["warnings"] = len(bad)
            self.warn("not finite", f"{', '.join(bad)} at step {step} of {stage}: stored as null")
        self._metrics.append(record)
        self._step, self._logged = step, True
        if self._tensorboard is not None:
            self._tensorboard.write(stage, step, values)
        return values

    def _end_stage(self, name: str, seconds: float, error: str) -> None:
        with self._lock:
            self._event("end", text=error, seconds=round(seconds, 3))
            took = f"{name}: step {self._step} after {duration(seconds)}"
            self._print(Text(took, "dim"))
            if error:
                self._print(Text(printable(f"{name} ended early: {error}"), "red"))

    def _tell(self, cause: str, text: str) -> None:
        self._event("warning", cause=cause, text=text, count=self._notices.counts()[cause])
        line = Text.assemble((f"{self._marks['warn']} {printable(cause)}: ", "bold yellow"), printable(text))
        self._print(line, warning=True)

    def _flush_warnings(self) -> None:
        for cause, text in self._notices.rest():
            self._tell(cause, text)

    def _event(self, kind: str, **values: Any) -> None:
        record = {"time": round(time.time(), 3), "kind": kind, "stage": self._stage, "step": self._step}
        self._events.append(record | values)

    def _save_run(self, **facts: Any) -> None:
        """Merge `facts` into run.json and bring this session's end up to date."""
        with self._lock:
            path = self.run_dir / "run.json"
            run: dict[str, Any] = read_json(path, {})
            start = self._session["start"]
            self._session["end"] = time.time()
            sessions = [s for s in run.get("sessions", []) if s.get("start") != start]
            run |= {key: value for key, value in facts.items() if value}
            run["sessions"] = [*sessions, dict(self._session)]
            write_json(path, run)

    def _print(self, what: RenderableType, *, warning: bool = False) -> None:
        if not self.quiet or warning:
            self.console.print(what)


def _cell(value: Any) -> str | int | float | None:
    if value is None or isinstance(value, str):
        return value
    values, bad = clean({"cell": value})
    return str(value) if bad else values["cell"]


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(
        title=Text(printable(title), "bold"),
        title_justify="left",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for i, column in enumerate(columns):
        numeric = all(isinstance(row[i], int | float) or row[i] in (None, "") for row in rows)
        table.add_column(Text(printable(column)), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(
            *(Text("" if v is None else printable(f"{v:g}" if isinstance(v, float) else str(v))) for v in row)
        )
    return table
