"""Rows of files and hub data sets, each with the place it came from."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trivet.tasks.base import TasksetError, nearest

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


class Record(NamedTuple):
    """One row, and where it stands ("data.jsonl:12")."""

    row: dict[str, Any]
    place: str


def looks_like_file(source: str) -> bool:
    """A path or a glob, rather than a name on a hub."""
    return source.endswith(SUFFIXES) or bool(glob.has_magic(source)) or Path(source).expanduser().exists()


def find_files(source: str) -> list[Path]:
    """The files a path or glob names, sorted. Raises TasksetError when there are none."""
    path = Path(source).expanduser()
    if path.is_dir():
        raise TasksetError(f"{path} is a directory; name its files: {path}/*.jsonl")
    if path.is_file():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if found:
        return found
    if glob.has_magic(source):
        raise TasksetError(f"no file matches {source!r} (seen from {Path.cwd()})")
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise TasksetError(f"no such file: {path} (seen from {Path.cwd()}){nearest(path.name, siblings)}")


def read_files(source: str) -> Iterator[Record]:
    """Rows of all files a path or glob names, in order."""
    for path in find_files(source):
        name = path.name.lower()
        if not name.endswith(SUFFIXES):
            raise TasksetError(f"{path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        try:
            yield from _parquet(path) if name.endswith(".parquet") else _json(path)
        except (OSError, EOFError, zlib.error) as error:
            raise TasksetError(f"{path} cannot be read: {error}") from error
        except UnicodeDecodeError as error:
            raise TasksetError(f"{path} is not UTF-8 text: {error}") from error


def _json(path: Path) -> Iterator[Record]:
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        if _first_letter(file) == "[":
            yield from _array(file.read(), path)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Record(_row(_decode(line, f"{path}:{number}"), f"{path}:{number}"), f"{path}:{number}")


def _first_letter(file: Any) -> str:
    letter = ""
    for line in file:
        if line.strip():
            letter = line.strip()[0]
            break
    file.seek(0)
    return letter


def _array(text: str, path: Path) -> Iterator[Record]:
    rows = _decode(text, str(path))
    for number, row in enumerate(rows):
        place = f"{path}[{number}]"
        yield Record(_row(row, place), place)


def _decode(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f" at line {error.lineno}" if error.lineno > 1 else ""
        raise TasksetError(f"{place}: not JSON{line}, column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number of thousands of digits
        raise TasksetError(f"{place}: {error}") from error
    except RecursionError as error:
        raise TasksetError(f"{place}: JSON nested too deeply") from error


def _row(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TasksetError(f"{place}: a row is an object with columns, this is a {type(value).__name__}")
    return value


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(row, f"{path}:{number}")
    except pa.ArrowException as error:
        raise TasksetError(f"{path} is not a Parquet file that can be read: {error}") from error


_HUB_ANSWER_S = 5.0  # a hub that has not answered by then is taken as out of reach


def read_hub(name: str, subset: str | None, split: str) -> Iterator[Record]:
    """Rows of a data set of the Hugging Face hub (or of a loader the library knows).

    A hub out of reach is asked once, not for each data set: what the library has cached is then read, and
    what it has not is an error at once. Raises TasksetError.
    """
    try:
        import datasets
    except ImportError as error:
        raise TasksetError(
            f"{name!r} is no file here; to read it as a hub data set install trivet[datasets]"
        ) from error
    problem = _hub_problem()
    try:
        with _offline(problem is not None):
            data = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises many kinds: not found, no network, unknown split ...
        reason = (str(error).splitlines() or [""])[0]
        why = f"{type(error).__name__}: {reason}" if problem is None else problem
        raise TasksetError(
            f"{name!r} is no file here, and the hub does not give it (subset {subset!r}, split {split!r}): "
            f"{why}. Give a local file instead (source: data.jsonl, data/*.parquet), or check name and "
            "network"
        ) from error
    for number, row in enumerate(data):
        yield Record(dict(row), f"{name}[{split}:{number}]")


@cache
def _hub_problem() -> str | None:
    """Why the hub cannot be reached, None when it answers. The libraries themselves would try for half a
    minute, for every data set anew."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache does not hold it"
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_ANSWER_S)
    except Exception as error:  # of whichever HTTP client the library uses
        return f"{constants.ENDPOINT} cannot be reached ({error}), and the cache does not hold it"
    return None


@contextmanager
def _offline(on: bool) -> Iterator[None]:
    """The hub's libraries look into their cache only."""
    from datasets import config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = on or before[0]
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before
