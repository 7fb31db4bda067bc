"""What a build leaves on disk: Parquet shards of examples and of packs, and a manifest that vouches for them.

A file appears whole or not at all. The same rows give the same bytes: nothing in a shard depends on the time,
the machine or the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_ROWS = 1024  # rows of a Parquet row group: what is read at once


class ShardError(ValueError):
    """A folder of shards cannot be read; says which file and what to do."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents that are trained side by side and never see each other.

    `ids_T` int32 and `train_T` float32 (loss weight of each token as a label; 0 at every document's first)
    of the documents one after the other, `lengths_D` int32 their lengths; of each document the example's id,
    source and category.
    """

    ids_T: np.ndarray
    train_T: np.ndarray
    lengths_D: np.ndarray
    examples: tuple[str, ...]
    sources: tuple[str, ...]
    categories: tuple[str, ...]

    def position_T(self) -> np.ndarray:
        """int32: every token's place in its own document."""
        starts_D = np.cumsum(self.lengths_D) - self.lengths_D
        return (np.arange(len(self.ids_T)) - np.repeat(starts_D, self.lengths_D)).astype(np.int32)


def example_schema() -> Any:
    """Columns of `examples/`: the conversation, where it came from, what was done to it, and its tokens.

    `turns` are the assistant's, `supervised_turns` those of them that are trained. `tokens` and `trained` are
    -1, `ids` and `train` null where nothing was rendered. `exact` names its copies alike.
    """
    import pyarrow as pa

    text, whole = pa.string(), pa.int32()
    return pa.schema(
        [
            *(pa.field(name, text) for name in ("id", "source", "category", "place")),
            pa.field("part", whole),
            pa.field("done", pa.list_(text)),
            *(pa.field(name, text) for name in ("messages", "tools", "rejected")),
            pa.field("weight", pa.float64()),
            *(pa.field(name, whole) for name in ("turns", "supervised_turns", "tokens", "trained")),
            pa.field("ids", pa.list_(whole)),
            pa.field("train", pa.list_(pa.float32())),
            pa.field("exact", pa.binary(16)),
        ]
    )


def pack_schema() -> Any:
    """Columns of `packed/`: one row a pack, see `Pack`."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("ids", pa.list_(pa.int32())),
            pa.field("train", pa.list_(pa.float32())),
            pa.field("lengths", pa.list_(pa.int32())),
            *(pa.field(name, pa.list_(pa.string())) for name in ("examples", "sources", "categories")),
        ]
    )


def pack_row(pack: Pack) -> dict[str, Any]:
    """A pack as a row of `pack_schema`."""
    return {
        "ids": pack.ids_T,
        "train": pack.train_T,
        "lengths": pack.lengths_D,
        "examples": list(pack.examples),
        "sources": list(pack.sources),
        "categories": list(pack.categories),
    }


def write_shard(
    path: Path, rows: Iterable[Mapping[str, Any]], schema: Any, *, group_rows: int = BLOCK_ROWS
) -> int:
    """Rows as one Parquet file, in groups of `group_rows`; how many there were."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    count, rows = 0, iter(rows)
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            while batch := list(islice(rows, group_rows)):
                columns = [pa.array([row[f.name] for row in batch], f.type) for f in schema]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                count += len(batch)
    except OSError as error:  # a full disk, of which pyarrow does not say where
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)
    return count


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(folder: Path, path: Path, rows: int) -> dict[str, Any]:
    """What a manifest says of a file."""
    name, size = str(path.relative_to(folder)), path.stat().st_size
    return {"name": name, "rows": rows, "bytes": size, "sha256": file_hash(path)}


def write_json(path: Path, value: Any) -> None:
    """JSON that is there whole or not at all; equal values give equal bytes."""
    partial = path.with_name(f".{path.name}.partial")
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    partial.write_text(text, encoding="utf-8", errors="replace")  # half letters, of rows that were quoted
    partial.rename(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a build. Raises ShardError."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ShardError(
            f"{folder} has no {MANIFEST}: it is no finished build; run `trivet data build` (again)"
        ) from error
    except ValueError as error:
        raise ShardError(f"{path} is damaged ({error}); build again") from error
    if manifest.get("format") != FORMAT:
        raise ShardError(
            f"{path}: format {manifest.get('format')!r}, this trivet reads {FORMAT}; build again"
        )
    return manifest


class PackedData:
    """The packs of a build, by number and in order. Files are opened when they are needed.

    `capacity`: tokens a pack may hold. `fingerprint`: hash of all files; `tokenizer`: hash of the tokenizer
    and template the ids are of. Raises ShardError where files are missing or of other sizes.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if not manifest.get("packs"):
            raise ShardError(f"{folder} holds no packs: give the data section `pack:` and build again")
        about = manifest["packs"]
        self.capacity, self.tokens, self.trained = (about[k] for k in ("capacity", "tokens", "trained"))
        self.tokenizer: str = manifest.get("tokenizer", "")
        self.files: list[dict[str, Any]] = about["files"]
        self.fingerprint = hashlib.sha256("".join(f["sha256"] for f in self.files).encode()).hexdigest()
        for entry in self.files:
            path = self.folder / entry["name"]
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise ShardError(f"{path} is missing or not as it was written; build again")
        self._starts = np.cumsum([0, *(f["rows"] for f in self.files)]).tolist()
        self._open: tuple[int, int, list[dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Pack:
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        which = bisect_right(self._starts, index) - 1
        within = index - self._starts[which]
        if (
            self._open is None
            or self._open[0] != which
            or not 0 <= within - self._open[1] < len(self._open[2])
        ):
            self._open = (which, *self._group(which, within))
        return _pack(self._open[2][within - self._open[1]])

    def __iter__(self) -> Iterator[Pack]:
        return (self[i] for i in range(len(self)))

    def _group(self, which: int, within: int) -> tuple[int, list[dict[str, Any]]]:
        """The row group that holds row `within` of a file, and the row it starts with."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.folder / self.files[which]["name"]) as file:
            start = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if within < start + rows:
                    table = file.read_row_group(group)
                    lists = {name: table.column(name) for name in table.column_names}
                    return start, [{n: c[i].values for n, c in lists.items()} for i in range(rows)]
                start += rows
        raise ShardError(f"{self.files[which]['name']} has fewer packs than its manifest says; build again")


def _pack(row: Mapping[str, Any]) -> Pack:
    ids_T, train_T, lengths_D = (row[n].to_numpy(zero_copy_only=False) for n in ("ids", "train", "lengths"))
    examples, sources, categories = (tuple(row[n].to_pylist()) for n in ("examples", "sources", "categories"))
    return Pack(ids_T, train_T, lengths_D, examples, sources, categories)
