"""Length-prefixed JSON over a stream socket: how a pool and its workers talk. No pickle, nothing shared."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_FRAME = 64 << 20


class FrameTimeout(TimeoutError):
    """The other side did not finish its frame before the deadline."""


class FrameClosed(EOFError):
    """The other side is gone."""


def _wait(sock: socket.socket, deadline: float | None, write: bool) -> None:
    """Block until `sock` is ready or `deadline` (monotonic) passes."""
    poller = select.poll()
    poller.register(sock, select.POLLOUT if write else select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not poller.poll(None if left is None else left * 1000):
        raise FrameTimeout


def send(sock: socket.socket, value: Any, deadline: float | None = None) -> None:
    """Send one value. Raises TypeError/ValueError if it is not JSON, FrameTimeout, FrameClosed."""
    body = json.dumps(value, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        _wait(sock, deadline, write=True)
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise FrameClosed(str(error)) from error


def _exactly(sock: socket.socket, n: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < n:
        _wait(sock, deadline, write=False)
        try:
            piece = sock.recv(min(n - len(data), 1 << 20), socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except OSError as error:
            raise FrameClosed(str(error)) from error
        if not piece:
            raise FrameClosed("end of stream")
        data += piece
    return bytes(data)


def receive(sock: socket.socket, deadline: float | None = None) -> Any:
    """One value. Raises FrameTimeout, FrameClosed (also for bytes that are not a frame)."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, deadline))
    if length > MAX_FRAME:
        raise FrameClosed(f"a frame claims {length} bytes")
    try:
        return json.loads(_exactly(sock, length, deadline))
    except ValueError as error:
        raise FrameClosed(f"not JSON: {error}") from error


def dirty(sock: socket.socket) -> bool:
    """There is something to read where nothing is expected: the end of the stream, or bytes unasked for."""
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLHUP)
    return bool(poller.poll(0))


def hung_up(sock: socket.socket) -> bool:
    """The other side is gone."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
