"""One piece of a source, from rows to a shard of examples: what a worker of a build does.

read -> normalise and repair -> rounds -> validate -> screen -> render. Nothing here depends on which process
does it, or when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.data.interleave import merge_prefixes, split_rounds
from trivet.data.normalise import normalise
from trivet.data.read import BadRow, Piece, Row, read
from trivet.data.record import Drop, Record, RecordDropped
from trivet.data.render import SourceRenderer, Tokens, source_renderers
from trivet.data.screen.chain import BATCH_CHARACTERS, Screen
from trivet.data.screen.dedup import DedupOptions, Sketches, exact_key, sketch
from trivet.data.screen.documents import Document, document_of_record
from trivet.data.screen.report import ScreenReport
from trivet.data.shards import example_schema, write_json, write_shard
from trivet.data.tally import SourceTally
from trivet.data.validate import validate
from trivet.recipe.data import Data, Source

_RECORD = ["id", "source", "category", "place", "part", "done", "messages", "tools", "rejected", "weight"]

_BATCH_RECORDS = 1024
UNREADABLE = frozenset({"unknown_format", "not_an_object", "missing_column"})
"""Causes of `normalise` that say a row is not written as it should be: they count as bad rows."""


@dataclass(frozen=True, slots=True)
class Job:
    """A piece to prepare. `form`: how its file's rows are written, `name`: of the files it becomes."""

    name: str
    source: int
    piece: Piece
    form: str | None


class Preparer:
    """The passes of one build, set up once for each process.

    `tokenizer`, `kind`, `template_args`: how examples are rendered; no tokenizer: they are not.
    """

    def __init__(
        self,
        data: Data,
        *,
        screen: Screen | None = None,
        tokenizer: str | None = None,
        kind: str = "auto",
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.data, self.screen = data, screen
        self.renderers: dict[str, SourceRenderer] = {}
        self.tokenizer_hash = ""
        if tokenizer is not None:
            self.renderers, self.tokenizer_hash = source_renderers(
                tokenizer,
                {source.label: source.chat_template for source in data.sources},
                kind=kind,
                template_args=template_args,
                max_length=data.max_length,
            )
        self._merges = {
            label: data.merge and not renderer.adds_empty_think()
            for label, renderer in self.renderers.items()
        }

    def prepare(self, job: Job, folder: Path) -> None:
        """Write `folder/NAME.parquet` (examples), `NAME.review.jsonl` and, last, `NAME.json` (the tally)."""
        source = self.data.sources[job.source]
        tally = SourceTally(formats={job.form: 1} if job.form else {})  # type: ignore[arg-type]
        review = folder / f"{job.name}.review.jsonl"
        review.unlink(missing_ok=True)
        report = ScreenReport()
        records = self._screened(self._records(job, source, tally), report, review)
        rows = self._rows(self._kept(records, tally), source, tally)
        write_shard(folder / f"{job.name}.parquet", rows, example_schema())
        if (near := near_options(self.data)) is not None:
            sketch_shard(folder / f"{job.name}.parquet", near).save(folder / f"{job.name}.sketch")
        out = {"source": source.label, "tally": tally.to_dict(), "screen": report.to_dict()}
        write_json(folder / f"{job.name}.json", out)

    # -- the passes ------------------------------------------------------------------------------

    def _records(self, job: Job, source: Source, tally: SourceTally) -> Iterator[Record | Drop]:
        for row in read(job.piece):
            if source.limit is not None and number_of(row.place) > source.limit:
                return
            tally.rows += 1
            if isinstance(row, BadRow):
                tally.bad[row.cause] += 1
                tally.note(row.cause, row.place, row.text)
                continue
            try:
                yield from self._examples(row, job, source, tally)
            except RecordDropped as error:
                if error.cause in UNREADABLE:
                    tally.bad[error.cause] += 1
                    tally.note(error.cause, row.place, str(error))
                else:
                    yield Drop(error.cause, row.place, source.label, str(error))

    def _examples(self, row: Row, job: Job, source: Source, tally: SourceTally) -> list[Record | Drop]:
        """The examples of one row that are valid; the others as drops. Raises RecordDropped."""
        record = normalise(
            row.row,
            format=job.form,
            source=source.label,
            place=row.place,
            mapping=source.fields or None,
            text_only=self.data.text_only,
            repairs=source.repairs or None,
        )
        _check_names(record)
        record.category, record.weight = source.category, record.weight * source.weight
        parts = self._parts(record, source)
        out: list[Record | Drop] = []
        for part in parts:
            try:
                valid, warnings = validate(part)
            except RecordDropped as error:
                out.append(Drop(error.cause, row.place, source.label, str(error)))
                continue
            tally.warnings.update(warning.cause for warning in warnings)
            out.append(valid)
        return out

    def _parts(self, record: Record, source: Source) -> list[Record]:
        """One record for each completed response, merged where the template allows it."""
        supervise = source.supervise or self.data.supervise
        if not self.data.rounds:
            return [record]
        merges = self._merges.get(source.label, self.data.merge)
        if merges and supervise == "all" and one_example(record):
            return [record]
        parts = split_rounds(record, supervise=supervise)
        return merge_prefixes(parts, adds_empty_think=False) if merges and len(parts) > 1 else parts

    def _screened(
        self, records: Iterable[Record | Drop], report: ScreenReport, review: Path
    ) -> Iterator[tuple[Record, Document] | Drop]:
        """Every record with its texts; what holds a benchmark's item as a drop."""
        held: list[Record | Drop] = []
        size = 0
        for record in records:
            held.append(record)
            if isinstance(record, Record):
                size += sum(len(message.content) for message in record.messages)
            if size >= BATCH_CHARACTERS or len(held) >= _BATCH_RECORDS:
                yield from self._check(held, report, review)
                held, size = [], 0
        yield from self._check(held, report, review)

    def _check(
        self, held: list[Record | Drop], report: ScreenReport, review: Path
    ) -> Iterator[tuple[Record, Document] | Drop]:
        documents = [document_of_record(record) for record in held if isinstance(record, Record)]
        outcomes = iter(())
        if self.screen is not None:
            outcomes = iter(list(self.screen.run(documents, report, review)))
        texts = iter(documents)
        for record in held:
            if isinstance(record, Drop):
                yield record
                continue
            document, outcome = next(texts), next(outcomes, None)
            if outcome is None or outcome.fate == "keep":
                yield record, document
            else:
                cause = "contaminated" if outcome.fate == "drop" else "contamination_review"
                yield Drop(cause, record.place, record.source, outcome.why())

    def _kept(
        self, records: Iterable[tuple[Record, Document] | Drop], tally: SourceTally
    ) -> Iterator[tuple[Record, Document]]:
        for record in records:
            if isinstance(record, Drop):
                tally.dropped[record.cause] += 1
                tally.note(record.cause, record.place, record.text)
            else:
                yield record

    def _rows(
        self, records: Iterable[tuple[Record, Document]], source: Source, tally: SourceTally
    ) -> Iterator[dict[str, Any]]:
        renderer = self.renderers.get(source.label)
        for n, (record, document) in enumerate(records):
            tokens = None
            if renderer is not None:
                try:
                    tokens = renderer.tokens(record, compare=n % self.data.check_every == 0)
                except RecordDropped as error:
                    tally.dropped[error.cause] += 1
                    tally.note(error.cause, record.place, str(error))
                    continue
            tally.examples += 1
            tally.done.update(record.done)
            yield example_row(record, tokens, self._exact(document))

    def _exact(self, document: Document) -> bytes | None:
        of = self.data.deduplicate.exact if self.data.deduplicate is not None else "off"
        return None if of == "off" else exact_key(document, DedupOptions(of=of))


def _check_names(record: Record) -> None:
    """Raises RecordDropped for an id or name that no file can hold; texts are checked by `normalise`."""
    names = [record.id]
    for message in record.messages + (record.rejected or []):
        names += [message.name or "", message.tool_call_id or "", *(call.id for call in message.tool_calls)]
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        text = f"{record.place}: an id or name holds half a surrogate pair, which UTF-8 cannot"
        raise RecordDropped("broken_unicode", text) from None


def near_options(data: Data) -> DedupOptions | None:
    """How near duplicates are looked for; None: they are not."""
    near = data.deduplicate.near if data.deduplicate is not None else None
    return None if near is None else DedupOptions(of=near.of, near=True, threshold=near.threshold)


def sketch_shard(path: Path, options: DedupOptions) -> Sketches:
    """The sketches of all examples of a shard, in order."""
    import pyarrow.parquet as pq

    parts = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(512, columns=_RECORD):
            parts.append(sketch([document_of_record(record_of(row)) for row in batch.to_pylist()], options))
    return Sketches.join(parts)


def one_example(record: Record) -> bool:
    """Splitting into rounds and merging them again would give the record itself: it ends with an answer,
    trains all of its answers, and has no thoughts to strip."""
    messages = record.messages
    return (
        bool(messages)
        and messages[-1].role == "assistant"
        and all(m.reasoning is None and m.train is None for m in messages if m.role == "assistant")
    )


def number_of(place: str) -> int:
    """The number of the row in its file, counted from 1."""
    if place.endswith("]"):
        return int(place[place.rindex("[") + 1 : -1].rpartition(":")[2]) + 1
    tail = place.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 1


# Keys as they stand: their order is part of what a template writes.
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def example_row(record: Record, tokens: Tokens | None, exact: bytes | None = None) -> dict[str, Any]:
    """A record as a row of `example_schema`."""
    answers = [m for m in record.messages if m.role == "assistant"]
    rejected = record.rejected
    return {
        "id": record.id or f"{record.place}#{record.part}",
        "source": record.source,
        "category": record.category,
        "place": record.place,
        "part": record.part,
        "done": record.done,
        "messages": _json([m.to_dict() for m in record.messages]),
        "tools": _json(record.tools) if record.tools else "",
        "rejected": None if rejected is None else _json([m.to_dict() for m in rejected]),
        "weight": record.weight,
        "turns": len(answers),
        "supervised_turns": sum(m.train != 0 for m in answers),
        "tokens": -1 if tokens is None else len(tokens.ids_T),
        "trained": -1 if tokens is None else int((tokens.train_T > 0).sum()),
        "ids": None if tokens is None else tokens.ids_T,
        "train": None if tokens is None else tokens.train_T,
        "exact": exact,
    }


def record_of(row: Mapping[str, Any]) -> Record:
    """The record that a row of `example_schema` holds."""
    from trivet.types import Message

    def messages(text: str) -> list[Message]:
        return [Message.from_dict(m) for m in json.loads(text)]

    return Record(
        messages(row["messages"]),
        source=row["source"],
        place=row["place"],
        tools=json.loads(row["tools"]) if row["tools"] else [],
        id=row["id"],
        category=row["category"],
        weight=row["weight"],
        part=row["part"],
        done=list(row["done"]),
        rejected=None if row["rejected"] is None else messages(row["rejected"]),
    )
