"""Lines in a terminal or a log file: aligned, never too wide, and never a reason to stop a run."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from trivet.monitor.fields import STEP_FIELDS, Field, duration, guess_kind, write

LOG_WIDTH = 120
"""Columns of a line when the output is a file."""


class SafeFile:
    """A text stream whose reader may go away: after the first failed write it swallows everything.

    A closed terminal or `| head` must not end a training run.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file if file is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.broken = False

    def write(self, text: str) -> int:
        self._try(lambda: self._write(text))
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except UnicodeEncodeError:
            self._file.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        if self.broken:
            return
        try:
            action()
        except (OSError, ValueError):  # broken pipe, closed file, a terminal that went away
            self.broken = True
            self._detach()

    def _detach(self) -> None:
        """Point the descriptor at nothing, so that the interpreter's own last flush does not fail either."""
        if self._file is not sys.stdout and self._file is not sys.__stdout__:
            return
        try:
            descriptor = self._file.fileno()
        except (OSError, ValueError):  # closed, or not a real file: there is nothing to flush later
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)

    def isatty(self) -> bool:
        try:
            return self._file.isatty()
        except ValueError:
            return False

    @property
    def encoding(self) -> str:
        return getattr(self._file, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        return self._file.fileno()


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """A console on `file` (default: standard output); colour only in a terminal, none under NO_COLOR."""
    safe = SafeFile(file if file is not None else sys.stdout)
    if width is None and not safe.isatty():
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdigit() and int(columns) > 0 else LOG_WIDTH
    return Console(file=safe, width=width, highlight=False, soft_wrap=False)  # type: ignore[arg-type]


def marks(console: Console) -> dict[str, str]:
    """The few signs used beside text; plain ASCII where the encoding has no others."""
    if console.encoding.lower().replace("-", "").startswith("utf"):
        return {"up": "▲", "down": "▼", "arrow": "→", "warn": "⚠", "times": "×", "rule": "─", "dot": "·"}
    return {"up": "^", "down": "v", "arrow": "->", "warn": "!", "times": "x", "rule": "-", "dot": "-"}


class StepLine:
    """Formats the line of a step for one stage.

    Columns keep their place from line to line. What does not fit the width is left out, the least important
    first. ETA comes from the wall clock of the last 50 steps, evaluations included.
    """

    def __init__(
        self,
        stage: str,
        total: int | None,
        show: Sequence[str] = (),
        sign: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage, self.total, self._clock = stage, total, clock
        self._sign = sign or {"up": "▲", "down": "▼"}
        extra = [
            Field(key, key.removeprefix("eval/"), guess_kind(key), 6, rank=95 - i)
            for i, key in enumerate(show)
            if key not in {field.key for field in STEP_FIELDS}
        ]
        self._fields = [*STEP_FIELDS, *extra]
        self._seen: set[str] = set(show)
        self._widths = {field.key: field.width for field in self._fields}
        self._trend: dict[str, float] = {}
        self._times: deque[tuple[int, float]] = deque([(-1, clock())], maxlen=50)

    def format(self, step: int, metrics: Mapping[str, float | None], width: int) -> Text:
        """The line of `step`, at most `width` cells wide."""
        now = self._clock()
        before, since = self._times[-1]
        taken = metrics.get("time/step_s")
        taken = now - since if taken is None else taken
        if before < 0:  # the first line of this process: its start stands for the step before
            self._times[0] = (step - 1, since)
        self._times.append((step, now))
        count = f"{step:>{len(str(self.total))}}/{self.total}" if self.total else f"step {step:>5}"
        head = Text.assemble((self.stage, "bold cyan"), "  ", (count, "bold"))
        tail = [Text(f"{duration(taken):>5}", "dim")]
        if self.total:  # keeps its place even where there is nothing left to wait for
            left = self._eta(step)
            tail.append(Text("" if left is None else f"eta {duration(left)}", "dim"))
            tail[-1].pad_right(max(0, 10 - tail[-1].cell_len))
        columns = [(field, self._column(field, metrics)) for field in self._present(metrics)]
        room = width - head.cell_len - sum(2 + t.cell_len for t in tail)
        shown = _fit(columns, room)
        line = Text("  ").join([head, *shown, *tail])
        line.rstrip()
        line.truncate(width)
        return line

    def _present(self, metrics: Mapping[str, float | None]) -> list[Field]:
        for field in self._fields:
            value = metrics.get(field.key)
            if field.key in metrics and not (field.quiet and not value):
                self._seen.add(field.key)
        return [field for field in self._fields if field.key in self._seen]

    def _column(self, field: Field, metrics: Mapping[str, float | None]) -> Text:
        value = metrics.get(field.key)
        text = write(value, field.kind, field.decimals)
        self._widths[field.key] = max(self._widths[field.key], len(text))
        style = "" if value is not None or field.key not in metrics else "red"
        column = Text.assemble((field.label + " ", "dim"), (f"{text:>{self._widths[field.key]}}", style))
        if field.better:
            column.append(" ").append(*self._mark(field, value))
        return column

    def _mark(self, field: Field, value: float | None) -> tuple[str, str]:
        """An arrow when the value leaves the moving average of the last ten or so by a hundredth."""
        if value is None:
            return " ", ""
        mean = self._trend.get(field.key)
        self._trend[field.key] = value if mean is None else 0.9 * mean + 0.1 * value
        if mean is None or abs(value - mean) <= 0.01 * max(abs(mean), 0.1):
            return " ", ""
        up = value > mean
        return self._sign["up" if up else "down"], "green" if up == (field.better > 0) else "red"

    def _eta(self, step: int) -> float | None:
        if not self.total or step >= self.total:
            return None
        first, since = self._times[0]
        done = step - first
        return (self._times[-1][1] - since) / done * (self.total - step) if done > 0 else None


def _fit(columns: list[tuple[Field, Text]], room: int) -> list[Text]:
    """The columns that fit in `room` cells, two blanks before each, the least important left out."""
    kept = list(columns)
    while kept and sum(2 + text.cell_len for _, text in kept) > room:
        kept.remove(min(kept, key=lambda column: column[0].rank))
    return [text for _, text in kept]
