"""Heavy columns as files named by the SHA-256 of their bytes, read through read-only memory maps.

The controller writes a name; the rank that trains the row maps the file. A file holds the array's bytes in C
order and nothing else, so `sha256sum` proves it and media stay what they are.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from trivet.buffer import faults
from trivet.buffer.errors import AttachmentError
from trivet.types import Attachment

_DIGITS = frozenset("0123456789abcdef")


class AttachmentStore:
    """Files under `directory`, two levels deep. Safe for threads and processes of one machine.

    With `verify` (default) a file's hash is checked the first time this store opens it.
    """

    def __init__(self, directory: str | Path, *, verify: bool = True) -> None:
        self.directory = Path(directory)
        self.verify = verify
        self._verified: set[str] = set()
        self._lock = threading.Lock()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AttachmentError(f"attachment folder {self.directory} cannot be made: {error}") from error

    def path(self, name: str) -> Path:
        """The file of `name`. Raises AttachmentError when `name` is not a hash, so it stays in the folder."""
        if len(name) != 64 or not _DIGITS.issuperset(name):
            raise AttachmentError(f"attachment name {name!r} is not a SHA-256 in lower-case hexadecimal")
        return self.directory / name[:2] / name

    def put(self, array: np.ndarray, kind: str, start: int, stop: int) -> Attachment:
        """Store `array` (any shape, numeric); `start`/`stop` are token positions inside its node.

        Equal bytes are stored once. Raises AttachmentError when the file cannot be written.
        """
        data = np.ascontiguousarray(array)
        data = data.astype(data.dtype.newbyteorder("<"), copy=False)
        if data.dtype.hasobject or data.dtype.names is not None:
            raise AttachmentError(f"attachment of kind {kind!r}: dtype {array.dtype} cannot be stored")
        if not 0 <= start <= stop:
            raise AttachmentError(
                f"attachment of kind {kind!r}: token range [{start}, {stop}) is not a range"
            )
        raw = data.reshape(-1).view(np.uint8)  # no copy
        name = hashlib.sha256(memoryview(raw)).hexdigest()  # pyright: ignore[reportArgumentType]
        path = self.path(name)
        try:
            if not _touched(path, raw.nbytes):
                self._write(path, raw)
        except OSError as error:
            raise AttachmentError(
                f"attachment {name} ({raw.nbytes} bytes) cannot be written: {error}"
            ) from error
        return Attachment(name, kind, start, stop, data.dtype.str, tuple(np.shape(array)))

    def _write(self, path: Path, raw: np.ndarray) -> None:
        path.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(memoryview(raw))  # pyright: ignore[reportArgumentType]
                file.flush()
                os.fsync(file.fileno())
            faults.point("attachment.written")
            os.replace(temporary, path)
        except BaseException:  # Ctrl-C too: no half-written file stays behind
            os.unlink(temporary)
            raise

    def open(self, attachment: Attachment) -> np.ndarray:
        """The array, read-only and mapped, not read. Raises AttachmentError on a missing or damaged file."""
        path = self.path(attachment.name)
        dtype = np.dtype(attachment.dtype)
        expected = dtype.itemsize * int(np.prod(attachment.shape, dtype=np.int64))
        try:
            size = path.stat().st_size
        except OSError as error:
            raise AttachmentError(
                f"attachment {attachment.name} ({attachment.kind}) is missing from {self.directory}: was the "
                "folder moved, or the rollout collected?"
            ) from error
        if size != expected:
            raise AttachmentError(
                f"attachment {path} ({attachment.kind}) is damaged: {size} bytes where {attachment.dtype} "
                f"of shape {attachment.shape} needs {expected}"
            )
        if size == 0:
            empty = np.empty(attachment.shape, dtype)
            empty.flags.writeable = False
            return empty
        mapped = np.memmap(path, np.uint8, mode="r")
        self._check(attachment.name, mapped)
        return mapped.view(dtype).reshape(attachment.shape)

    def _check(self, name: str, raw: np.ndarray) -> None:
        with self._lock:
            known = name in self._verified
        if known or not self.verify:
            return
        found = hashlib.sha256(memoryview(raw)).hexdigest()  # pyright: ignore[reportArgumentType]
        if found != name:
            raise AttachmentError(
                f"attachment {self.path(name)} is damaged: its bytes hash to {found[:16]}..., not to "
                "its name; the disk may be failing. Take the rollout's issue out with fail()"
            )
        with self._lock:
            self._verified.add(name)

    def free(self, names: Iterable[str] | Mapping[str, float]) -> list[str]:
        """Remove files; those removed. Names already gone are passed over; open maps stay valid.

        With a mapping to times (seconds since the epoch), a file put again after its time is kept.
        """
        limits = names if isinstance(names, Mapping) else dict.fromkeys(names, float("inf"))
        freed = []
        for name, limit in limits.items():
            path = self.path(name)
            try:
                if path.stat().st_mtime > limit:
                    continue
                faults.point("attachment.unlink")
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise AttachmentError(f"attachment {path} cannot be removed: {error}") from error
            with self._lock:
                self._verified.discard(name)
            freed.append(name)
        return freed


def _touched(path: Path, size: int) -> bool:
    """The file is there, whole, and now marked as in use again, so that `free` keeps it."""
    try:
        if path.stat().st_size != size:
            return False
        os.utime(path)
    except FileNotFoundError:
        return False
    return True
