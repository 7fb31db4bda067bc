"""The files of a run folder that the monitor keeps, and how they survive a crash.

`metrics.jsonl` and `events.jsonl` are appended line by line and flushed, so that a kill leaves at most a
partial last line. Everything else is small JSON, replaced atomically.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESERVED = ("stage", "step", "time", "warnings")
"""Keys of a metrics line that no metric may use."""


class MonitorError(ValueError):
    """The monitor was asked for something it cannot do; the message says what to do."""


class DamagedLine(UserWarning):
    """A line of a JSONL file is not an object (a crash cut it) and was left out."""


def number(value: Any) -> int | float | None:
    """A finite Python number from a Python, numpy or torch scalar; None where there is none.

    None stands for NaN, an infinity, an integer beyond what a float holds, and things that are no number.
    """
    if hasattr(value, "item") and not isinstance(value, int | float):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):  # more than one element
            return None
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int | float):
        return None
    try:
        finite = abs(float(value)) < float("inf")  # False for NaN too
    except OverflowError:
        return None
    return value if finite else None


def clean(metrics: Mapping[str, Any]) -> tuple[dict[str, int | float | None], list[str]]:
    """Metrics as JSON-able numbers, and the keys that had to become null."""
    out: dict[str, int | float | None] = {}
    for key, value in metrics.items():
        if not isinstance(key, str) or not key or key in RESERVED:
            raise MonitorError(
                f"metric name {key!r} cannot be used: names are text such as train/loss, "
                f"and {', '.join(RESERVED)} belong to the line itself"
            )
        out[key] = number(value)
    return out, [key for key, value in out.items() if value is None]


class JsonLines:
    """An append-only file of JSON objects. Opened on the first write, which repairs a cut last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and flush it. Raises OSError when the disk is full or the folder is gone."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":"))
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _end_with_newline(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line + "\n")
        self._file.flush()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite the file with only the lines that are `wanted`, atomically; how many were dropped."""
        self.close()
        records = read_lines(self.path)
        kept = [record for record in records if wanted(record)]
        if len(kept) < len(records):
            lines = [json.dumps(r, allow_nan=False, separators=(",", ":")) + "\n" for r in kept]
            write_text(self.path, "".join(lines))
        return len(records) - len(kept)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_with_newline(path: Path) -> None:
    """Cut a partial last line off (a crash left it), so that the next line starts on its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        data = path.read_bytes()
        start = data.rfind(b"\n") + 1
        if _parse(data[start:]) is None:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSONL file ([] without one); damaged lines are left out with a DamagedLine warning."""
    if not path.exists():
        return []
    records = []
    for count, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None:
            text = f"{path}, line {count}: not a JSON object (cut by a crash?); left out"
            warnings.warn(text, DamagedLine, stacklevel=3)
        else:
            records.append(record)
    return records


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run, one dict a step, in the order they were first written.

    Lines of one stage and step (a training step and the evaluations after it) are merged; a later line
    wins, and null counts are added up. Keys: `stage`, `step`, `time` (seconds since the epoch, of the last
    line), metric names; `warnings` where values were not finite. [] when the folder has no metrics.
    """
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for record in read_lines(Path(run_dir) / "metrics.jsonl"):
        kinds = {"stage": str, "step": int, "time": int | float}
        if not all(isinstance(record.get(key), kind) for key, kind in kinds.items()):
            text = f"a metrics line without stage, step and time was left out: {str(record)[:200]}"
            warnings.warn(text, DamagedLine, stacklevel=2)
            continue
        old = merged.setdefault((record["stage"], record["step"]), {})
        bad = old.get("warnings", 0) + record.get("warnings", 0)
        old.update(record)
        if bad:
            old["warnings"] = bad
    return list(merged.values())


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old or the new content, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, default: Any) -> Any:
    """What a JSON file holds; `default` when it is absent or damaged (with a DamagedLine warning)."""
    if not path.exists():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        warnings.warn(f"{path} is damaged ({error}); left out", DamagedLine, stacklevel=2)
        return default
    return value if isinstance(value, type(default)) else default


def stage_order(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Stage names in the order in which they first appear."""
    return list(dict.fromkeys(record["stage"] for record in records if isinstance(record.get("stage"), str)))
