"""Rows of any file a data set comes in, in pieces that workers can read side by side.

What cannot be read is a `BadRow` with its file and line; the rest goes on. A piece never holds more than one
row (or one Parquet batch) in memory, however large the file is.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

SUFFIXES = (
    *(".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".ndjson"),
    *(".parquet", ".arrow"),
)
LARGEST_ROW = 256 << 20  # bytes; a longer line is no conversation
_BLOCK = 1 << 20
_BATCH = 256  # rows of a columnar file decoded at once

Kind = Literal["lines", "array", "parquet", "arrow", "hub"]


class SourceError(ValueError):
    """A source names nothing that can be read; says what was looked for and where."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands ("chats.jsonl:12")."""

    row: dict[str, Any]
    place: str


@dataclass(frozen=True, slots=True)
class BadRow:
    """What stands at `place` is no row: `cause` is a word to count by."""

    cause: str
    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one file (or hub data set) that is read on its own.

    `start`, `stop`: bytes of a plain file of lines, row groups of a Parquet file, rows of a hub data set, 0
    and -1 for what is read whole. `first`: number of the first line or row in it, counted from 1.
    """

    path: str
    kind: Kind
    start: int = 0
    stop: int = -1
    first: int = 1
    subset: str | None = None
    split: str = "train"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_files(source: str, split: str = "train") -> list[Path]:
    """The files that a path, a glob or a directory names, sorted. Raises SourceError when there are none.

    Of a directory all files of known kinds, in a folder named like the split if it has one.
    """
    path = Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        inner = path / split if (path / split).is_dir() else path
        found = sorted(p for p in inner.rglob("*") if p.is_file() and _suffix(p) and p.name != "state.json")
        found = [p for p in found if p.name not in ("dataset_info.json", "dataset_dict.json")]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        raise SourceError(f"nothing to read at {source!r} (seen from {Path.cwd()})")
    for one in found:
        if not _suffix(one):
            raise SourceError(f"{one}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        if not _encoded(str(one)):
            raise SourceError(f"{str(one)!r}: the name is not UTF-8; rename the file")
    return found


def _suffix(path: Path) -> str:
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def on_disk(source: str) -> bool:
    """A path or a glob, rather than a name on a hub."""
    return (
        source.startswith((".", "/", "~"))
        or source.lower().endswith(SUFFIXES)
        or glob.has_magic(source)
        or Path(source).expanduser().exists()
    )


def pieces(
    source: str, *, subset: str | None = None, split: str = "train", size: int = 64 << 20
) -> list[Piece]:
    """A source cut into pieces of about `size` bytes; cuts depend on the files and `size` only.

    Raises SourceError, OSError.
    """
    if not on_disk(source):
        return _hub_pieces(source, subset, split)
    out: list[Piece] = []
    for path in find_files(source, split):
        name, suffix = str(path), _suffix(path)
        if suffix == ".parquet":
            out += _parquet_pieces(name, size)
        elif suffix == ".arrow":
            out.append(Piece(name, "arrow"))
        elif _is_array(path):
            out.append(Piece(name, "array"))
        elif suffix in (".jsonl", ".ndjson", ".json") and not _wide(path):
            out += _line_pieces(path, size)
        else:
            out.append(Piece(name, "lines"))
    return out


# -- planning ------------------------------------------------------------------------------------


def _line_pieces(path: Path, size: int) -> Iterator[Piece]:
    """Cuts after the first line end at or behind every `size` bytes; lines are counted on the way."""
    total = path.stat().st_size
    if total <= size:
        yield Piece(str(path), "lines")
        return
    with open(path, "rb") as file:
        start, first = 0, 1
        while start < total:
            lines, stop = _count_to(file, start, min(start + size, total))
            yield Piece(str(path), "lines", start, stop, first)
            start, first = stop, first + lines


def _count_to(file: BinaryIO, start: int, wanted: int) -> tuple[int, int]:
    """(line ends from `start` to the cut, the cut: behind the first line end at or after `wanted`)."""
    file.seek(start)
    left, lines = wanted - start, 0
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        lines, left = lines + block.count(b"\n"), left - len(block)
    position = wanted - left
    rest = file.readline()
    return lines + rest.endswith(b"\n"), position + len(rest)


def _parquet_pieces(name: str, size: int) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(name) as file:
            about = file.metadata
            sizes = [about.row_group(i).total_byte_size for i in range(about.num_row_groups)]
            rows = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    except pa.ArrowException as error:
        raise SourceError(f"{name} is not a Parquet file that can be read: {error}") from error
    start, first = 0, 1
    while start < len(sizes):
        stop, held = start, 0
        while stop < len(sizes) and (stop == start or held + sizes[stop] <= size):
            held, stop = held + sizes[stop], stop + 1
        yield Piece(name, "parquet", start, stop, first)
        first, start = first + sum(rows[start:stop]), stop


def _hub_pieces(name: str, subset: str | None, split: str, rows: int = 50_000) -> list[Piece]:
    count = len(_hub(name, subset, split))
    return [
        Piece(name, "hub", start, min(start + rows, count), start + 1, subset, split)
        for start in range(0, count, rows)
    ]


def _hub(name: str, subset: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SourceError(
            f"{name!r} is no file here; to read it as a hub data set install trivet[datasets]"
        ) from error
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises many kinds: not found, no network, unknown split ...
        reason = (str(error).splitlines() or [""])[0]
        raise SourceError(
            f"{name!r} is no file here, and the hub does not give it (subset {subset!r}, split {split!r}): "
            f"{type(error).__name__}: {reason}"
        ) from error


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    name = str(path).lower()
    if name.endswith(".zst"):
        import pyarrow as pa

        with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, "zstd") as stream:
            yield _Buffered(stream)  # type: ignore[misc]
    elif name.endswith(".gz"):
        with gzip.open(path, "rb") as file:
            yield file  # type: ignore[misc]
    else:
        with open(path, "rb") as file:
            yield file


class _Buffered:
    """`read` and `readline` over a decompressing stream that has only the first."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._held = stream, b""

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            held, self._held = self._held, b""
            return held + self._stream.read()
        while len(self._held) < size and (block := self._stream.read(_BLOCK)):
            self._held += bytes(block)
        out, self._held = self._held[:size], self._held[size:]
        return out

    def readline(self, limit: int = -1) -> bytes:
        parts, length = [], 0
        while True:
            end = self._held.find(b"\n")
            if end >= 0:
                parts.append(self._held[: end + 1])
                self._held = self._held[end + 1 :]
                return b"".join(parts)
            parts.append(self._held)
            length += len(self._held)
            self._held = bytes(self._stream.read(_BLOCK))
            if not self._held or 0 <= limit <= length:
                return b"".join(parts)


def _head(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            return file.read(4096)
    except (OSError, EOFError, zlib.error):
        return b""  # reading it will say what is wrong


def _wide(path: Path) -> bool:
    """UTF-16, by its mark: line ends are two bytes there."""
    return _head(path)[:2] in (b"\xff\xfe", b"\xfe\xff")


def _is_array(path: Path) -> bool:
    """One JSON document (a list of rows, or a row over several lines), rather than a document a line."""
    head = _head(path)
    if _wide(path):
        head = head.decode("utf-16", "ignore").encode()
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    line, end, rest = text.partition(b"\n")
    try:
        whole = isinstance(json.loads(line), dict | list)
    except ValueError:
        whole = False
    if text[:1] == b"[":
        # A first line that is a list of its own, and more lines behind it, are (odd) rows.
        return not whole or not (end and rest.strip())
    document = path.name.lower().endswith((".json", ".json.gz", ".json.zst"))
    return text[:1] == b"{" and document and not whole and bool(end)


# -- reading -------------------------------------------------------------------------------------


def read(piece: Piece) -> Iterator[Row | BadRow]:
    """The rows of a piece, in order. What is no row, and a file that breaks off, is a `BadRow`."""
    readers = {"lines": _lines, "array": _array, "parquet": _parquet, "arrow": _arrow, "hub": _hub_rows}
    rows = readers[piece.kind](piece)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except (OSError, EOFError, zlib.error) as error:
            yield BadRow("unreadable_file", f"reading stopped: {error}", piece.path)
            return
        yield row


def _row(value: Any, place: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(value, place)
    text = f"a row is an object with columns, this is a {type(value).__name__}"
    return BadRow("not_an_object", text, place)


def _parse(text: bytes | str, place: str) -> Row | BadRow:
    try:
        return _row(json.loads(text), place)
    except json.JSONDecodeError as error:
        return BadRow("broken_json", f"column {error.colno}: {error.msg}", place)
    except UnicodeDecodeError as error:
        return BadRow("bad_encoding", f"not UTF-8 at byte {error.start}", place)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; nesting without end
        return BadRow("broken_json", str(error), place)


def _lines(piece: Piece) -> Iterator[Row | BadRow]:
    path = Path(piece.path)
    if piece.stop < 0 and _wide(path):
        yield from _wide_lines(piece.path)
        return
    with _opened(path) as file:
        at, number = piece.start, piece.first - 1
        if at:
            file.seek(at)
        while piece.stop < 0 or at < piece.stop:
            line = file.readline(LARGEST_ROW)
            if not line:
                return
            number += 1
            at += len(line)
            place = f"{piece.path}:{number}"
            if len(line) >= LARGEST_ROW and not line.endswith(b"\n"):
                while (rest := file.readline(LARGEST_ROW)) and not rest.endswith(b"\n"):
                    at += len(rest)
                at += len(rest)
                yield BadRow("row_too_large", f"a line of over {LARGEST_ROW >> 20} MB", place)
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parse(line, place)


def _wide_lines(path: str) -> Iterator[Row | BadRow]:
    """Lines in UTF-16. Half a letter stays in its row, where normalising refuses it."""
    decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
    held, number, block = "", 0, b"-"
    with _opened(path) as file:
        while block:
            block = file.read(_BLOCK)
            try:
                held += decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                yield BadRow("bad_encoding", f"not UTF-16: {error.reason}", f"{path}:{number + 1}")
                return
            *lines, held = held.split("\n")
            for line in lines if block else [*lines, held]:
                number += 1
                if line.strip():
                    yield _parse(line, f"{path}:{number}")


def _array(piece: Piece) -> Iterator[Row | BadRow]:
    """Elements one after the other; the text read is never longer than the longest of them, twice."""
    decoder = json.JSONDecoder()
    with _opened(piece.path) as file:
        text = _Text(file, "utf-16" if _wide(Path(piece.path)) else "utf-8-sig")
        place, number = piece.path, 0
        try:
            if text.peek() == "{":
                yield _parse(text.rest(), place)
                return
            text.skip(1)  # the bracket
            while (sign := text.peek()) not in ("]", ""):
                if sign == ",":
                    text.skip(1)
                    continue
                place = f"{piece.path}[{number}]"
                value, encoded = text.value(decoder)
                yield _row(value, place) if encoded else BadRow("bad_encoding", "not UTF-8", place)
                number += 1
            place = f"{piece.path}[{number}]"
            if sign != "]":
                yield BadRow("broken_json", "the list is not closed: the file breaks off", place)
            elif text.skip(1) or text.peek():
                yield BadRow("broken_json", "more stands behind the end of the list; it is not read", place)
        except ValueError as error:
            cause = "bad_encoding" if isinstance(error, UnicodeDecodeError) else "broken_json"
            yield BadRow(cause, f"{error}; the rest of the list cannot be read", place)


class _Text:
    """The letters of a file from a moving place on, as many as are needed."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file, self._ended = file, False
        # What is wrong stays as half a letter, so that only the row it stands in is lost.
        self._errors = "surrogateescape" if encoding == "utf-8-sig" else "surrogatepass"
        self._decoder = codecs.getincrementaldecoder(encoding)(self._errors)
        self._held, self._at = "", 0

    def _more(self, size: int = _BLOCK) -> bool:
        if self._ended:
            return False
        block = self._file.read(size)
        self._ended = not block
        self._held = self._held[self._at :] + self._decoder.decode(block, self._ended)
        self._at = 0
        return not self._ended

    def peek(self) -> str:
        """The next letter that is no blank; "" at the end."""
        while True:
            while self._at < len(self._held):
                if not self._held[self._at].isspace():
                    return self._held[self._at]
                self._at += 1
            if not self._more():
                return ""

    def skip(self, n: int) -> None:
        self._at += n

    def rest(self) -> bytes:
        while self._more():
            pass
        return self._held[self._at :].encode("utf-8", self._errors)

    def value(self, decoder: json.JSONDecoder) -> tuple[Any, bool]:
        """(the JSON value that begins here, whether all of it is letters). Raises ValueError."""
        size = _BLOCK
        while True:
            try:
                value, end = decoder.raw_decode(self._held, self._at)
            except json.JSONDecodeError:
                if len(self._held) - self._at > LARGEST_ROW or not self._more(size):
                    raise
                size *= 2
                continue
            except RecursionError as error:
                raise ValueError("nested too deeply") from error
            if end == len(self._held) and self._more(size):  # a number may go on
                continue
            text, self._at = self._held[self._at : end], end
            return value, _encoded(text)


def _encoded(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _parquet(piece: Piece) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = piece.first
    try:
        with pq.ParquetFile(piece.path) as file:
            for batch in file.iter_batches(_BATCH, row_groups=range(piece.start, piece.stop)):
                for row in batch.to_pylist():
                    yield Row(row, f"{piece.path}:{number}")
                    number += 1
    except pa.ArrowException as error:
        yield BadRow("unreadable_file", f"reading stopped: {error}", f"{piece.path}:{number}")


def _arrow(piece: Piece) -> Iterator[Row | BadRow]:
    """The files of a data set that the `datasets` library saved to disk."""
    import pyarrow as pa

    number = 1
    try:
        with pa.memory_map(piece.path) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                for start in range(0, batch.num_rows, _BATCH):
                    for row in batch.slice(start, _BATCH).to_pylist():
                        yield Row(row, f"{piece.path}:{number}")
                        number += 1
    except pa.ArrowException as error:
        yield BadRow("unreadable_file", f"reading stopped: {error}", f"{piece.path}:{number}")


def _hub_rows(piece: Piece) -> Iterator[Row | BadRow]:
    data = _hub(piece.path, piece.subset, piece.split)
    for number in range(piece.start, piece.stop):
        yield Row(dict(data[number]), f"{piece.path}[{piece.split}:{number}]")


def read_rows(source: str, *, subset: str | None = None, split: str = "train") -> Iterator[Row | BadRow]:
    """All rows of a source, in order. Raises SourceError."""
    for piece in pieces(source, subset=subset, split=split, size=1 << 62):
        yield from read(piece)
