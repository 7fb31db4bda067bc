"""A seccomp filter as BPF bytes: system calls that no program of a policy needs are refused with EPERM.

The walls are the namespaces; the filter makes the kernel behind them smaller (no nested namespaces, mounts,
tracing, keyrings, BPF, io_uring, ...). `clone3` answers ENOSYS, so that the C library falls back to `clone`,
whose flags can be seen. Calls of another architecture or of x32 end the process.
"""

from __future__ import annotations

import platform
import struct

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}

# name -> (x86_64, aarch64); -1 where an architecture has none. From the kernel's tables (asm/unistd.h).
_REFUSED: dict[str, tuple[int, int]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "personality": (135, 92),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "memfd_secret": (447, 447),
    # Memory that no process's count shows; and a namespace for it costs a short program more than it needs.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_CLONE, _CLONE3, _IOCTL, _SOCKET = (56, 220), (435, 435), (16, 29), (41, 198)
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the rest (netlink, packet, vsock, alg, ...) is refused
_LOAD, _JEQ, _JSET, _JGE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def supported() -> bool:
    """Whether this machine's architecture has a table here."""
    return platform.machine() in _AUDIT


def program(machine: str = "") -> bytes:
    """The filter for `machine` (default: this one) as `struct sock_filter[]`. KeyError: unknown machine."""
    machine = machine or platform.machine()
    arch = list(_AUDIT).index(machine)
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_JEQ, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
    ]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # x32 names the same calls differently
    for numbers in _REFUSED.values():
        if numbers[arch] >= 0:
            code += [(_JEQ, 0, 1, numbers[arch]), (_RETURN, 0, 0, _EPERM)]
    code += [(_JEQ, 0, 1, _CLONE3[arch]), (_RETURN, 0, 0, _ENOSYS)]
    # Each block tests one call's argument and, if it is that call, always returns.
    code += [(_JEQ, 0, 4, _CLONE[arch]), (_LOAD, 0, 0, 16), (_JSET, 0, 1, _NEW_NAMESPACES)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    code += [(_JEQ, 0, 5, _IOCTL[arch]), (_LOAD, 0, 0, 24), (_JEQ, 1, 0, _TIOCSTI), (_JEQ, 0, 1, _TIOCLINUX)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    code += [(_JEQ, 0, 6, _SOCKET[arch]), (_LOAD, 0, 0, 16)]
    code += [(_JEQ, 2, 0, _FAMILIES[0]), (_JEQ, 1, 0, _FAMILIES[1]), (_JEQ, 0, 1, _FAMILIES[2])]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in code)
