"""The keeper: one small process per owner that starts every sandbox, watches it, and ends it.

It exists because of what was measured: a sandbox dies with the *thread* that started it; each leaves a zombie
to a reaper that containers often lack; forking the owner, which may hold a model, is slow; and an owner that
is killed cleans up nothing. The keeper is single-threaded, a subreaper, at nice 19, and when its owner's
socket closes it kills everything, removes the owner's folder and ends. Should it be killed itself, sandboxes
die with it (--die-with-parent).

Each job has a *lifeline*, a socket whose other end the owner holds: events come over it (`ready`, `error`,
`exit`), and closing it kills the job.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from trivet.sandbox import groups
from trivet.sandbox.inside import files, syscalls, watch
from trivet.sandbox.inside.watch import descendants

NOBODY = 65534
MESSAGE_BYTES = 160 << 10
_TICK_S = 0.05
_KILL_TRIES = 200
_SPACES = (
    ("user", syscalls.NEWUSER),
    ("mnt", syscalls.NEWNS),
    ("pid", syscalls.NEWPID),
    ("ipc", syscalls.NEWIPC),
    ("uts", syscalls.NEWUTS),
    ("net", syscalls.NEWNET),
)


@dataclass(slots=True)
class Job:
    """A sandbox (`start`), a command in one (`exec`), or a command without walls (`bare`).

    `pid` is the keeper's child, `init` the sandbox's first process.
    """

    lifeline: socket.socket
    pid: int
    init: int
    sandbox: bool
    deadline: float
    memory: int  # bytes that all its processes may hold; 0: not watched
    info: int = -1
    cause: str = ""
    told: bytes = b""
    group: str | None = None
    kills: int = 0  # in the group, before the job


class Keeper:
    """Serves one control socket until it closes."""

    def __init__(self, control: socket.socket, folder: str) -> None:
        self._control = control
        self._folder = folder
        self._jobs: dict[int, Job] = {}  # by pid
        self._place = groups.place()
        self._made = 0
        self._leaving: list[str] = []  # groups to remove when their last process has ended
        self._select = selectors.DefaultSelector()
        wake, self._woken = socket.socketpair()
        for end in (wake, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake = wake
        self._select.register(control, selectors.EVENT_READ, None)
        self._select.register(self._woken, selectors.EVENT_READ, None)

    def serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._end()

    def _turn(self) -> bool:
        for key, _ in self._select.select(_TICK_S if self._jobs or self._leaving else 60.0):
            if key.fileobj is self._control:
                if not self._request():
                    return False
            elif key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif isinstance(key.data, Job):
                self._listen(key.data, key.fileobj)
        self._reap()
        self._watch()
        return True

    # -- requests ----------------------------------------------------------------------------------

    def _request(self) -> bool:
        """One request with its file descriptors; False when the owner is gone."""
        data, ancillary, _, _ = self._control.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(64 * 4))
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if not data:
            return False
        lifeline, *given = fds
        line = socket.socket(fileno=lifeline)
        try:
            self._start(json.loads(data), line, given)
        except (OSError, ValueError, KeyError) as error:  # the owner is told; the keeper goes on
            _tell(line, event="error", text=f"{type(error).__name__}: {error}")
            line.close()
        finally:
            for fd in given:
                os.close(fd)
        return True

    def _start(self, order: dict[str, Any], line: socket.socket, given: list[int]) -> None:
        sandbox = order["op"] == "start"
        deadline = time.monotonic() + order["lifetime_s"]
        spaces: list[int] = []
        if order["op"] == "exec":
            spaces = [os.open(f"/proc/{order['init']}/ns/{name}", os.O_RDONLY) for name, _ in _SPACES]
        info = os.pipe() if sandbox else (-1, -1)
        group = self._group(order)
        try:
            pid = os.fork()
            if pid == 0:
                child = _start_child if sandbox else _exec_child
                _run_child(child, {**order, "group": group}, line, given, [*spaces, info[1]])
        finally:
            for fd in [*spaces, info[1]]:
                if fd >= 0:
                    os.close(fd)
        job = Job(line, pid, order.get("init", 0), sandbox, deadline, order.get("memory", 0), info[0])
        job.group, job.kills = group, groups.kills(group) if group else 0
        self._jobs[pid] = job
        self._select.register(line, selectors.EVENT_READ, job)
        if sandbox:
            self._select.register(info[0], selectors.EVENT_READ, job)

    def _group(self, order: dict[str, Any]) -> str | None:
        """A new group for a sandbox; a command's is its sandbox's."""
        if order["op"] != "start":
            init = order["init"]
            return next((job.group for job in self._jobs.values() if job.sandbox and job.init == init), None)
        if self._place is None:
            return None
        self._made += 1
        name = f"{os.path.basename(self._folder)}-{self._made}"
        return groups.make(self._place, name, order["group_bytes"])

    # -- events ------------------------------------------------------------------------------------

    def _listen(self, job: Job, source: Any) -> None:
        if source is job.lifeline:
            with contextlib.suppress(OSError):
                source.recv(64)  # whatever comes, a word or the end, means: kill
            self._select.unregister(source)
            self._kill(job, "killed")
            return
        # Set-up ends by closing; the first process's id comes as a small JSON document.
        data = os.read(source, 4096)
        job.told += data
        if data:
            return  # it is written in parts
        self._select.unregister(source)
        os.close(source)
        job.info = -1
        with contextlib.suppress(ValueError, KeyError):
            job.init = int(json.loads(job.told)["child-pid"])
            _tell(job.lifeline, event="ready", init=job.init)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self._jobs.pop(pid, None)
            if job is None:
                continue  # an orphan that came to us as the subreaper
            code = os.waitstatus_to_exitcode(status)
            cpu = usage.ru_utime + usage.ru_stime
            if job.group and job.sandbox:
                self._leaving.append(job.group)
            elif job.group and code and groups.kills(job.group) > job.kills:
                job.cause = job.cause or "memory"
            _tell(
                job.lifeline, event="exit", code=code if code >= 0 else 128 - code, cause=job.cause, cpu=cpu
            )
            with contextlib.suppress(KeyError, ValueError):
                self._select.unregister(job.lifeline)
            job.lifeline.close()
            if job.info >= 0:
                self._select.unregister(job.info)
                os.close(job.info)

    def _sweep(self) -> None:
        """Kill what came to us as an orphan: a child of bwrap, killed before the two were tied, say."""
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            _signal([pid for pid in map(int, file.read().split()) if pid not in self._jobs], signal.SIGKILL)

    def _watch(self) -> None:
        self._sweep()
        self._leaving = [group for group in self._leaving if not groups.remove(group)]
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.cause:
                continue
            if now > job.deadline:
                self._kill(job, "timeout")
            elif job.memory and watch.exceeds(descendants(job.pid), job.memory):
                self._kill(job, "memory")

    def _kill(self, job: Job, cause: str) -> None:
        job.cause = job.cause or cause
        if job.sandbox:
            _signal([pid for pid in (job.init, job.pid) if pid], signal.SIGKILL)
            return
        # The supervisor adopts what the command orphans, so all of it is below `job.pid`; it is stopped, lest
        # it ends with the program and lets the rest go. Those that fork while being killed are met again in
        # the next round; what survives all rounds ends with its sandbox.
        supervisors = descendants(job.pid)[1:2]
        _signal(supervisors, signal.SIGSTOP)
        for _ in range(_KILL_TRIES):
            below = [pid for pid in descendants(job.pid)[2:] if not _is_zombie(pid)]
            if not below:
                break
            _signal(below, signal.SIGKILL)
        else:
            _signal([job.init] if job.init else [], signal.SIGKILL)
        _signal([*supervisors, job.pid], signal.SIGKILL)

    def _end(self) -> None:
        for job in list(self._jobs.values()):
            self._kill(job, "killed")
        limit = time.monotonic() + 10.0
        while self._jobs and time.monotonic() < limit:
            self._reap()
            self._sweep()
            time.sleep(0.005)
        while self._leaving and time.monotonic() < limit:
            self._sweep()
            self._reap()
            self._leaving = [group for group in self._leaving if not groups.remove(group)]
            time.sleep(0.005)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


# -- in the child ----------------------------------------------------------------------------------


def _run_child(
    child: Any, order: dict[str, Any], line: socket.socket, given: list[int], own: list[int]
) -> None:
    """Never returns. A failure before the program runs is the sandbox's: told over the lifeline."""
    try:
        signal.set_wakeup_fd(-1)
        if order["group"]:
            groups.join(order["group"])
        child(order, line, given, own)
    except BaseException as error:  # whatever it is, the keeper's loop must not go on in the child
        _tell(line, event="error", text=f"{type(error).__name__}: {error}")
    os._exit(125)


def _become_nobody() -> None:
    """Root of this machine must not own a sandbox: files and process counts would be root's."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _place(given: list[int], first: int = 0) -> None:
    """Make `given` the descriptors first, first + 1, ...; all others are closed."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in given]
    for n, fd in enumerate(high):
        os.dup2(fd, first + n, inheritable=True)


def _start_child(order: dict[str, Any], line: socket.socket, given: list[int], own: list[int]) -> None:
    """Execute bwrap. Descriptors: 0-2 standard, 3.. those that its arguments name, then its info and args."""
    _place([*given, own[-1]])
    syscalls.close_from(len(given) + 1)
    paths = [*order["binds"], order["argv"][0]]
    if os.geteuid() == 0:
        paths = _lend(paths, order["folder"])
        _become_nobody()
    syscalls.die_with_parent()
    names: dict[str, str] = {f"{{bind:{n}}}": path for n, path in enumerate(paths)}
    names["{info}"] = str(len(given))
    libraries = {} if order["libraries"] < 0 else {"LD_LIBRARY_PATH": paths[order["libraries"]]}
    at = order["argv"].index("--hostname")  # all else goes over a descriptor: processes inside can see these
    hidden: list[str] = [names.get(a) or a for a in [*order["argv"][1:at], *order["argv"][at + 2 :]]]
    end = hidden.index("--")
    _fill(len(given) + 1, "\0".join(hidden[:end]))
    argv = ["bwrap", *order["argv"][at : at + 2], "--args", str(len(given) + 1), *hidden[end:]]
    os.execve(paths[-1], argv, libraries)


def _fill(fd: int, text: str) -> None:
    """Make `fd` a file in memory with `text`."""
    source = os.memfd_create("args")
    os.write(source, text.encode())
    os.lseek(source, 0, os.SEEK_SET)
    if source != fd:
        os.dup2(source, fd)
    os.set_inheritable(fd, True)


def _lend(paths: list[str], folder: str) -> list[str]:
    """Mount `paths` where nobody can walk to them, in a mount namespace of this sandbox alone."""
    place = os.path.join(folder, "m")
    syscalls.unshare(syscalls.NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
    lent = []
    for n, path in enumerate(paths):
        target = f"{place}/{n}"
        if os.path.isdir(path):
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT, 0o644))
        syscalls.mount(path, target, "", syscalls.MS_BIND | syscalls.MS_REC)
        lent.append(target)
    return lent


def _exec_child(order: dict[str, Any], line: socket.socket, given: list[int], own: list[int]) -> None:
    """Join the sandbox (if any), fork into its process namespace, and wait there for the program."""
    os.setsid()
    walled = order["op"] == "exec"
    if walled:
        _join(own[:-1])
    syscalls.die_with_parent()  # a change of credentials undoes it
    supervisor = os.fork()
    if supervisor:
        for fd in given:
            os.close(fd)
        line.close()
        _exit_as(supervisor)
    syscalls.die_with_parent()
    syscalls.become_subreaper()
    if walled:
        syscalls.drop_capabilities()
    program = os.fork()
    if program:
        syscalls.close_from(0)
        _exit_as(program, sweep=not walled)
    _program(order, line, given)


def _join(spaces: list[int]) -> None:
    syscalls.hide()
    _become_nobody()
    syscalls.die_with_parent()
    for fd, (_, kind) in zip(spaces, _SPACES, strict=True):
        syscalls.setns(fd, kind)
    for fd in spaces:
        os.close(fd)
    syscalls.hide()


def _exit_as(pid: int, *, sweep: bool = False) -> None:
    """Wait for `pid` and end as it did; with `sweep` all else below this process ends first."""
    while True:
        done, status = os.waitpid(-1, 0)
        if done == pid:
            for _ in range(_KILL_TRIES if sweep else 0):
                below = [child for child in descendants(os.getpid())[1:] if not _is_zombie(child)]
                if not below:
                    break
                _signal(below, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _program(order: dict[str, Any], line: socket.socket, given: list[int]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    line_fd = fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, 64)
    _place(given)
    keep = {0, 1, 2, line_fd}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    line = socket.socket(fileno=line_fd)
    os.chdir(order["cwd"])
    syscalls.set_limits(order["limits"])
    if order["op"] == "exec":
        syscalls.drop_capabilities()
        syscalls.filter_calls(bytes.fromhex(order["filter"]))
    if "file" in order:
        os._exit(files.serve(order["file"]))
    try:
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except (OSError, ValueError) as error:  # as a shell says it: the program's verdict, not the sandbox's
        os.write(2, f"{order['argv'][0]}: {error}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


# -- helpers ---------------------------------------------------------------------------------------


def _tell(line: socket.socket, **event: Any) -> None:
    with contextlib.suppress(OSError):
        line.send(json.dumps(event).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def main(control_fd: int) -> None:
    """Serve the owner at the other end of `control_fd`; its first message names its folder."""
    control = socket.socket(fileno=control_fd)
    folder = control.recv(4096).decode()
    os.chdir("/")
    os.nice(19)
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner decides when it is over
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    syscalls.become_subreaper()
    Keeper(control, folder).serve()
