"""Small packed folders: additions in the tiny model's language, packed a few a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tests.runtime.support import TINY

from trivet.data.render import tokenizer_hash
from trivet.data.sft import sft_group, to_task
from trivet.data.shards import Pack, file_hash, pack_row, pack_schema, write_json, write_shard
from trivet.recipe import Recipe, load_recipe
from trivet.recipe.schema import TinyModel
from trivet.render import get_renderer
from trivet.render.tiny import tiny_tokenizer
from trivet.types import IssueKey

CAPACITY = 64


def examples(n: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Additions; one in three is of the source `even` with a weight of its own."""
    rng, out = np.random.default_rng(first), []
    for i in range(first, first + n):
        a, b = rng.integers(0, 10, 2).tolist()
        row = {
            "id": f"e{i:03d}",
            "prompt": f"{a}+{b}=",
            "response": str(a + b),
            "source": "plus",
            "weight": 1.0,
        }
        if i % 3 == 0:
            row |= {"source": "my/even", "prompt": f"{a}-{a}=", "response": "0" * (1 + i % 4), "weight": 0.5}
        out.append(row)
    return out


def rendered(rows: Sequence[dict[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    renderer = get_renderer(tiny_tokenizer(TinyModel(**TINY)))
    out = []
    for row in rows:
        group = sft_group(to_task(row), renderer, IssueKey(row["id"], 0), group_id=row["id"])
        trace = group.rollouts[0].trace
        out.append((trace.column("id").copy(), trace.column("train").copy()))
    return out


def packs_of(rows: Sequence[dict[str, Any]], capacity: int = CAPACITY) -> list[Pack]:
    """Next fit: each pack takes rows until one does not fit."""
    packs: list[Pack] = []
    held: list[tuple[dict[str, Any], np.ndarray, np.ndarray]] = []

    def close() -> None:
        packs.append(
            Pack(
                np.concatenate([ids for _, ids, _ in held]).astype(np.int32),
                np.concatenate([train for _, _, train in held]).astype(np.float32),
                np.asarray([len(ids) for _, ids, _ in held], np.int32),
                tuple(row["id"] for row, _, _ in held),
                tuple(row["source"] for row, _, _ in held),
                tuple("arithmetic" if row["source"] == "plus" else "" for row, _, _ in held),
            )
        )
        held.clear()

    for row, (ids, train) in zip(rows, rendered(rows), strict=True):
        if held and sum(len(i) for _, i, _ in held) + len(ids) > capacity:
            close()
        held.append((row, ids, train))
    close()
    return packs


def write_packs(
    folder: Path, packs: Sequence[Pack], *, files: int = 2, group_rows: int = 3, tokenizer: str | None = None
) -> Path:
    """A folder as `trivet data build` leaves it, as far as training reads it."""
    entries = []
    for k, part in enumerate(np.array_split(np.arange(len(packs)), files)):
        path = folder / "packed" / f"{k:05d}.parquet"
        write_shard(path, (pack_row(packs[i]) for i in part.tolist()), pack_schema(), group_rows=group_rows)
        name = str(path.relative_to(folder))
        size = path.stat().st_size
        entries.append({"name": name, "rows": len(part), "bytes": size, "sha256": file_hash(path)})
    about = {"capacity": CAPACITY, "tokens": sum(len(p.ids_T) for p in packs), "files": entries}
    about["trained"] = sum(int((p.train_T > 0).sum()) for p in packs)
    own = tokenizer_hash(tiny_tokenizer(TinyModel(**TINY)))
    write_json(folder / "manifest.json", {"format": 1, "tokenizer": tokenizer or own, "packs": about})
    return folder


def recipe(folder: Path, *overrides: str, rows: int = 60, data: Path | None = None, **stage: Any) -> Recipe:
    """Two epochs over packs of `rows` examples, four packs a step."""
    folder.mkdir(parents=True, exist_ok=True)
    data = data or folder / "data"
    if not data.exists():
        write_packs(data, packs_of(examples(rows)))
    one = {
        "name": "sft",
        "mode": "train",
        "algorithm": "sft",
        "packed": str(data),
        "batch": {"packs": 4},
        "trainer": {"lr": 1e-2},
        "checkpoints": {"every": 2},
        "epochs": 2,
    }
    content = {
        "name": "packed",
        "output": str(folder / "run"),
        "policy": {"model": TINY},
        "runtime": {"threads": 1},
        "monitor": {"plots": False},
        "stages": [{k: v for k, v in (one | stage).items() if v is not None}],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path, list(overrides))


def as_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
