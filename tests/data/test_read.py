"""Every kind of file, whole and in pieces; what is broken is said with its line and the rest goes on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.read import BadRow, Row, SourceError, pieces, read, read_rows

ROWS = [{"n": i, "text": "é\u2028" * (i % 7)} for i in range(50)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, data: bytes) -> Path:
    name = path.name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]))
    elif name.endswith(".zst"):
        with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as out:
            out.write(data)
    else:
        path.write_bytes(data)
    return path


def good(found: Any) -> list[dict[str, Any]]:
    assert all(isinstance(row, Row) for row in found), found
    return [row.row for row in found]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.zst"])
def test_lines_of_json(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"\xef\xbb\xbf" + lines(ROWS) + b"\n  \n")
    found = list(read_rows(str(path)))
    assert good(found) == ROWS
    assert found[3].place == f"{path}:4"


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_rows(tmp_path: Path, name: str, indent: int | None) -> None:
    path = write(tmp_path / name, json.dumps(ROWS, indent=indent).encode())
    found = list(read_rows(str(path)))
    assert good(found) == ROWS
    assert found[3].place == f"{path}[3]"


def test_one_row_over_several_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps(ROWS[0], indent=1).encode())
    assert good(list(read_rows(str(path)))) == ROWS[:1]


def test_utf_16(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(ROWS).decode().encode("utf-16"))
    assert good(list(read_rows(str(path)))) == ROWS


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert good(list(read_rows(str(tmp_path / "a.parquet")))) == ROWS
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    with (
        pa.OSFile(str(folder / "data-00000.arrow"), "wb") as raw,
        pa.ipc.new_stream(raw, table.schema) as out,
    ):
        out.write_table(table)
    assert good(list(read_rows(str(tmp_path / "saved")))) == ROWS


@given(size=st.integers(1, 2000), end=st.booleans())
def test_pieces_are_the_whole_with_the_same_places(
    tmp_path_factory: pytest.TempPathFactory, size: int, end: bool
) -> None:
    folder = tmp_path_factory.mktemp("p")
    data = lines(ROWS[:20]) + b"\n" + lines(ROWS[20:])
    path = write(folder / "a.jsonl", data if end else data[:-1])
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "b.parquet", row_group_size=7)
    for file in (path, folder / "b.parquet"):
        parts = pieces(str(file), size=size)
        together = [row for part in parts for row in read(part)]
        assert together == list(read_rows(str(file)))
        assert good(together) == ROWS
        assert len(parts) > 1 or size > 400


def test_what_is_broken_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    bad = [b'{"a": 1', b'{"a": "\xff"}', b"[1, 2]", b'{"a": ' + b"[" * 100_000 + b"}", b"null"]
    path = write(tmp_path / "a.jsonl", lines(ROWS[:1]) + b"\n".join(bad) + b"\n" + lines(ROWS[1:2]))
    found = list(read_rows(str(path)))
    causes = [row.cause for row in found if isinstance(row, BadRow)]
    assert causes == ["broken_json", "bad_encoding", "not_an_object", "broken_json", "not_an_object"]
    assert [row.place for row in found] == [f"{path}:{n}" for n in range(1, 8)]
    assert good([found[0], found[-1]]) == ROWS[:2]


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json"])
def test_a_file_that_breaks_off_gives_what_it_has_and_says_so(tmp_path: Path, name: str, cut: float) -> None:
    data = json.dumps(ROWS).encode() if name == "a.json" else lines(ROWS)
    whole = write(tmp_path / name, data).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * cut)])
    found = list(read_rows(str(tmp_path / name)))
    assert isinstance(found[-1], BadRow)
    assert found[-1].cause in ("unreadable_file", "broken_json")
    assert good(found[:-1]) == ROWS[: len(found) - 1]


def test_an_element_longer_than_a_block_and_numbers_at_block_ends(tmp_path: Path) -> None:
    rows = [{"text": "x" * (3 << 20)}, {"n": 12345678901234567890}, {"text": "y" * (1 << 20)}]
    path = write(tmp_path / "a.json", json.dumps(rows).encode())
    assert good(list(read_rows(str(path)))) == rows


def test_sources_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nothing to read at"):
        pieces(str(tmp_path / "*.jsonl"))
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(SourceError, match="unknown kind of file"):
        pieces(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(SourceError, match="not a Parquet file"):
        pieces(str(tmp_path / "a.parquet"))


def test_globs_and_directories_are_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz"):
        write(tmp_path / name, lines(ROWS[:1]))
    assert [Path(p.path).name for p in pieces(str(tmp_path))] == ["a.jsonl.gz", "b.jsonl"]
    assert [Path(p.path).name for p in pieces(str(tmp_path / "*.jsonl"))] == ["b.jsonl"]
