"""Passes one after the other: what one drops, the next does not see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trivet.data.record import Drop, Record
from trivet.data.screen.allow import Allow
from trivet.data.screen.documents import Batch, Document, document_of_record
from trivet.data.screen.ngrams import NgramPass
from trivet.data.screen.report import ScreenReport
from trivet.data.screen.verdicts import (
    Decisions,
    Judge,
    Outcome,
    Pass,
    PassOutcome,
    decide,
    review_row,
)

BATCH_CHARACTERS = 1 << 18
_BATCH_DOCUMENTS = 4096


class Screen:
    """A chain of passes. Picklable where its passes and judge are; `check` changes nothing, so processes
    share one, each with its own report."""

    def __init__(
        self,
        passes: Sequence[Pass],
        allow: Allow | None = None,
        decisions: Decisions | None = None,
        judge: Judge | None = None,
    ) -> None:
        names = [one.name for one in passes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two passes are called {', '.join(twice)}; give one another name")
        self.passes = list(passes)
        self.allow = allow or Allow()
        self.decisions = decisions or {}
        self.judge = judge

    def find_frequent(self, sample: Sequence[Document]) -> dict[str, dict[str, int]]:
        """Phrases that a sample of the corpus holds too often to prove anything, by pass, with the number of
        documents; they weigh nothing from now on. To be done before the screen is given to workers."""
        return {one.name: one.find_frequent(sample) for one in self.passes if isinstance(one, NgramPass)}

    def check(self, documents: Sequence[Document]) -> list[Outcome]:
        """What becomes of each document, in order."""
        done: list[list[PassOutcome]] = [[] for _ in documents]
        allowed = [self._allowed(document) for document in documents]
        left = [d for d, reason in enumerate(allowed) if reason is None]
        batch = Batch(documents[d] for d in left)
        for one in self.passes:
            hits_of = one.check(batch)
            gone: set[int] = set()
            for k, (d, hits) in enumerate(zip(left, hits_of, strict=True)):
                outcome = decide(one.name, hits, documents[d], one.borderline, self.decisions, self.judge)
                done[d].append(outcome)
                if outcome.fate in ("drop", "held"):
                    gone.add(k)
            batch = batch.without(gone)
            left = [d for k, d in enumerate(left) if k not in gone]
        return [
            Outcome(document, tuple(passes), reason)
            for document, passes, reason in zip(documents, done, allowed, strict=True)
        ]

    def _allowed(self, document: Document) -> str | None:
        if not self.allow.documents:
            return None
        reason = self.allow.documents.get(document.place)
        return reason if reason is not None else self.allow.documents.get(document.key())

    def run(
        self, documents: Iterable[Document], report: ScreenReport, review: Path | None = None
    ) -> Iterator[Outcome]:
        """Outcomes of a stream, in order, counted in `report`. Borderline hits go to `review` as JSON lines,
        written as they come."""
        for batch in document_batches(documents):
            outcomes = self.check(batch)
            if review is not None:
                write_review(review, outcomes)
            for outcome in outcomes:
                report.add(outcome)
                yield outcome


def document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists whose arrays stay in the cache."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document.texts))
        if size >= BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_review(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Appends the borderline hits, one a line, and those that somebody decided."""
    rows = [
        review_row(one, hit, decision, outcome.document)
        for outcome in outcomes
        for one in outcome.passes
        for hit, decision in zip(one.hits, one.decisions, strict=True)
        if hit.verdict == "borderline" or decision is not None
    ]
    if rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def screen_records(
    records: Iterable[Record | Drop], screen: Screen, report: ScreenReport, review: Path | None = None
) -> Iterator[Record | Drop]:
    """Records through a chain, in order: contaminated ones become drops (`contaminated`), held ones too
    (`contamination_review`), and each says by which pass and item."""
    for batch in _record_batches(records):
        kept = [record for record in batch if isinstance(record, Record)]
        outcomes = iter(list(screen.run(map(document_of_record, kept), report, review)))
        for record in batch:
            if isinstance(record, Drop):
                yield record
                continue
            outcome = next(outcomes)
            if outcome.fate == "keep":
                yield record
            else:
                cause = "contaminated" if outcome.fate == "drop" else "contamination_review"
                yield Drop(cause, record.place, record.source, outcome.why())


def _record_batches(records: Iterable[Record | Drop]) -> Iterator[list[Record | Drop]]:
    batch: list[Record | Drop] = []
    size = 0
    for record in records:
        batch.append(record)
        if isinstance(record, Record):
            size += sum(len(message.content) for message in record.messages)
        if size >= BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
