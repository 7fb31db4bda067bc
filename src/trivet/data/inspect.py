"""One example as a person should see it: what is trained, what is context, what was stripped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trivet.data.normalise import normalise
from trivet.data.prepare import record_of
from trivet.data.read import BadRow, pieces, read
from trivet.data.record import Record, RecordDropped
from trivet.data.shards import ShardError, read_manifest
from trivet.recipe.data import Data

Kind = Literal["trained", "context", "stripped"]


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one kind; `weight` of its tokens' loss, `ids` of the tokens (none for what was stripped)."""

    text: str
    kind: Kind
    weight: float = 0.0
    ids: tuple[int, ...] = ()


def spans(ids_T: np.ndarray, train_T: np.ndarray, decode: Callable[[np.ndarray], str]) -> list[Span]:
    """Runs of tokens of one weight, as text."""
    if not len(ids_T):
        return []
    cuts = np.flatnonzero(np.diff(train_T)) + 1
    out = []
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ids_T)], strict=True):
        weight, ids = float(train_T[start]), ids_T[start:stop]
        out.append(Span(decode(ids), "trained" if weight > 0 else "context", weight, tuple(ids.tolist())))
    return out


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """All examples of a build, in order. Raises ShardError."""
    import pyarrow.parquet as pq

    for entry in read_manifest(folder)["examples"]["files"]:
        with pq.ParquetFile(folder / entry["name"]) as file:
            for batch in file.iter_batches(64):
                yield from batch.to_pylist()


def find(folder: Path, which: str, source: str | None = None) -> dict[str, Any]:
    """The example of that number (from 0, of a source if one is named) or id. Raises ShardError."""
    number = int(which) if which.isdigit() else None
    count = 0
    for row in rows_of(folder):
        if source is not None and row["source"] != source:
            continue
        if row["id"] == which or count == number:
            return row
        count += 1
    what = f"{count} examples" + (f" of source {source!r}" if source is not None else "")
    raise ShardError(f"{folder} has no example {which!r}; it has {what}")


def stripped(row: dict[str, Any], data: Data) -> dict[int, str]:
    """Message -> reasoning that its source has and the example has not. {} where the source is gone."""
    record = record_of(row)
    original = _original(record, data)
    if original is None:
        return {}
    pairs = zip(original.messages, record.messages, strict=False)
    return {i: a.reasoning for i, (a, b) in enumerate(pairs) if a.reasoning and b.reasoning is None}


def _original(record: Record, data: Data) -> Record | None:
    source = next((one for one in data.sources if one.label == record.source), None)
    if source is None:
        return None
    try:
        for piece in pieces(source.source, subset=source.subset, split=source.split):
            if not record.place.startswith(piece.path):
                continue
            for row in read(piece):
                if row.place == record.place and not isinstance(row, BadRow):
                    return normalise(
                        row.row,
                        format=None if source.format == "auto" else source.format,
                        source=source.label,
                        place=row.place,
                        mapping=source.fields or None,
                        text_only=data.text_only,
                        repairs=source.repairs or None,
                    )
    except (OSError, ValueError, RecordDropped):  # the source moved or changed since: nothing to show
        return None
    return None
