"""Which examples are used, and how often: copies are left out, then the mix is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trivet.data.compose import Examples, Targets, compose, composition_table
from trivet.data.prepare import near_options
from trivet.data.screen.dedup import Sketches, resolve
from trivet.recipe.data import Data

Columns = dict[str, np.ndarray]
_NUMBERS = ("tokens", "trained", "turns", "supervised_turns")


def load_columns(shards: list[Path]) -> Columns:
    """A few numbers of every example (_N), in order: tokens, trained, turns, supervised_turns, the `piece`
    it lies in, `source` and `category` as numbers into `sources` and `categories`."""
    import pyarrow.parquet as pq

    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*_NUMBERS, "piece", "source", "category")}
    texts: dict[str, dict[str, int]] = {"source": {}, "category": {}}
    for index, path in enumerate(shards):
        table = pq.read_table(path, columns=[*_NUMBERS, "source", "category"])
        for column in _NUMBERS:
            parts[column].append(table.column(column).to_numpy().astype(np.int32))
        for column, known in texts.items():
            codes = table.column(column).combine_chunks().dictionary_encode()
            of = [known.setdefault(text, len(known)) for text in codes.dictionary.to_pylist()]
            parts[column].append(np.asarray(of, np.int32)[codes.indices.to_numpy()])
        parts["piece"].append(np.full(table.num_rows, index, np.int32))
    out = {name: np.concatenate([*arrays, np.zeros(0, np.int32)]) for name, arrays in parts.items()}
    for name, many in (("source", "sources"), ("category", "categories")):
        out[many] = np.asarray(list(texts[name]), object)
    return out


def distinct(
    data: Data, work: Path, names: list[str], columns: Columns
) -> tuple[np.ndarray, dict[str, Any] | None]:
    """(keep_N: the first of every set of copies, what was found)."""
    import pyarrow.parquet as pq

    keep_N = np.ones(len(columns["tokens"]), bool)
    if data.deduplicate is None:
        return keep_N, None
    found: dict[str, Any] = {}
    if data.deduplicate.exact != "off":
        tables = [pq.read_table(work / f"{name}.parquet", columns=["exact"]) for name in names]
        keys = np.frombuffer(b"".join(k for t in tables for k in t.column(0).to_pylist()), "V16")
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        keep_N = first[inverse.ravel()] == np.arange(len(keys))
        found["exact"] = _copies(columns, ~keep_N) | {"sizes": _sizes(inverse.ravel())}
    near = near_options(data)
    if near is not None:
        sketches = Sketches.join([Sketches.load(work / f"{name}.sketch") for name in names])
        result = resolve(sketches, near)
        also = keep_N & ~result.kept
        found["near"] = _copies(columns, also) | {"sizes": result.report()["clusters by size"]}
        keep_N = keep_N & result.kept
    return keep_N, found


def _copies(columns: Columns, gone_N: np.ndarray) -> dict[str, Any]:
    by = np.bincount(columns["source"][gone_N], minlength=len(columns["sources"])).tolist()
    return {
        "dropped": int(gone_N.sum()),
        "by_source": dict(zip(columns["sources"].tolist(), by, strict=True)),
    }


def _sizes(cluster_N: np.ndarray) -> dict[str, int]:
    sizes, counts = np.unique(np.bincount(cluster_N), return_counts=True)
    return {str(size): int(n) for size, n in zip(sizes, counts, strict=True) if size > 1}


def examples_of(columns: Columns, chosen_N: np.ndarray) -> Examples:
    """The chosen ones (bool _N) as an index to compose."""
    return Examples(
        tuple(columns["sources"].tolist()),
        tuple(columns["categories"].tolist()),
        columns["source"][chosen_N],
        columns["category"][chosen_N],
        np.maximum(columns["tokens"][chosen_N], 0).astype(np.int64),
        np.maximum(columns["trained"][chosen_N], 0).astype(np.int64),
        columns["turns"][chosen_N],
        columns["supervised_turns"][chosen_N],
    )


def composed(
    data: Data, columns: Columns, keep_N: np.ndarray, *, seed: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """(repeat_N: how often each example is used, the mix: what was asked and what it is made of)."""
    examples, config = examples_of(columns, keep_N), data.compose
    out: dict[str, Any] = {}
    uses_N = np.ones(len(examples), np.int64)
    if config is not None:
        targets = Targets(
            config.categories or None,
            config.sources or None,
            by=config.by,
            total=config.total,
            most_passes=config.max_repeat,
            seed=seed,
        )
        mix = compose(examples, targets)
        uses_N = mix.uses_N
        out["asked"] = {"by": mix.by, "categories": mix.categories, "sources": mix.sources}
    repeat_N = np.zeros(len(keep_N), np.int32)
    repeat_N[keep_N] = uses_N
    return repeat_N, out | {"table": composition_table(examples, uses_N)}
