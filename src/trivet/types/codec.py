"""A container for numpy columns: compact, versioned, checked, and without pickle.

Layout: magic (4 bytes), format version (u16), header length and CRC-32 (u32 each), header (JSON), then
one block per column, compressed with zlib where that makes it shorter. The header names every block's
dtype, shape, offset, length and CRC-32, so that one column can be read without touching the others.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

MAGIC = b"TRVT"
VERSION = 2  # 2: short columns stay plain, a trace's nodes are in the header
_PREFIX = struct.Struct("<4sHII")
# Only what a trace needs: no objects, no strings, nothing whose decoding could run code.
_DTYPES = {"|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<f2", "<f4", "<f8"}
_MAX_COLUMN_BYTES = 1 << 32
_PLAIN_BYTES = 128  # columns up to this size are not compressed: starting the compressor costs more


class CodecError(ValueError):
    """A blob is not one of ours, is of another format, or is damaged."""


def _little_endian(name: str, column: np.ndarray) -> np.ndarray:
    array = column.astype(column.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in _DTYPES:
        raise CodecError(f"column {name!r}: dtype {array.dtype} cannot be stored")
    return array


def pack(columns: Mapping[str, np.ndarray], meta: Any, level: int = 1) -> bytes:
    """Columns (any shapes, little-endian numeric) and JSON-able `meta` as one blob."""
    blocks: list[bytes] = []
    table: dict[str, Any] = {}
    offset = 0
    for name, column in columns.items():
        array = column if column.dtype.str in _DTYPES else _little_endian(name, column)
        raw = array.tobytes()
        block = raw if len(raw) <= _PLAIN_BYTES else zlib.compress(raw, level)
        if len(block) >= len(raw):  # a block as long as its column is the column
            block = raw
        table[name] = {
            "dtype": array.dtype.str,
            "shape": list(column.shape),
            "offset": offset,
            "length": len(block),
            "crc": zlib.crc32(block),
        }
        blocks.append(block)
        offset += len(block)
    header = json.dumps({"columns": table, "meta": meta}, separators=(",", ":")).encode()
    return b"".join([_PREFIX.pack(MAGIC, VERSION, len(header), zlib.crc32(header)), header, *blocks])


def _header(blob: bytes) -> tuple[dict[str, Any], int]:
    if len(blob) < _PREFIX.size:
        raise CodecError(f"blob of {len(blob)} bytes is too short to be a trivet record")
    magic, version, length, crc = _PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise CodecError(f"blob starts with {magic!r}, not with {MAGIC!r}: not a trivet record")
    if version > VERSION:
        raise CodecError(f"blob has format version {version}, this trivet reads {VERSION}: upgrade trivet")
    if version < VERSION:
        raise CodecError(
            f"blob has format version {version}, this trivet reads {VERSION}: an older trivet wrote it; go "
            "on with that one, or start a new run folder"
        )
    body = _PREFIX.size + length
    text = blob[_PREFIX.size : body]
    if len(text) != length or zlib.crc32(text) != crc:
        raise CodecError("blob's header is damaged (length or checksum differs)")
    try:
        header = json.loads(text)
        return {"columns": dict(header["columns"]), "meta": header["meta"]}, body
    except (ValueError, KeyError, TypeError) as error:
        raise CodecError(f"blob's header is damaged: {error}") from error


def _column(blob: bytes, body: int, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    try:
        dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        start, length, crc = int(entry["offset"]), int(entry["length"]), int(entry["crc"])
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"column {name!r}: its table entry is damaged: {error!r}") from error
    if dtype not in _DTYPES or min(shape, default=0) < 0 or start < 0 or length < 0:
        raise CodecError(f"column {name!r}: its table entry is damaged: {dict(entry)}")
    block = blob[body + start : body + start + length]
    if len(block) != length or zlib.crc32(block) != crc:
        raise CodecError(f"column {name!r} is damaged (length or checksum differs)")
    expected = np.dtype(dtype).itemsize * math.prod(shape)
    if expected > _MAX_COLUMN_BYTES:
        raise CodecError(f"column {name!r} claims {expected} bytes: refused")
    raw = block if length == expected else zlib.decompressobj().decompress(block, expected + 1)
    if len(raw) != expected:
        raise CodecError(f"column {name!r}: {len(raw)} bytes where its shape says {expected}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def unpack(blob: bytes) -> tuple[dict[str, np.ndarray], Any]:
    """All columns (read-only arrays) and the meta object. Raises CodecError."""
    header, body = _header(blob)
    columns = {name: _column(blob, body, name, e) for name, e in header["columns"].items()}
    return columns, header["meta"]


def read_column(blob: bytes, name: str) -> np.ndarray:
    """One column, without decompressing the others. Raises CodecError, KeyError."""
    header, body = _header(blob)
    if name not in header["columns"]:
        raise KeyError(f"no column {name!r}; the record has {sorted(header['columns'])}")
    return _column(blob, body, name, header["columns"][name])
