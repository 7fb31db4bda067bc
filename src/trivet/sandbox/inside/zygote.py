"""A warm interpreter inside a sandbox: forks one program a request, each in namespaces of its own.

It alone keeps CAP_SYS_ADMIN, and only over the sandbox's user namespace. A program becomes the first process
of a fresh process namespace (its death ends all it started), with fresh temporary folders and /proc, without
capabilities, behind the seccomp filter, under rlimits. The interpreter waits outside that namespace, where
programs can neither see nor signal it, watches time and memory, and tells the owner over the lifeline.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import types
from typing import Any

from . import channel, syscalls, watch

_TICK_S = 0.05
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV
_WORK = "/work"
_page = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Arguments: the control socket's descriptor, then a JSON list of modules to load."""
    control = socket.socket(fileno=int(sys.argv[1]))
    failed = []
    for name in json.loads(sys.argv[2]):
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.append(f"{name}: {error}")
    outer = os.open("/proc/self/ns/pid", os.O_RDONLY)
    gc.collect()
    gc.freeze()  # so that collections in programs do not copy what all share
    control.send(json.dumps({"event": "zygote", "failed": failed}).encode())
    while True:
        data, ancillary, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(8 * 4))
        if not data:
            return
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        line, *given = fds
        with socket.socket(fileno=line) as lifeline:
            _serve(json.loads(data), lifeline, given, outer)


def _serve(order: dict[str, Any], line: socket.socket, given: list[int], outer: int) -> None:
    """Run one program and tell its end. `given`: stdin, stdout, stderr, source, and maybe a channel."""
    deadline = time.monotonic() + order["limits"]["wall_s"] + 2.0  # the owner's own deadline comes first
    syscalls.unshare(syscalls.NEWPID)
    pid = os.fork()
    if pid == 0:
        _child(order, line, given)
    syscalls.setns(outer, syscalls.NEWPID)
    for fd in given:
        os.close(fd)
    memory, cause = order["limits"]["memory_mb"] << 20, ""
    watched = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(line, select.POLLIN)
    waiting = True
    while waiting:
        ready = {fd for fd, _ in poll.poll(_TICK_S * 1000)}
        waiting = watched not in ready
        if line.fileno() in ready:
            with contextlib.suppress(OSError):
                line.recv(64)  # unread words would break the line when it is closed
            poll.unregister(line)
            cause = cause or "killed"
        if not cause and time.monotonic() > deadline:
            cause = "timeout"
        if not cause and not ready and watch.exceeds(watch.descendants(pid), memory):
            cause = "memory"
        if cause:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os.close(watched)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    event = {"event": "exit", "code": code if code >= 0 else 128 - code, "cause": cause}
    event["cpu"] = usage.ru_utime + usage.ru_stime
    with contextlib.suppress(OSError):  # the owner may have hung up
        line.send(json.dumps(event).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


# -- the program -----------------------------------------------------------------------------------


def _child(order: dict[str, Any], line: socket.socket, given: list[int]) -> None:
    """Never returns."""
    try:
        source = _walls(order, line, given)
    except BaseException as error:  # whatever it is: the sandbox's failure, and the loop must not go on here
        text = json.dumps({"event": "error", "text": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(OSError):
            line.send(text.encode())
        os._exit(125)
    _execute(source)


def _walls(order: dict[str, Any], line: socket.socket, given: list[int]) -> bytes:
    os.setsid()
    syscalls.die_with_parent()
    syscalls.unshare(syscalls.NEWNS)
    size = f"size={order['limits']['disk_mb']}m,mode=1777"
    for path in ("/tmp", "/dev/shm", _WORK):
        syscalls.mount("tmpfs", path, "tmpfs", _FLAGS, size)
    syscalls.mount("proc", "/proc", "proc", _FLAGS | syscalls.MS_NOEXEC)
    with open(given[3], "rb") as file:
        source = file.read()
    kept = [*given[:3], *given[4:]]
    high = [os.dup2(fd, 100 + n, inheritable=False) for n, fd in enumerate(kept)]
    told = os.dup2(line.fileno(), 99, inheritable=False)
    for n, fd in enumerate(high):
        os.dup2(fd, n, inheritable=n < 3)
    syscalls.close_from(len(kept), keep=told)
    os.chdir(_WORK)
    with open("main.py", "wb") as file:
        file.write(source)
    limits = order["limits"]
    limits["memory_mb"] += _address_space() >> 20
    limits["processes"] += 3  # the sandbox's own
    syscalls.set_limits(limits, sharp_cpu=True)
    syscalls.drop_capabilities()
    syscalls.filter_calls(bytes.fromhex(order["filter"]))
    os.close(told)
    return source


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * _page


def _execute(source: bytes) -> None:
    """What `python main.py` does, without starting an interpreter. Never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv[:] = ["main.py"]
    sys.path.insert(0, _WORK)
    sys.modules["channel"] = channel
    program = types.ModuleType("__main__")
    program.__file__ = f"{_WORK}/main.py"
    sys.modules["__main__"] = program
    code = 0
    try:
        exec(compile(source, program.__file__, "exec"), program.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:  # as an interpreter does: shown by the hook, exit code 1
        code = 1
        _show(error)
    _quietly(_finish)
    os._exit(code & 0xFF)


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    below = error.with_traceback(trace.tb_next if trace else None)  # without this file's own line
    _quietly(lambda: sys.excepthook(type(below), below, below.__traceback__))


def _finish() -> None:
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _quietly(call: Any) -> None:
    # The program may have replaced what is called here; nothing may keep it from ending.
    with contextlib.suppress(BaseException):
        call()


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    _quietly(lambda: print(value, file=sys.stderr))
    return 1


if __name__ == "__main__":
    main()
