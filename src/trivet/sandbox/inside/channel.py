"""Framed JSON messages over one descriptor: four bytes of length, big-endian, then UTF-8.

In a program started by `talk` this is the module `channel`, bound to descriptor 3.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

FD = 3
HEAD = struct.Struct(">I")
MAX_BYTES = 64 << 20


def pack(message: Any) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return HEAD.pack(len(data)) + data


def send(message: Any) -> None:
    """Send a JSON-able value to the host."""
    left = memoryview(pack(message))
    while left:
        left = left[os.write(FD, left) :]


def recv() -> Any:
    """The host's next message. EOFError when it has hung up."""
    (length,) = HEAD.unpack(_exactly(HEAD.size))
    return json.loads(_exactly(length))


def _exactly(count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        data = os.read(FD, min(count - len(parts), 1 << 20))
        if not data:
            raise EOFError("the host has hung up")
        parts += data
    return bytes(parts)
