"""The system calls that Python's library lacks, through ctypes. Each raises OSError on failure."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x04000000, 0x08000000, 0x10000000
NEWPID, NEWNET, NEWCGROUP = 0x20000000, 0x40000000, 0x02000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP = 1, 4, 22, 24
_SUBREAPER, _NO_NEW_PRIVS, _CAP_AMBIENT, _AMBIENT_CLEAR = 36, 38, 47, 4
_CAPABILITY_VERSION = 0x20080522

_libc: Any = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, what: str, *args: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *padded), what)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    text = [part.encode() for part in (source, target, kind, options)]
    _check(_libc.mount(text[0], text[1], text[2], ctypes.c_ulong(flags), text[3]), f"mount {target}")


def die_with_parent() -> None:
    _prctl(_PDEATHSIG, "prctl(PDEATHSIG)", 9)


def become_subreaper() -> None:
    _prctl(_SUBREAPER, "prctl(CHILD_SUBREAPER)", 1)


def hide() -> None:
    """No process of the same user may look into this one (until it executes a program)."""
    _prctl(_DUMPABLE, "prctl(DUMPABLE)", 0)


def drop_capabilities() -> None:
    """Give up all capabilities for good; the bounding set too, where CAP_SETPCAP is held."""
    for capability in range(64):
        # EINVAL: beyond the kernel's last; EPERM: not allowed, and no_new_privs makes it moot.
        if _libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _prctl(_CAP_AMBIENT, "prctl(CAP_AMBIENT)", _AMBIENT_CLEAR)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    _prctl(_NO_NEW_PRIVS, "prctl(NO_NEW_PRIVS)", 1)


def filter_calls(program: bytes) -> None:
    """Put the seccomp filter on this process and all it starts. Needs no_new_privs."""
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(head, len(head))
    _prctl(_SECCOMP, "prctl(SECCOMP)", 2, ctypes.addressof(pointer))


def set_limits(limits: dict[str, Any], *, sharp_cpu: bool = False) -> None:
    """The rlimits of `Limits`, for this process and all it starts.

    `sharp_cpu`: the processor limit kills at once; the first process of a namespace ignores the warning.
    """
    cpu = int(limits["cpu_s"])
    pairs = [
        (resource.RLIMIT_CPU, cpu, cpu if sharp_cpu else cpu + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] << 20, 0),
        (resource.RLIMIT_NOFILE, limits["files"], 0),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 20, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, 256, 0),
    ]
    if limits["processes"]:  # without a user namespace it would count the user's processes everywhere
        pairs.append((resource.RLIMIT_NPROC, limits["processes"], 0))
    for kind, soft, hard in pairs:
        ceiling = resource.getrlimit(kind)[1]
        most = hard or soft
        if ceiling != resource.RLIM_INFINITY:
            soft, most = min(soft, ceiling), min(most, ceiling)
        resource.setrlimit(kind, (soft, most))


def close_from(first: int, keep: int = -1) -> None:
    """Close every file descriptor from `first` on, but `keep`."""
    end = max(first, 1 + max(int(name) for name in os.listdir("/proc/self/fd")))
    os.closerange(first, keep if keep >= first else end)
    if keep >= first:
        os.closerange(keep + 1, end)
