"""What became of the rows of every source: counts that add up over workers, and some of what was dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHOWN = 5  # places and texts kept of each cause
_TEXT = 300


@dataclass(slots=True)
class SourceTally:
    """One source. `rows` read, of which `bad` are none (cause -> rows); `examples` they gave; `dropped` rows
    and examples by cause; what was `done` (repairs, splits) by name, `warnings`, the `formats` of its files;
    `seen`: some places of each cause of `bad` and `dropped`, with what was said."""

    rows: int = 0
    examples: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    seen: dict[str, list[list[str]]] = field(default_factory=dict)

    def note(self, cause: str, place: str, text: str) -> None:
        """Keep the first few of a cause."""
        kept = self.seen.setdefault(cause, [])
        if len(kept) < SHOWN:
            kept.append([place, text.removeprefix(f"{place}: ")[:_TEXT]])

    def add(self, other: SourceTally) -> None:
        self.rows += other.rows
        self.examples += other.examples
        for name in ("bad", "dropped", "done", "warnings", "formats"):
            getattr(self, name).update(getattr(other, name))
        for cause, places in other.seen.items():
            kept = self.seen.setdefault(cause, [])
            kept += places[: SHOWN - len(kept)]

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"rows": self.rows, "examples": self.examples}
        for name in ("bad", "dropped", "done", "warnings", "formats"):
            out[name] = dict(sorted(getattr(self, name).items()))
        return out | {"seen": dict(sorted(self.seen.items()))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SourceTally:
        counters = {n: Counter(data[n]) for n in ("bad", "dropped", "done", "warnings", "formats")}
        return cls(data["rows"], data["examples"], **counters, seen=dict(data["seen"]))


Tally = dict[str, SourceTally]
"""By the source's label."""


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum, sources in the order in which they first appear."""
    out: Tally = {}
    for tally in tallies:
        for label, one in tally.items():
            out.setdefault(label, SourceTally()).add(one)
    return out
