"""Where published weights wait for the engines that load them: in memory or as one file a version."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from trivet.weights.checksum import checksums, untie


class WeightsError(RuntimeError):
    """Weights cannot be published or fetched; the message says which version, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Published:
    """One publication: its version, the trainer step it was made after, and what every tensor must be.

    `checksums` lists each tensor once, under its first name; `tied` maps further names to first names.
    """

    version: int
    step: int
    checksums: dict[str, str]
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> str:
        """One checksum (16 hexadecimal digits) of all: for the version table."""
        lines = "\n".join(f"{name}={value}" for name, value in sorted(self.checksums.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


class WeightStore(Protocol):
    """Publish on one side, fetch on the other. Versions are handed out by the buffer's database."""

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int, step: int = 0) -> Published: ...

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors (tied ones once). Raises WeightsError."""
        ...

    def published(self, version: int) -> Published:
        """What was published as `version`. Raises WeightsError."""
        ...

    def latest(self) -> int | None:
        """The newest version there is, None before the first."""
        ...


def _check_order(version: int, latest: int | None) -> None:
    if latest is not None and version <= latest:
        raise WeightsError(
            f"weights version {version} cannot be published after version {latest}: versions only increase "
            "(take them from the buffer's version table)"
        )


class MemoryStore:
    """Hands the trainer's own tensors over by reference; keeps the newest publication only.

    The trainer must not step between `publish` and the engine's update. If it does, the checksums no longer
    match what the engine loads and the proof fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: tuple[Published, dict[str, torch.Tensor]] | None = None

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int, step: int = 0) -> Published:
        once, tied = untie(tensors)
        published = Published(version, step, checksums(once), tied)
        with self._lock:
            _check_order(version, self._current[0].version if self._current else None)
            self._current = published, once
        return published

    def _get(self, version: int) -> tuple[Published, dict[str, torch.Tensor]]:
        with self._lock:
            current = self._current
        if current is None or current[0].version != version:
            have = (
                "nothing was published yet" if current is None else f"it holds version {current[0].version}"
            )
            raise WeightsError(
                f"weights version {version} is not in the memory store: {have} (only the newest is kept)"
            )
        return current

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        return dict(self._get(version)[1])

    def published(self, version: int) -> Published:
        return self._get(version)[0]

    def latest(self) -> int | None:
        with self._lock:
            return self._current[0].version if self._current else None


_NAME = re.compile(r"^v(\d{8,})\.safetensors$")


class DiskStore:
    """One safetensors file a version, written aside and renamed into place; fetched as a memory map.

    Keeps the last `keep` versions. Readers that already mapped a removed file keep it (POSIX).
    """

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise WeightsError(f"a disk store must keep at least 1 version, not {keep}")
        self.directory = Path(directory)
        self.keep = keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightsError(f"weights folder {self.directory} cannot be made: {error}") from error

    def path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}.safetensors"

    def versions(self) -> list[int]:
        """All versions on disk, oldest first."""
        found = (_NAME.match(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> int | None:
        versions = self.versions()
        return versions[-1] if versions else None

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int, step: int = 0) -> Published:
        _check_order(version, self.latest())
        once, tied = untie(tensors)
        published = Published(version, step, checksums(once), tied)
        self._write({name: t.detach().cpu().contiguous() for name, t in once.items()}, published)
        for old in self.versions()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)
        return published

    def _write(self, tensors: dict[str, torch.Tensor], published: Published) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        version, target = published.version, self.path(published.version)
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        for left in self.directory.glob(".v*.part"):  # of a publisher that was killed; there is one at a time
            left.unlink(missing_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
        meta = {"version": version, "step": published.step}
        meta |= {"checksums": published.checksums, "tied": published.tied}
        try:
            free = shutil.disk_usage(self.directory).free
            if free < need:
                raise OSError(errno.ENOSPC, "No space left on device")
            # Slices of one buffer are legal to publish; safetensors wants each to own its memory.
            owned = {n: t if _owns(t) else t.clone() for n, t in tensors.items()}
            save_file(owned, temporary, metadata={"format": "pt", "trivet": json.dumps(meta)})
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
            _sync_directory(self.directory)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            free = shutil.disk_usage(self.directory).free
            raise WeightsError(
                f"weights version {version} cannot be written to {target}: {error} "
                f"({need / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free; {self.keep} version(s) are kept). "
                "Free disk space or set another folder"
            ) from error

    def _open(self, version: int) -> Path:
        path = self.path(version)
        if not path.exists():
            have = self.versions()
            raise WeightsError(
                f"weights version {version} is not in {self.directory}: "
                + (f"it holds {have} (the last {self.keep} are kept)" if have else "it is empty")
            )
        return path

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._open(version)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise _damaged(version, path, error) from error

    def published(self, version: int) -> Published:
        from safetensors import SafetensorError, safe_open

        path = self._open(version)
        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads((file.metadata() or {})["trivet"])
            return Published(meta["version"], meta["step"], meta["checksums"], meta["tied"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise _damaged(version, path, error) from error


def _owns(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _damaged(version: int, path: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"weights version {version} in {path} cannot be read: {error}. The file is damaged or was not "
        "written by trivet: delete it and publish again, or go on from an older version"
    )


def _sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
