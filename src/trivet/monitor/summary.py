"""Evaluations in a line, and a run in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from trivet.monitor.fields import duration, guess_kind, write, write_metric
from trivet.monitor.files import RESERVED

Values = Mapping[str, Any]


def eval_metrics(record: Values) -> dict[str, dict[str, Any]]:
    """taskset -> metric -> value of one metrics record."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in record.items():
        parts = key.split("/", 2)
        if parts[0] == "eval" and len(parts) == 3:
            found.setdefault(parts[1], {})[parts[2]] = value
    return found


def first_evals(records: Sequence[Values]) -> dict[str, dict[str, Any]]:
    """The first evaluation of every taskset."""
    first: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, metrics in eval_metrics(record).items():
            first.setdefault(name, metrics)
    return first


def eval_histories(records: Sequence[Values]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """label -> (where, metrics) of each evaluation in order.

    A taskset is one label; the models a bench stage compares (`addition@sft`) are another, and `where` is
    the model's name.
    """
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for record in records:
        for name, metrics in eval_metrics(record).items():
            taskset, at, model = name.rpartition("@")
            label = f"{taskset}, models compared" if at else name
            found.setdefault(label, []).append(
                (model if at else f"{record['stage']} {record['step']}", metrics)
            )
    return found


def main_metric(metrics: Values) -> str | None:
    """What an evaluation is judged by: the pass@k of the smallest k, else reward, else loss."""
    passes = sorted((k for k in metrics if k.startswith("pass@") and "/" not in k), key=_k)
    for key in (*passes, "reward", "reward/mean", "loss"):
        if key in metrics:
            return key
    return next(iter(metrics), None)


def _k(name: str) -> int:
    number = name.removeprefix("pass@")
    return int(number) if number.isdigit() else 1 << 30


def interval(metrics: Values, key: str) -> tuple[float, float] | None:
    """The interval of a metric, from `<key>/low` and `<key>/high`."""
    low, high = metrics.get(f"{key}/low"), metrics.get(f"{key}/high")
    return None if low is None or high is None else (low, high)


def change(key: str, value: float | None, first: float | None) -> tuple[str, int]:
    """The difference to the first value as text (points for shares), and its sign for colour."""
    if value is None or first is None:
        return "", 0
    gap = value - first
    text = f"{100 * gap:+.1f}" if guess_kind(key) == "percent" else f"{gap:+.3g}"
    sign = (gap > 0) - (gap < 0)
    return text, -sign if key.endswith("loss") else sign


def eval_line(
    stage: str, step: int, name: str, metrics: Values, first: Values, sign: Mapping[str, str], width: int
) -> Text:
    """`rl  eval 20  addition  pass@1 61.2% (58.0% to 64.1%)  ▲ +12.3 since start  pass@4 80.1%`.

    At most `width` cells: further metrics are shown where there is room.
    """
    line = Text.assemble((stage, "bold cyan"), "  ", (f"eval {step}", "bold"), "  ", (name, "bold magenta"))
    main = main_metric(metrics)
    if main is None:
        return line
    line.append(f"  {main} ", "dim").append(write_eval(main, metrics.get(main)), "bold")
    bounds = interval(metrics, main)
    if bounds:
        line.append(f" ({write_eval(main, bounds[0])} to {write_eval(main, bounds[1])})", "dim")
    if first is not metrics:
        text, better = change(main, metrics.get(main), first.get(main))
        if text and better:
            rose = not text.startswith("-")
            line.append(f"  {sign['up' if rose else 'down']} {text}", "green" if better > 0 else "red")
            line.append(" since start", "dim")
    for key, value in metrics.items():
        dull = key == "tasks" or (key in ("unscored", "truncated") and not value)
        if key != main and not dull and not key.endswith(("/low", "/high")):
            extra = Text.assemble((f"  {key} ", "dim"), write_eval(key, value))
            if line.cell_len + extra.cell_len <= width:
                line.append_text(extra)
    line.truncate(width)
    return line


def write_eval(key: str, value: float | None) -> str:
    """A metric of an evaluation; shares with one decimal."""
    if value is not None and guess_kind(key) == "percent":
        return f"{100 * value:.1f}%"
    return write(value, "number", 1) if key == "length" else write_metric(key, value)


def last_steps(records: Sequence[Values]) -> dict[str, int]:
    """stage -> its last training step; 0 for one that only evaluates."""
    steps: dict[str, int] = {}
    for record in records:
        trained = any(not key.startswith("eval/") and key not in RESERVED for key in record)
        steps[record["stage"]] = max(steps.get(record["stage"], 0), record["step"] if trained else 0)
    return steps


def run_seconds(run: Values) -> float:
    """Seconds that all sessions of a run took."""
    return sum(max(0.0, s.get("end", 0.0) - s.get("start", 0.0)) for s in run.get("sessions", []))


def summary_rows(
    records: Sequence[Values], run: Values, seconds: Mapping[str, float]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the final table: stages (and the `seconds` each took), evaluations, the run."""
    rows = []
    for stage, step in last_steps(records).items():
        own = [r for r in records if r["stage"] == stage]
        took = duration(seconds.get(stage, 0.0))
        rows.append(
            [f"{stage} ({step} steps, {took})" if step else f"{stage} ({took})", *_first_and_last(own)]
        )
    for label, history in eval_histories(records).items():
        before, after = history[0][1], history[-1][1]
        key = main_metric(before)
        if key is not None:
            old, new = before.get(key), after.get(key)
            row = [f"eval {label}", key, write_eval(key, old), write_eval(key, new), change(key, new, old)[0]]
            rows.append(row)
    if run.get("sessions"):
        rows.append(["whole run", "time", "", duration(run_seconds(run)), ""])
    return ["", "metric", "before", "after", "change"], rows


def _first_and_last(records: Sequence[Values]) -> list[str]:
    """Metric, first value, last value and change of a stage's reward, or else of its loss."""
    for key, name in (("reward/mean", "reward"), ("train/loss", "loss")):
        values = [r[key] for r in records if r.get(key) is not None]
        if values:
            ends = [write_metric(key, values[0]), write_metric(key, values[-1])]
            return [name, *ends, change(key, values[-1], values[0])[0]]
    return ["", "", "", ""]
