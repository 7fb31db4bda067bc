"""Benchmark items out of any file of prompts or conversations, without a build."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trivet.data.normalise import normalise
from trivet.data.read import BadRow, Row, read_rows
from trivet.data.record import RecordDropped
from trivet.data.screen.chain import document_batches, write_review
from trivet.data.screen.documents import Document, document_of_record
from trivet.data.screen.report import ScreenReport
from trivet.data.screens import ScreenError, build_screen
from trivet.recipe.data import Benchmark, Decontaminate

_PROMPTS = ("prompt", "question", "problem", "instruction", "query", "text", "content")


def decontaminate(
    source: str,
    benchmarks: Sequence[str],
    output: Path,
    *,
    passes: Sequence[str],
    borderline: str = "review",
    allow: str | None = None,
    force: bool = False,
) -> str:
    """Write the rows of `source` that hold no item of `benchmarks` (NAME=FILE) to `output`, as JSON lines,
    and borderline hits to OUTPUT.review.jsonl; the report as text.

    Rows that cannot be read are counted and left out. Raises ScreenError, SourceError, BenchmarkError.
    """
    if output.exists() and not force:
        raise ScreenError(f"{output} exists: choose another name, or say --force")
    config = Decontaminate.model_validate(
        {
            "benchmarks": [_benchmark(one).model_dump() for one in benchmarks],
            "passes": list(passes),
            "borderline": borderline,
            "allow": allow,
        }
    )
    screen, items, loaded = build_screen(config)
    report, bad = ScreenReport(), 0
    review = output.with_name(f"{output.name}.review.jsonl")
    review.unlink(missing_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    rows: list[Row] = []

    def documents() -> Iterator[Document]:
        nonlocal bad
        for row in read_rows(source):
            if isinstance(row, BadRow):
                bad += 1
                continue
            rows.append(row)
            yield _document(row, source)

    with open(partial, "w", encoding="utf-8") as file:
        for batch in document_batches(documents()):
            outcomes = screen.check(batch)
            write_review(review, outcomes)
            for row, outcome in zip(rows, outcomes, strict=True):
                report.add(outcome)
                if outcome.fate == "keep":
                    file.write(json.dumps(row.row, ensure_ascii=False, default=str) + "\n")
            rows.clear()
    partial.rename(output)
    unusable = sum(not one.usable for one in items)
    counts = ", ".join(f"{one.name} {len(one.items)}" for one in loaded)
    said = f"Items: {counts}; {unusable} cannot be looked for.\n"
    return said + (f"{bad} rows could not be read and were left out.\n" if bad else "") + report.text()


def _benchmark(given: str) -> Benchmark:
    name, sign, source = given.partition("=")
    if not sign or not name or not source:
        raise ScreenError(f"--benchmark {given!r}: write NAME=FILE, e.g. gsm8k=data/gsm8k/test.jsonl")
    return Benchmark(name=name, source=source)


def _document(row: Row, source: str) -> Document:
    """The conversation the row holds, else its prompt, else every text in it."""
    try:
        return document_of_record(normalise(row.row, source=source, place=row.place))
    except RecordDropped:
        pass  # not a whole conversation: prompts of RL tasks are none
    prompts = [row.row[name] for name in _PROMPTS if isinstance(row.row.get(name), str)]
    texts = prompts or list(_texts(row.row.values()))
    return Document(tuple(texts), (), source, row.place)


def _texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _texts(value.values())
        elif isinstance(value, list):
            yield from _texts(value)
