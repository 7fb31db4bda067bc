"""Folders as tar streams, on this machine's side: what comes out of a sandbox is hostile until unpacked.

Nothing in a stream can write outside the target: members are opened step by step below it without following
a link, links are made last, and only those that cannot lead out. Python's own filters are not relied on,
since several releases let a crafted archive through.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trivet.sandbox.base import PathError

MAX_MEMBERS = 100_000
_MAX_DEPTH = 64
_CHUNK = 1 << 16
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


def pack(source: Path, out: BinaryIO, limit_bytes: int = 1 << 30) -> None:
    """Write the folder's files, folders and symlinks (as links) to `out`, without owners or times.

    Raises PathError for what is no folder, cannot be read, or is larger than `limit_bytes`.
    """
    if not source.is_dir():
        raise PathError(f"{source} is not a folder")
    total = 0
    try:
        with tarfile.open(fileobj=out, mode="w|") as tar:
            for path in _walk(source):
                member = tar.gettarinfo(path, arcname=str(path.relative_to(source)))
                if member is None or not (member.isfile() or member.isdir() or member.issym()):
                    continue  # sockets, pipes, devices
                member.uid = member.gid = member.mtime = 0
                member.uname = member.gname = ""
                total += member.size
                if total > limit_bytes:
                    raise PathError(f"{source} holds more than {limit_bytes} bytes")
                if member.isfile():
                    with open(path, "rb") as file:
                        tar.addfile(member, file)
                else:
                    tar.addfile(member)
    except OSError as error:
        raise PathError(f"cannot pack {source}: {error}") from error


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        yield entry
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)


def unpack(source: BinaryIO, target: Path, limit_bytes: int) -> None:
    """Write a stream's folders, files and harmless symlinks below `target` (made if absent).

    Hard links become links to nothing: they are left out, as are devices, pipes, and symlinks that could
    lead out. Raises PathError when names lead out, for a broken stream, and beyond `limit_bytes`.
    """
    target.mkdir(parents=True, exist_ok=True)
    links: list[tuple[list[str], str]] = []
    room, seen = limit_bytes, 0
    try:
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with tarfile.open(fileobj=source, mode="r|") as tar:
                for member in tar:
                    seen += 1
                    room -= member.size if member.isfile() else 0
                    if room < 0 or seen > MAX_MEMBERS:
                        raise PathError(
                            f"the folder is larger than {limit_bytes} bytes or {MAX_MEMBERS} members"
                        )
                    _unpack_member(tar, member, root, links)
            for parts, to in links:
                _link(root, parts, to)
        finally:
            os.close(root)
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise PathError(f"cannot unpack into {target}: {type(error).__name__}: {error}") from error


def _unpack_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, root: int, links: list[tuple[list[str], str]]
) -> None:
    parts = _parts(member.name)
    if member.isdir():
        os.close(_folder(root, parts))
    elif member.issym() and parts:
        links.append((parts, member.linkname))
    elif member.isfile() and parts:
        data = tar.extractfile(member)
        parent = _folder(root, parts[:-1])
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=parent)  # an older file or link of that name is replaced
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
            fd = os.open(parts[-1], flags, 0o755 if member.mode & stat.S_IXUSR else 0o644, dir_fd=parent)
            with open(fd, "wb") as file:
                while data is not None and (chunk := data.read(_CHUNK)):
                    file.write(chunk)
        finally:
            os.close(parent)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name or len(parts) > _MAX_DEPTH:
        raise PathError(f"an archive from a sandbox holds the name {name[:200]!r}")
    return parts


def _folder(root: int, parts: list[str]) -> int:
    """A descriptor of the folder, made where absent, reached without following a link."""
    here = os.dup(root)
    for part in parts:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def _link(root: int, parts: list[str], to: str) -> None:
    """Make a symlink if it stays inside: `..` only in front, and not more often than it is deep.

    Links lead through links, so `a/../b` may leave although it reads as if it stayed.
    """
    steps = [step for step in to.split("/") if step not in ("", ".")]
    up = next((n for n, step in enumerate(steps) if step != ".."), len(steps))
    if to.startswith("/") or not to or ".." in steps[up:] or up > len(parts) - 1:
        return
    parent = _folder(root, parts[:-1])
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(to, parts[-1], dir_fd=parent)
    finally:
        os.close(parent)
