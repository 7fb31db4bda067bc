"""The filter, run by an interpreter of its instructions written here."""

from __future__ import annotations

import struct
from functools import cache

import pytest

from trivet.sandbox.inside import seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
# name: (x86_64, aarch64), from the kernel's tables
NUMBERS = {
    "read": (0, 63),
    "execve": (59, 221),
    "openat": (257, 56),
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "mount": (165, 40),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
}


@cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", seccomp.program(machine)))


def verdict(machine: str, number: int, first: int = 0, second: int = 0, arch: int | None = None) -> int:
    """What the program returns for a call, by the rules of classic BPF."""
    code = instructions(machine)
    data = struct.pack("<IIQQQ", number, ARCH[machine] if arch is None else arch, 0, first, second)
    at, accumulator = 0, 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:
            return value
        else:
            holds = {
                0x15: accumulator == value,
                0x45: accumulator & value != 0,
                0x35: accumulator >= value,
            }[operation]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls(machine: str) -> None:
    column = list(ARCH).index(machine)

    def call(name: str, first: int = 0, second: int = 0) -> int:
        # The table's first argument is at byte 16 of seccomp_data, the second at 24.
        data = (NUMBERS[name][column], first, second)
        return verdict(machine, *data)

    for name in ("read", "execve", "openat"):
        assert call(name) == ALLOW
    for name in ("mount", "unshare", "ptrace", "bpf", "io_uring_setup", "memfd_create"):
        assert call(name) == EPERM
    assert call("clone3") == ENOSYS
    assert call("clone", 17) == ALLOW  # SIGCHLD alone: a fork
    assert call("clone", 0x3D0F00) == ALLOW  # a thread
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert call("clone", flag | 17) == EPERM
    assert call("ioctl", 0, 0x5401) == ALLOW
    for request in (0x5412, 0x541C):
        assert call("ioctl", 0, request) == EPERM
    for family in (1, 2, 10):
        assert call("socket", family) == ALLOW
    for family in (0, 16, 17, 38, 40):
        assert call("socket", family) == EPERM


def test_other_architectures_end_the_process() -> None:
    assert verdict("x86_64", 0, arch=0x40000003) == KILL  # i386
    assert verdict("x86_64", 0x40000000) == KILL  # x32
    assert verdict("aarch64", 0, arch=0xC000003E) == KILL
    with pytest.raises(ValueError):
        seccomp.program("riscv64")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_path_ends(machine: str) -> None:
    """No call runs off the program's end."""
    for number in range(600):
        for first in (0, 0x10000010):
            assert verdict(machine, number, first, first) in (ALLOW, EPERM, ENOSYS)
