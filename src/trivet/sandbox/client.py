"""The owner's side of the keeper: one per process, started when first needed, and the folder it guards."""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from trivet.sandbox import groups
from trivet.sandbox.base import SandboxError, Tag
from trivet.sandbox.keeper import MESSAGE_BYTES
from trivet.sandbox.running import Running, readable

T = TypeVar("T")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ROOT = str(Path(__file__).parents[2])
_lock = threading.Lock()
_client: Client | None = None


class Client:
    """Sends orders to one keeper. `folder`: this owner's private folder, gone when the owner is."""

    def __init__(self) -> None:
        reap()
        self.owner = owner_name(os.getpid())
        self.pid = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.owner}-", dir=own_base_folder()))
        self._groups = f"{groups.PREFIX}{self.folder.name}-"
        self.folder.chmod(0o711)  # the sandboxes' user walks through it to what is lent to them
        (self.folder / "m").mkdir(0o711)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        code = (  # its command line can be read in sandboxes: it names nothing of this machine
            "import os, sys; sys.path.insert(0, os.getcwd()); from trivet.sandbox.keeper import main; "
            f"main({theirs.fileno()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath},
                cwd=_ROOT,
                start_new_session=True,  # a Ctrl-C in the terminal is the owner's to handle
            )
        ours.send(str(self.folder).encode())
        self._control = ours
        self._sending = threading.Lock()

    def alive(self) -> bool:
        if self.pid != os.getpid() or self.process.poll() is not None:
            return False
        return not readable(self._control)  # it never speaks on it: that is its end

    def order(self, message: dict[str, Any], fds: list[int]) -> socket.socket:
        """Send one order; the lifeline of its job. The caller closes `fds`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            ours.close()
            theirs.close()
            size = f"{len(data)} bytes, at most {MESSAGE_BYTES}"
            raise SandboxError(
                f"arguments and environment are too large ({size}): send them as stdin or files"
            )
        with theirs, self._sending:
            rights = array.array("i", [theirs.fileno(), *fds])
            try:
                self._control.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the process that keeps the sandboxes is gone ({error})") from error
        return ours

    def let_go(self) -> None:
        self._control.close()

    def close(self) -> None:
        """End every sandbox of this process and remove the folder."""
        if self.pid != os.getpid():
            return
        self._control.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        limit = time.monotonic() + 5.0  # a keeper that was killed could not remove its groups
        left = [group for group in groups.names() if Path(group).name.startswith(self._groups)]
        while left and time.monotonic() < limit:
            left = [group for group in left if not groups.remove(group)]
            time.sleep(0.01)


def client() -> Client:
    """This process's keeper; a new one after a fork or when it was killed."""
    global _client
    with _lock:
        if _client is None or not _client.alive():
            if _client is not None and _client.pid == os.getpid():
                _client.close()
            _client = Client()
        return _client


def shut_down() -> None:
    """End this process's keeper with all its sandboxes (also done at exit), and sweep what others left."""
    global _client
    with _lock:
        if _client is not None:
            _client.close()
            _client = None
    reap()


def _forget() -> None:
    """A forked child lets go of its parent's keeper, which could else not see the parent's end."""
    global _client, _lock
    if _client is not None:
        _client.let_go()
    _client, _lock = None, threading.Lock()


atexit.register(shut_down)
os.register_at_fork(after_in_child=_forget)

# -- owners and what they left ---------------------------------------------------------------------


def base_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"trivet-sandbox-{os.getuid()}"


def own_base_folder() -> Path:
    """`base_folder`, made if absent. SandboxError if another could change it: its name can be guessed."""
    base = base_folder()
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise SandboxError(f"{base} is not this user's alone: remove it, or set TMPDIR to another folder")
    return base


def owner_name(pid: int) -> str:
    """`pid-start`: unique even when process ids are used again. SandboxError where /proc is absent."""
    started = _started(pid)
    if started is None:
        raise SandboxError("sandboxes need Linux with /proc")
    return f"{pid}-{started}"


def _started(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def hostname(owner: str, tag: Tag) -> str:
    """The label that every sandbox carries: `trivet-OWNER-LABEL`, at most 64 bytes."""
    label = re.sub(r"[^A-Za-z0-9]+", "-", tag.label).strip("-") or "run"
    return f"trivet-{owner}-{label}"[:60].rstrip("-")


def sandboxes(owner: str = "") -> list[int]:
    """Process ids of sandboxes on this machine, of one owner if named (of this user, unless root asks)."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                argv = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                if b"--hostname" in argv:
                    name = argv[argv.index(b"--hostname") + 1].decode()
                    if name.startswith(f"trivet-{owner}"):
                        found.append(int(entry.name))
    return found


def reap() -> list[str]:
    """Remove what dead owners left: sandboxes and folders. Returns their names. Run at start and at end."""
    gone = []
    for pid in sandboxes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            parts = argv[argv.index("--hostname") + 1].split("-")
            if _started(int(parts[1])) != parts[2]:
                os.kill(pid, signal.SIGKILL)
                gone.append("-".join(parts))
    for group in groups.names():
        parts = Path(group).name.removeprefix(groups.PREFIX).split("-")
        if len(parts) > 2 and _started(int(parts[0])) != parts[1] and groups.remove(group):
            gone.append(Path(group).name)
    base = base_folder()
    if not base.is_symlink() and base.is_dir() and base.stat().st_uid == os.getuid():
        for folder in base.iterdir():
            parts = folder.name.split("-")
            if len(parts) >= 2 and parts[0].isdigit() and _started(int(parts[0])) != parts[1]:
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder.name)
    return gone


# -- threads for waiting ---------------------------------------------------------------------------

_threads = ThreadPoolExecutor(256, thread_name_prefix="trivet-sandbox")


class Scope:
    """What one blocking call runs, so that cancelling it can kill that."""

    def __init__(self) -> None:
        self._running: list[Running] = []
        self.cancelled = False

    def add(self, program: Running) -> None:
        self._running.append(program)
        if self.cancelled:
            program.kill()

    def cancel(self) -> None:
        self.cancelled = True
        for program in self._running:
            program.kill()


async def served(work: Callable[[Scope], T], threads: ThreadPoolExecutor | None = None) -> T:
    """Run blocking `work` in a thread. Cancelling kills what it has put into its scope, and waits for it."""
    scope = Scope()
    future = (threads or _threads).submit(work, scope)
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at when cancelled
    try:
        return await asyncio.shield(wrapped)
    except asyncio.CancelledError:
        if not future.cancel():
            scope.cancel()
            while not future.done():
                await asyncio.sleep(0.01)
        raise
