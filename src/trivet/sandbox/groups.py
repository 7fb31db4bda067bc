"""Control groups that bound a sandbox's memory as a whole, where they can be written (version 1 or 2).

They stand behind the keeper's own watch, which sees a breach within a twentieth of a second: a group cannot
be outrun. Where no group can be made, the watch is alone. Nothing here raises; absence is an answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

PREFIX = "trivet-"
_ROOT = "/sys/fs/cgroup"


def place() -> str | None:
    """The folder below which groups with a memory limit can be made by this process; None where not."""
    for folder, limit in _candidates():
        probe = os.path.join(folder, f"{PREFIX}probe-{os.getpid()}")
        with contextlib.suppress(OSError):
            os.mkdir(probe)
            try:
                if os.access(os.path.join(probe, limit), os.W_OK):
                    return folder
            finally:
                os.rmdir(probe)
    return None


def _candidates() -> Iterator[tuple[str, str]]:
    try:
        with open("/proc/self/cgroup") as file:
            rows = [row.rstrip("\n").split(":", 2) for row in file]
    except OSError:
        return
    for number, controllers, path in rows:
        if "memory" in controllers.split(","):
            yield f"{_ROOT}/memory{path}".rstrip("/"), "memory.limit_in_bytes"
        elif number == "0" and os.path.exists(f"{_ROOT}/cgroup.controllers"):
            yield f"{_ROOT}{path}".rstrip("/"), "memory.max"


def make(folder: str, name: str, memory: int) -> str | None:
    """A group of at most `memory` bytes; None when it cannot be had."""
    group = os.path.join(folder, f"{PREFIX}{name}")
    try:
        os.mkdir(group)
        _limit(group, memory)
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(group)
        return None
    return group


def _limit(group: str, memory: int) -> None:
    for name, value in (
        ("memory.limit_in_bytes", memory),
        ("memory.memsw.limit_in_bytes", memory),
        ("memory.max", memory),
        ("memory.swap.max", 0),
    ):
        path = os.path.join(group, name)
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(value))


def join(group: str) -> None:
    """Move this process into the group."""
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write("0")


def kills(group: str) -> int:
    """How many processes the kernel has killed in it for want of memory."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(group, name)) as file:
            for row in file:
                key, _, value = row.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def remove(group: str) -> bool:
    """Whether it is gone; it stays while a process in it is still ending."""
    try:
        os.rmdir(group)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def names() -> list[str]:
    """Paths of all groups made here."""
    found = []
    for folder, _ in _candidates():
        with contextlib.suppress(OSError):
            found += [entry.path for entry in os.scandir(folder) if entry.name.startswith(PREFIX)]
    return found
