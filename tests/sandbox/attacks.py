"""Programs that try to get out, get in, use too much, stay, or break what runs them.

Each is Python. It calls `escaped(...)` when it succeeded, which prints the word that tests look for. Those
with `plain` are harmless enough to run without walls too: there they must succeed, which shows that the
attack is one and that its success would be seen.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from trivet.sandbox import Limits

ESCAPED = b"ESCAPED"
SMALL = Limits(wall_s=8.0, cpu_s=4, memory_mb=256, processes=16, file_mb=16, disk_mb=16, output_bytes=1 << 16)
_BRIEF = Limits(
    wall_s=0.7, cpu_s=4, memory_mb=256, processes=16, file_mb=16, disk_mb=16, output_bytes=1 << 16
)
_ANY = frozenset({"ok", "exit", "timeout", "memory", "output", "killed"})
_ENDS = frozenset({"ok", "exit"})
_DIES = frozenset({"exit", "timeout", "memory", "killed"})

# name -> (x86_64, aarch64)
_CALLS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "setns": (308, 268),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "userfaultfd": (323, 282),
}
_NUMBERS = {name: both[platform.machine() == "aarch64"] for name, both in _CALLS.items()}
_NUMBERS["x32"] = 0x40000000 + 39

PRELUDE = (
    f"NR = {_NUMBERS!r}"
    + """
import ctypes, fcntl, os, resource, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER = 0x10000000
failures = (OSError, ValueError, OverflowError, RuntimeError, MemoryError, subprocess.SubprocessError)
def escaped(*what):
    print("ESCAPED", *what, flush=True)
def attempt(what, do, *args):
    try:
        value = do(*args)
    except failures as error:
        print("refused", what, type(error).__name__, flush=True)
        return None
    escaped(what, repr(value)[:80])
    return value
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def syscall(name, *args):
    return check(libc.syscall(ctypes.c_long(NR[name]), *args))
def read(path, size=4096):
    with open(path, "rb") as file:
        return file.read(size)
def append(path):
    with open(path, "ab") as file:
        return file.name
"""
)


@dataclass(frozen=True, slots=True)
class Attack:
    """`code` runs after PRELUDE and a line `CTX = {...}`; `causes`: how it may end."""

    name: str
    code: str
    causes: frozenset[str] = _ENDS
    limits: Limits = SMALL
    plain: bool = False
    slow: bool = False


PROCESSES = [
    Attack(
        "fork until refused",
        """
for n in range(300):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        break
else:
    escaped("300 processes")
""",
        causes=_ANY,
        limits=_BRIEF,
    ),
    Attack(
        "fork bomb",
        """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        causes=_DIES,
        limits=_BRIEF,
    ),
    Attack(
        "thread bomb",
        """
try:
    for n in range(300):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    escaped("300 threads")
except RuntimeError:
    pass
os._exit(0)
""",
        plain=True,
    ),
    Attack(
        "spin",
        """
while True:
    pass
""",
        causes=_DIES,
        limits=_BRIEF,
    ),
    Attack(
        "spin in the processor's time",
        """
while True:
    pass
""",
        causes=_DIES,
        limits=Limits(wall_s=20.0, cpu_s=1),
    ),
    Attack(
        "ignore signals and sleep",
        """
for n in range(1, 32):
    if n not in (9, 17, 19):
        signal.signal(n, signal.SIG_IGN)
time.sleep(600)
""",
        causes=_DIES,
        limits=_BRIEF,
    ),
    Attack(
        "stop itself",
        """
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
""",
        causes=_DIES,
        limits=_BRIEF,
    ),
    Attack("stop its parent", "os.kill(os.getppid(), signal.SIGSTOP)", causes=_ANY, limits=_BRIEF),
    Attack(
        "kill its parent",
        """
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(0.5)
""",
        causes=_ANY,
    ),
    Attack(
        "kill process 1",
        """
os.kill(1, signal.SIGKILL)
time.sleep(0.2)
""",
        causes=_ANY,
    ),
    Attack(
        "kill everything",
        """
os.kill(-1, signal.SIGKILL)
time.sleep(0.2)
""",
        causes=_ANY,
    ),
    Attack("kill its group", "os.kill(0, signal.SIGKILL)", causes=_ANY),
    Attack(
        "terminate everything",
        """
os.kill(-1, signal.SIGTERM)
time.sleep(0.2)
""",
        causes=_ANY,
    ),
    Attack("signal the owner", 'attempt("owner", os.kill, CTX["owner"], 0)', plain=True),
    Attack(
        "signal what runs outside",
        """
seen = {int(name) for name in os.listdir("/proc") if name.isdigit()}
for pid in CTX["pids"]:
    if pid not in seen:
        attempt(pid, os.kill, pid, 0)
""",
    ),
    Attack(
        "see processes outside",
        """
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():  # its own arguments hold this text
        try:
            if CTX["marker"].encode() in read(f"/proc/{name}/cmdline"):
                escaped("sees process", name)
        except OSError:
            pass
""",
        plain=True,
    ),
    Attack(
        "daemon that holds stdout",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", CTX["left"]])
    os._exit(0)
print("parent ends")
""",
    ),
    Attack(
        "daemon that floods stdout",
        """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    while True:
        try:
            os.write(1, b"x" * 10000)
        except OSError:
            time.sleep(0.01)
""",
        causes=frozenset({"killed", "ok", "output"}),
    ),
    Attack(
        "close every descriptor",
        """
os.closerange(0, 4096)
time.sleep(0.1)
os._exit(3)
""",
    ),
    Attack("raise its priority", 'attempt("nice", os.nice, -5)'),
    Attack(
        "real-time scheduling",
        'attempt("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))',
    ),
    Attack(
        "raise its limits",
        """
for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CPU", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY:
        escaped("no limit", name)
    else:
        attempt(name, resource.setrlimit, kind, (hard + 1, hard + 1))
""",
    ),
    Attack(
        "spare itself from the memory killer",
        'attempt("oom", os.write, os.open("/proc/self/oom_score_adj", 1), b"-900")',
    ),
]

MEMORY = [
    Attack(
        "memory bomb",
        """
x = []
while True:
    x.append(bytearray(8 << 20))
""",
        causes=_DIES,
    ),
    Attack("one great allocation", "x = bytearray(1 << 40)", causes=_DIES),
    Attack(
        "memory bomb of many processes",
        """
for n in range(12):
    if os.fork() == 0:
        x = bytearray(b"x") * (100 << 20)
        time.sleep(60)
time.sleep(4)
escaped("1200 MiB held")
""",
        causes=_DIES,
    ),
    Attack(
        "shared memory of many processes",
        """
import mmap

held = []
for n in range(12):
    if os.fork() == 0:
        area = mmap.mmap(-1, 100 << 20)
        for at in range(0, 100 << 20, 4096):
            area[at] = 1
        time.sleep(60)
time.sleep(4)
escaped("1200 MiB held")
""",
        causes=_DIES,
    ),
    Attack(
        "memory in nameless files",
        """
held = 0
for n in range(100):
    fd = os.memfd_create("x")
    for _ in range(12):
        held += os.write(fd, bytes(1 << 20))
    if held > 600 << 20:
        escaped("600 MiB held")
        break
""",
        causes=_DIES,
    ),
    Attack(
        "memory in System V segments",
        """
libc.shmat.restype = ctypes.c_void_p
held = 0
for n in range(40):
    key = check(libc.shmget(0, ctypes.c_size_t(20 << 20), 0o1600))
    address = libc.shmat(key, None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError("shmat")
    ctypes.memset(address, 1, 20 << 20)
    check(libc.shmdt(ctypes.c_void_p(address)))
    held += 20
escaped(held, "MiB held")
""",
        causes=_DIES,
    ),
    Attack(
        "fill the temporary folders",
        """
for folder in ("/tmp", "/dev/shm", "."):
    size = 0
    try:
        for n in range(40):
            with open(f"{folder}/f{n}", "wb") as file:
                for _ in range(10):
                    size += file.write(bytes(1 << 20))
                    file.flush()
        escaped(folder, size)
    except OSError:
        pass
""",
    ),
    Attack(
        "giant file",
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt("giant", os.posix_fallocate, os.open("g", os.O_CREAT | os.O_RDWR), 0, 1 << 34)
""",
    ),
    Attack(
        "giant sparse file",
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt("sparse", os.truncate, os.open("s", os.O_CREAT | os.O_RDWR), 1 << 40)
""",
    ),
    Attack(
        "file beyond its limit",
        """
f = open("big", "wb")
for n in range(64):
    f.write(bytes(1 << 20))
    f.flush()
escaped("64 MiB")
""",
        causes=frozenset({"exit", "killed"}),
    ),
    Attack(
        "many open files",
        """
fds = []
attempt("files", lambda: [fds.append(os.open("/dev/null", 0)) for n in range(5000)])
""",
    ),
    Attack(
        "many small files",
        """
for n in range(10**9):
    open(f"n{n}", "w").close()
""",
        causes=_DIES,
        limits=_BRIEF,
    ),
    Attack(
        "deep folders",
        """
for n in range(3000):
    os.mkdir("d")
    os.chdir("d")
""",
        causes=_ANY,
    ),
    Attack(
        "folder nobody may enter",
        """
os.mkdir("closed")
open("closed/x", "w").close()
os.chmod("closed", 0)
os.chmod(".", 0)
""",
        causes=_ANY,
    ),
    Attack(
        "flood stdout",
        """
while True:
    os.write(1, b"x" * 65536)
""",
        causes=frozenset({"output"}),
    ),
    Attack(
        "flood stderr",
        """
while True:
    os.write(2, b"x" * 65536)
""",
        causes=frozenset({"output"}),
    ),
    Attack(
        "binary output",
        """
os.write(1, bytes(range(256)) * 100)
os.write(2, b"\\xff\\xfe\\x00")
""",
    ),
]

# Those of the other table are about walls, these about bounds.
USE = [*PROCESSES, *MEMORY]
