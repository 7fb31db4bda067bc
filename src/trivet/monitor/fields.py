"""What a person is shown of a step, and how numbers are written for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trivet.monitor.glossary import describe

Kind = Literal["number", "count", "percent", "seconds", "rate"]


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the line of a step.

    `rank`: the lowest goes first when the line is too narrow for all. `better`: +1 when more is better, -1
    when less is; such columns carry a trend mark. `quiet`: shown only once it was other than 0.
    """

    key: str
    label: str
    kind: Kind
    width: int
    rank: int
    decimals: int = 3
    better: int = 0
    quiet: bool = False


STEP_FIELDS: tuple[Field, ...] = (
    Field("reward/mean", "reward", "number", 5, rank=100, better=1),
    Field("reward/solved", "solved", "percent", 4, rank=80),
    Field("rollout/length_mean", "length", "number", 5, rank=70, decimals=1),
    Field("train/loss", "loss", "number", 7, rank=90, decimals=4),
    Field("train/accuracy", "accuracy", "percent", 4, rank=65),
    Field("train/margin", "margin", "number", 6, rank=64),
    Field("train/kl", "kl", "number", 6, rank=60, decimals=4),
    Field("train/entropy", "entropy", "number", 5, rank=50, decimals=2),
    Field("train/grad_norm", "gradient", "number", 5, rank=40, decimals=2),
    Field("engine/tokens_per_s", "tok/s", "rate", 5, rank=30),
    Field("rollout/truncated", "cut off", "percent", 4, rank=58, quiet=True),
    Field("reward/unscored", "unscored", "percent", 4, rank=85, quiet=True),
    Field("buffer/lag", "lag", "number", 3, rank=55, decimals=1, quiet=True),
    Field("explorer/filtered", "filtered", "count", 3, rank=54, quiet=True),
    Field("explorer/failed", "failed", "count", 3, rank=56, quiet=True),
    Field("train/skipped", "skipped", "count", 2, rank=86, quiet=True),
)
"""In the order of the line. Duration and ETA follow."""


def write(value: float | None, kind: Kind, decimals: int = 3) -> str:
    """A number as text of the given kind; a dash for None."""
    if value is None:
        return "-"
    match kind:
        case "percent":
            share = 100 * value
            return f"{share:.1f}%" if 0 < abs(share) < 9.95 else f"{share:.0f}%"
        case "seconds":
            return duration(value)
        case "rate" | "count":
            return compact(value)
    return plain(value, decimals)


def plain(value: float, decimals: int = 3) -> str:
    """Fixed decimals where that says something, else a power of ten: 0.620, -0.0123, 3.1e-06, 1.2e+07."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 0.5 * 10**-decimals:
        return f"{value:.1e}"
    whole = len(str(int(size)))
    return f"{value:.{max(0, min(decimals, max(decimals + 1, 3) - whole))}f}"


_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def compact(value: float) -> str:
    """Large counts with a letter: 950, 12.3k, 4.5M."""
    for letter, unit in _UNITS:
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.0f}{letter}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{letter}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """0.42s, 1.8s, 45s, 5m12s, 2h05m, 3d04h."""
    seconds = max(0.0, seconds)
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.995:
        return f"{seconds:.2f}s"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def ticks(low: float, high: float, n: int = 4) -> list[float]:
    """Round values within [low, high], about `n` of them, at equal distances."""
    raw = (high - low) / n
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, kind: Kind, step: float) -> str:
    """A tick's label: as many digits as the distance of ticks needs, so that no two read the same."""
    if value == 0:
        return "0%" if kind == "percent" else "0"
    if kind == "seconds" and abs(value) >= 100 and step >= 1:
        return duration(value)
    if kind in ("rate", "count"):
        letter, unit = next(((a, u) for a, u in _UNITS if abs(value) >= u), ("", 1.0))
        return f"{value / unit:.{max(0, -_last_digit(step / unit))}f}{letter}"
    scale, sign = {"percent": (100.0, "%"), "seconds": (1.0, "s")}.get(kind, (1.0, ""))
    value, step = value * scale, abs(step * scale) or abs(value * scale)
    last = _last_digit(step)
    if step < 1e-3 or abs(value) >= 1e5:
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - last)
        mantissa, power = f"{value:.{digits}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(power)}{sign}"
    return f"{value:.{max(0, -last)}f}{sign}"


def _last_digit(step: float) -> int:
    """The power of ten of the last digit that multiples of `step` have: 0.25 -> -2, 20 -> 1."""
    power = math.floor(math.log10(step) + 1e-9)
    lead = step / 10.0**power
    return power - (abs(lead - round(lead)) > 1e-6)


def guess_kind(key: str) -> Kind:
    """How a metric that has no Field is written: from its unit, or where none is known from its name."""
    known = describe(key)
    if known is not None and known.unit in _KIND_OF:
        return _KIND_OF[known.unit]
    last = key.rsplit("/", 1)[-1]
    if key.startswith("time/"):
        return "seconds"
    if last.endswith("_per_s"):
        return "rate"
    if key.endswith("/short"):
        return "count"
    if "pass@" in key or last in _SHARES or key.startswith("rollout/ended/"):
        return "percent"
    return "number"


_KIND_OF: dict[str, Kind] = {"share": "percent", "seconds": "seconds", "tokens a second": "rate"}
_SHARES = {"solved", "truncated", "unscored", "accuracy", "all_solved", "none_solved", "all_equal", "clipped"}
FIELD_OF = {field.key: field for field in STEP_FIELDS}


def write_metric(key: str, value: float | None) -> str:
    """A metric's value as text, by what its name says it is."""
    field = FIELD_OF.get(key)
    if field:
        return write(value, field.kind, field.decimals)
    return write(value, guess_kind(key))
