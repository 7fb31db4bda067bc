"""Examples into packs on disk: streamed by blocks in a seeded order, a window of examples at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trivet.data.packing import Packer, PackingOptions, Rows
from trivet.data.shards import Pack, file_entry, pack_row, pack_schema, write_shard
from trivet.recipe.data import Pack as Config

PART_TOKENS = 32 << 20  # of a file of packs
_COLUMNS = ("ids", "train", "id", "source", "category")


@dataclass(frozen=True, slots=True)
class _Block:
    """The examples of one row group that one pass uses: `row_N` within the group, `length_N` tokens."""

    file: int
    group: int
    row_N: np.ndarray
    length_N: np.ndarray


def _blocks(folder: Path, files: Sequence[str], repeat_N: np.ndarray) -> list[_Block]:
    """All blocks, pass after pass."""
    import pyarrow.parquet as pq

    groups, start = [], 0
    for file, name in enumerate(files):
        with pq.ParquetFile(folder / name) as data:
            for group in range(data.num_row_groups):
                length_N = data.read_row_group(group, columns=["tokens"]).column(0).to_numpy()
                own_N = repeat_N[start : start + len(length_N)]
                start += len(length_N)
                groups.append((file, group, length_N, own_N))
    out = []
    for turn in range(int(repeat_N.max(initial=0))):
        for file, group, length_N, own_N in groups:
            row_N = np.flatnonzero(own_N > turn)
            if len(row_N):
                out.append(_Block(file, group, row_N, length_N[row_N]))
    return out


class _Reader:
    """Tokens of examples by their number in the stream; the last few row groups stay in memory."""

    def __init__(self, folder: Path, files: Sequence[str], blocks: Sequence[_Block], held: int) -> None:
        self.folder, self.files, self.blocks, self.held = folder, files, blocks, held
        self.start_K = np.cumsum([0, *(len(block.row_N) for block in blocks)])
        self._cache: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def example(self, number: int) -> tuple[np.ndarray, np.ndarray, str, str, str]:
        """(ids, train, id, source, category)."""
        k = int(np.searchsorted(self.start_K, number, "right")) - 1
        columns = self._cache.get(k)
        if columns is None:
            columns = self._cache[k] = self._load(self.blocks[k])
            while len(self._cache) > self.held:
                self._cache.popitem(last=False)
        self._cache.move_to_end(k)
        row = int(self.blocks[k].row_N[number - self.start_K[k]])
        ids, train = (columns[name][row].values.to_numpy() for name in ("ids", "train"))
        return ids, train, *(columns[name][row].as_py() for name in ("id", "source", "category"))

    def _load(self, block: _Block) -> dict[str, Any]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.folder / self.files[block.file]) as data:
            table = data.read_row_group(block.group, columns=list(_COLUMNS))
        return {name: table.column(name).combine_chunks() for name in _COLUMNS}

    def pack(self, numbers: np.ndarray) -> Pack:
        """Examples side by side; the first token of each is nobody's label."""
        ids, trains, names, sources, categories = zip(*map(self.example, numbers.tolist()), strict=True)
        length_D = np.asarray([len(one) for one in ids], np.int32)
        train_T = np.concatenate(trains)
        train_T[np.cumsum(length_D) - length_D] = 0
        return Pack(np.concatenate(ids), train_T, length_D, names, sources, categories)


def _parts(packer: Packer, blocks: Sequence[_Block], length_N: np.ndarray) -> Iterator[list[np.ndarray]]:
    """The packs of one file after the other: for each pack the numbers of its examples."""
    part: list[np.ndarray] = []
    tokens = 0

    def rows() -> Iterator[Rows]:
        for block in blocks:
            yield from packer.add(block.length_N)
        yield packer.finish()

    for one in rows():
        for numbers in np.split(one.index_N, np.cumsum(one.count_B)[:-1]) if len(one.count_B) else ():
            part.append(numbers)
            tokens += int(length_N[numbers].sum())
            if tokens >= PART_TOKENS:
                yield part
                part, tokens = [], 0
    if part:
        yield part


def write_packs(
    folder: Path,
    files: Sequence[str],
    repeat_N: np.ndarray,
    config: Config,
    *,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """`packed/` from the examples in `files`, each used `repeat_N` times; what the manifest says of it.

    Blocks (row groups) come in a seeded order, every pass over an example in another place. Files that are
    there are not written again. Raises PackingError where an example that is used is longer than a pack.
    """
    (folder / "packed").mkdir(exist_ok=True)
    blocks = _blocks(folder, files, repeat_N)
    order = np.random.default_rng([seed, 0]).permutation(len(blocks))
    blocks = [blocks[k] for k in order.tolist()]
    length_N = np.concatenate([*(block.length_N for block in blocks), np.zeros(0, np.int32)]).astype(np.int64)
    mean = float(length_N.mean()) if len(length_N) else 1.0
    window = max(1, min(config.window, int(config.window_tokens / mean)))
    options = PackingOptions(capacity=config.length, window=window, long_from=config.long_from, seed=seed)
    widest = max((len(block.row_N) for block in blocks), default=1)
    reader = _Reader(folder, files, blocks, held=2 + 3 * -(-window // max(1, widest)))
    entries, total, done, trained, costs = [], int(length_N.sum()), 0, 0, []
    for number, part in enumerate(_parts(Packer(options), blocks, length_N)):
        path = folder / "packed" / f"part-{number:05d}.parquet"
        if not path.exists():
            write_shard(
                path, (pack_row(reader.pack(numbers)) for numbers in part), pack_schema(), group_rows=64
            )
        entries.append(file_entry(folder, path, len(part)))
        trained += _trained(path)
        costs += [float(options.cost(length_N[numbers]).sum()) for numbers in part]
        done += sum(int(length_N[numbers].sum()) for numbers in part)
        progress("packing", done, total)
    packs = sum(entry["rows"] for entry in entries)
    return {
        "capacity": config.length,
        "packs": packs,
        "examples": len(length_N),
        "tokens": total,
        "trained": trained,
        "fill": total / (packs * config.length) if packs else 0.0,
        "bound": options.fewest_rows(length_N),
        "cost": _spread(np.asarray(costs)),
        "files": entries,
    }


def _trained(path: Path) -> int:
    """Labels with a weight in a file of packs."""
    import pyarrow.parquet as pq

    count = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(64, columns=["train"]):
            count += int((batch.column(0).flatten().to_numpy() > 0).sum())
    return count


def _spread(cost_B: np.ndarray) -> dict[str, float]:
    if not len(cost_B):
        return {}
    return {"mean": float(cost_B.mean()), "max_over_mean": float(cost_B.max() / cost_B.mean())}
