"""What is done to a build by hostile inputs, folders and moments: nothing is lost, nothing hangs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.data.build import BuildError, build
from trivet.data.read import BadRow, Row, SourceError, read_rows
from trivet.recipe import load_recipe
from trivet.recipe.schema import TinyModel
from trivet.render.tiny import make_tiny

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, alphabet=ALPHABET)
    return str(make_tiny(tiny, tmp_path_factory.mktemp("tokenizer") / "m"))


def chat(n: int, **more: Any) -> dict[str, Any]:
    texts = [("user", f"What is {n} and {n}?"), ("assistant", str(2 * n))]
    return {"messages": [{"role": role, "content": text} for role, text in texts]} | more


def lines(rows: list[Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def recipe(folder: Path, model: str, **data: Any) -> Any:
    data = {"output": str(folder / "out"), "workers": 1, "pack": {"length": 256}} | data
    if "sources" not in data:
        (folder / "chats.jsonl").write_text(lines([chat(n) for n in range(20)]))
        data["sources"] = [{"source": str(folder / "chats.jsonl"), "name": "chats"}]
    (folder / "mix.yaml").write_text(yaml.safe_dump({"name": "x", "policy": {"model": model}, "data": data}))
    return load_recipe(folder / "mix.yaml")


# -- files ---------------------------------------------------------------------------------------------


def rows_of(path: Path) -> tuple[int, list[str]]:
    found = list(read_rows(str(path)))
    return sum(isinstance(row, Row) for row in found), [r.cause for r in found if isinstance(r, BadRow)]


ROWS = [chat(n) for n in range(20)]


@pytest.mark.parametrize(
    "name,data,rows,causes",
    [
        ("odd.jsonl", lines(ROWS).encode("utf-16")[:-1], 19, ["bad_encoding"]),
        ("a.jsonl.gz", gzip.compress(lines(ROWS).encode("utf-16")), 20, []),
        ("a.json", json.dumps(ROWS).encode("utf-16"), 20, []),
        ("odd.json", json.dumps(ROWS).encode("utf-16")[:-1], 19, ["bad_encoding"]),
        ("first.json", b'[{"a": "\xe9"}, {"a": "b"}]', 1, ["bad_encoding"]),
        ("one.json", b'{\n"a": "\xe9"}', 0, ["bad_encoding"]),
        ("two.json", b'[{"a": 1},\n{"a": 2}]\n[{"a": 3}]', 2, ["broken_json"]),
    ],
)
def test_wrong_encodings_lose_only_their_rows(
    tmp_path: Path, name: str, data: bytes, rows: int, causes: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    assert rows_of(tmp_path / name) == (rows, causes)


def test_half_a_letter_in_utf_16_leaves_the_other_rows(tmp_path: Path) -> None:
    data = lines(ROWS).encode("utf-16")
    (tmp_path / "a.jsonl").write_bytes(data[:100] + b"\x00\xd8\x41\x00" + data[104:])
    count, causes = rows_of(tmp_path / "a.jsonl")
    assert count + len(causes) == len(ROWS) and count >= len(ROWS) - 1


def test_a_file_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.jsonl")).write_text(lines(ROWS))
    with pytest.raises(SourceError, match="not UTF-8"):
        list(read_rows(str(tmp_path)))
