"""What screening took out, of which benchmark and of which source: counts that add up over workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trivet.data.screen.verdicts import Outcome, PassOutcome

_PHRASES_KEPT = 10_000  # of the most frequent matched phrases, once there are twice as many


@dataclass(slots=True)
class PassReport:
    """One pass.

    `fates`: documents by what became of them, by source. `pairs`: (fate, benchmark, source) -> pairs of a
    document and an item. `samples`: the same, each document once per benchmark. `unique`: (fate, source) ->
    each document once. `items`: (item, verdict) -> documents. `why`: reasons of borderline hits. `phrases`:
    matched phrases, as often as hits named them.
    """

    name: str
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    samples: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    items: Counter[tuple[str, str]] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    phrases: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: PassOutcome, source: str) -> None:
        self.fates[outcome.fate, source] += 1
        if not outcome.hits:
            return
        fate_of: dict[str, str] = {}  # item -> the worst that was said of it
        for hit, decision in zip(outcome.hits, outcome.decisions, strict=True):
            name, said = hit.item.item.name, decision or hit.verdict
            fate_of[name] = "drop" if "drop" in (said, fate_of.get(name)) else said
            self.why[hit.why or hit.verdict] += 1
            self.phrases.update(hit.matched)
        benchmarks: dict[str, str] = {}
        for hit in outcome.hits:
            benchmark, said = hit.item.item.benchmark, fate_of[hit.item.item.name]
            benchmarks[benchmark] = "drop" if "drop" in (said, benchmarks.get(benchmark)) else said
        for name, said in fate_of.items():
            self.items[name, said] += 1
        for benchmark, said in benchmarks.items():
            self.samples[said, benchmark, source] += 1
        for hit in {hit.item.item.name: hit for hit in outcome.hits}.values():
            self.pairs[fate_of[hit.item.item.name], hit.item.item.benchmark, source] += 1
        if len(self.phrases) > 2 * _PHRASES_KEPT:
            self.phrases = Counter(dict(self.phrases.most_common(_PHRASES_KEPT)))

    def merge(self, other: PassReport) -> None:
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))

    def total(self, fate: str) -> int:
        """Documents of this fate."""
        return sum(count for (said, _), count in self.fates.items() if said == fate)

    def rows(self) -> list[dict[str, Any]]:
        """Per benchmark and source: pairs and unique samples dropped, and borderline ones."""
        keys = sorted({(benchmark, source) for _, benchmark, source in self.pairs})
        return [
            {
                "pass": self.name,
                "benchmark": benchmark,
                "source": source,
                "dropped pairs": self.pairs["drop", benchmark, source],
                "dropped samples": self.samples["drop", benchmark, source],
                "borderline pairs": self.pairs["borderline", benchmark, source],
                "borderline samples": self.samples["borderline", benchmark, source],
            }
            for benchmark, source in keys
        ]

    def item_rows(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Items by the number of documents they hit, most first: an item on top with many is a formula of
        speech until somebody has looked."""
        names = {name for name, _ in self.items}
        rows = [
            {
                "item": name,
                "dropped": self.items[name, "drop"],
                "borderline": self.items[name, "borderline"],
                "kept by decision": self.items[name, "keep"],
            }
            for name in names
        ]
        rows.sort(key=lambda row: (-row["dropped"], -row["borderline"], row["item"]))
        return rows[:limit]

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name}
        for name in _COUNTERS:
            counter = getattr(self, name)
            out[name] = [[*(k if isinstance(k, tuple) else (k,)), n] for k, n in sorted(counter.items())]
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PassReport:
        report = cls(data["name"])
        for name in _COUNTERS:
            counter = getattr(report, name)
            for *key, count in data[name]:
                counter[key[0] if len(key) == 1 else tuple(key)] = count
        return report


_COUNTERS = ("fates", "pairs", "samples", "items", "why", "phrases")


@dataclass(slots=True)
class ScreenReport:
    """The whole chain. `fates`: (fate, source) -> documents, each once; `allowed`: reason -> documents that
    were let through unseen."""

    passes: dict[str, PassReport] = field(default_factory=dict)
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        source = outcome.document.source
        self.fates[outcome.fate, source] += 1
        if outcome.allowed is not None:
            self.allowed[outcome.allowed] += 1
        for one in outcome.passes:
            self._of(one.name).add(one, source)

    def _of(self, name: str) -> PassReport:
        if name not in self.passes:
            self.passes[name] = PassReport(name)
        return self.passes[name]

    def merge(self, other: ScreenReport) -> None:
        """Adds another worker's counts."""
        self.fates.update(other.fates)
        self.allowed.update(other.allowed)
        for name, report in other.passes.items():
            self._of(name).merge(report)

    def total(self, fate: str) -> int:
        return sum(count for (said, _), count in self.fates.items() if said == fate)

    def rows(self) -> list[dict[str, Any]]:
        """Removal counts of all passes."""
        return [row for report in self.passes.values() for row in report.rows()]

    def text(self) -> str:
        """The counts as Markdown."""
        seen = sum(self.fates.values())
        lines = [
            f"{seen} documents: {self.total('keep')} kept, {self.total('drop')} dropped, "
            f"{self.total('held')} held for review.",
            "",
            *markdown(
                [
                    {
                        "pass": report.name,
                        "seen": sum(report.fates.values()),
                        "dropped": report.total("drop"),
                        "held": report.total("held"),
                        "borderline, kept": report.total("keep"),
                    }
                    for report in self.passes.values()
                ]
            ),
        ]
        if rows := self.rows():
            lines += ["", *markdown(rows)]
        for report in self.passes.values():
            if rows := report.item_rows(10):
                lines += ["", f"Items hit most by {report.name}:", "", *markdown(rows)]
        lines += [f"{count} documents allowed: {reason}" for reason, count in sorted(self.allowed.items())]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        return {
            "passes": [report.to_dict() for report in self.passes.values()],
            "fates": [[*key, count] for key, count in sorted(self.fates.items())],
            "allowed": dict(sorted(self.allowed.items())),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ScreenReport:
        passes = [PassReport.from_dict(one) for one in data["passes"]]
        fates = Counter({(fate, source): count for fate, source, count in data["fates"]})
        return cls({report.name: report for report in passes}, fates, Counter(data["allowed"]))


def markdown(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Rows as lines of a Markdown table."""
    if not rows:
        return []
    lines = [tuple(rows[0]), tuple("---" for _ in rows[0]), *(tuple(row.values()) for row in rows)]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
