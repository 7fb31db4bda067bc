"""Progress of what takes longer than two seconds: a bar in a terminal, sparse lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import Task as BarTask
from rich.text import Text

from trivet.monitor.fields import duration

SHOW_AFTER_S = 2.0
FIRST_GAP_S, LAST_GAP_S = 10.0, 60.0
"""Between plain progress lines; the gap doubles from the first to the last."""


class _Left(ProgressColumn):
    """Time spent and, once something is done, time left."""

    def render(self, task: BarTask) -> Text:
        text = duration(task.elapsed or 0.0)
        if task.time_remaining:
            text += f"  eta {duration(task.time_remaining)}"
        return Text(text, "dim")


class Bar:
    """One piece of work under way: a context manager with `advance`."""

    def __init__(self, board: Board, description: str, total: int | None) -> None:
        self._board = board
        self.description, self.total, self.done = description, total, 0
        self.started = board.clock()
        self.task: TaskID | None = None

    def advance(self, n: int = 1) -> None:
        """`n` more are done. Thread-safe."""
        self._board.advance(self, n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away; may be called twice."""
        self._board.remove(self)

    def line(self, now: float) -> str:
        """The plain form: `sampling 120/512  23%  4.1s  eta 13s`."""
        spent = now - self.started
        if self.total is None:
            return f"{self.description}  {self.done} done  {duration(spent)}"
        share = self.done / self.total if self.total else 1.0
        text = f"{self.description}  {self.done}/{self.total}  {share:.0%}  {duration(spent)}"
        if 0 < share < 1:
            text += f"  eta {duration(spent * (1 - share) / share)}"
        return text


class Board:
    """All bars of one console. A thread looks at them twice a second while there are any."""

    def __init__(
        self, console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.quiet, self.clock = console, quiet, clock
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._bars: list[Bar] = []
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._ticker: threading.Thread | None = None
        self._wake = threading.Event()
        self._last_line, self._gap = float("-inf"), FIRST_GAP_S

    def add(self, description: str, total: int | None) -> Bar:
        bar = Bar(self, description, total)
        if not self.quiet:
            with self._lock:
                self._bars.append(bar)
                if self._ticker is None:
                    self._wake = threading.Event()  # its own: the thread before may still be ending
                    self._ticker = threading.Thread(
                        target=self._tick, args=(self._wake,), name="trivet-progress", daemon=True
                    )
                    self._ticker.start()
        return bar

    def advance(self, bar: Bar, n: int) -> None:
        with self._lock:
            bar.done += n
            if bar.task is not None and self._progress is not None:
                self._progress.update(bar.task, completed=bar.done)

    def remove(self, bar: Bar) -> None:
        with self._lock:
            if bar not in self._bars:
                return
            self._bars.remove(bar)
            if self._progress is not None and bar.task is not None:
                self._progress.remove_task(bar.task)
            if not self._bars:
                self._stop()

    def close(self) -> None:
        with self._lock:
            self._bars.clear()
            self._stop()

    def look(self) -> None:
        """Show what has been under way for long enough."""
        with self._lock:
            now = self.clock()
            due = [bar for bar in self._bars if now - bar.started >= SHOW_AFTER_S]
            if self._live:
                for bar in due:
                    self._show(bar, now)
                return
            due = [bar for bar in due if bar.total is None or bar.done < bar.total]
            if due and now - self._last_line >= self._gap:
                if self._last_line > float("-inf"):
                    self._gap = min(2 * self._gap, LAST_GAP_S)
                self._last_line = now
                self.console.print(Text(due[-1].line(now)), no_wrap=True, overflow="ellipsis", crop=True)

    def _show(self, bar: Bar, now: float) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
                MofNCompleteColumn(),
                _Left(),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._progress.start()
        if bar.task is None:
            bar.task = self._progress.add_task(bar.description, total=bar.total, completed=bar.done)
            task = self._progress.tasks[-1]
            task.start_time = self._progress.get_time() - (now - bar.started)

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            self.look()

    def _stop(self) -> None:
        self._wake.set()
        self._ticker = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
