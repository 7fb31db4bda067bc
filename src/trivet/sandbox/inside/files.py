"""Reading and writing a sandbox's files from within its walls, so that a symlink can only lead inside.

`serve` runs in a process that has joined the sandbox, without capabilities and under its limits. Data goes
over descriptors 0 and 1, errors as text over 2; the exit code is 0 or 1.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from typing import Any, BinaryIO

_CHUNK = 1 << 16
# Python 3.11 before 3.11.4 has no filters. Here they only keep names tidy: the walls are around this process.
_FILTER: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}


def serve(order: dict[str, Any]) -> int:
    """Carry out {"do": read | write | pack | unpack, "path": ...}; returns the exit code."""
    try:
        path = order["path"]
        if order["do"] == "read":
            _read(path, order["limit_bytes"])
        elif order["do"] == "write":
            _write(path)
        elif order["do"] == "pack":
            _pack(path)
        else:
            _unpack(path)
    except (OSError, tarfile.TarError, ValueError, MemoryError) as error:
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="replace"))
        return 1
    return 0


def _read(path: str, limit: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(f"{path} is not a regular file")
    size = os.fstat(fd).st_size
    if size > limit:
        raise OSError(f"{path} has {size} bytes, more than the limit of {limit}")
    with open(fd, "rb") as source, open(1, "wb", closefd=False) as out:
        shutil.copyfileobj(source, out, _CHUNK)


def _write(path: str) -> None:
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(f"{path} is not a regular file")
    with open(0, "rb", closefd=False) as source, open(fd, "wb") as target:
        shutil.copyfileobj(source, target, _CHUNK)


def _pack(path: str) -> None:
    with open(1, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for name in sorted(os.listdir(path)):
            tar.add(os.path.join(path, name), arcname=name, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files, folders and symlinks; devices and pipes stay behind, names and owners do not travel."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _unpack(path: str) -> None:
    os.makedirs(path, exist_ok=True)
    source: BinaryIO = open(0, "rb", closefd=False)  # noqa: SIM115  (the descriptor stays the caller's)
    with tarfile.open(fileobj=source, mode="r|") as tar:
        for member in tar:
            tar.extract(member, path, set_attrs=True, numeric_owner=True, **_FILTER)
