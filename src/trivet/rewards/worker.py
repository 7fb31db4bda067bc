"""What runs in a pool's processes: a zygote that imports once, and the workers it forks.

The zygote is started as a fresh interpreter (`python -m trivet.rewards.worker FD`), so it holds none of
the owner's threads, memory or open files. It imports what the pool preloads, then forks a worker whenever
the owner asks, and does nothing else: it has one thread, so forking is safe. When the owner is gone, however
it went, the zygote kills its workers and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from trivet.rewards import frames
from trivet.rewards.load import load_object

_PR_SET_PDEATHSIG = 1
_OWNER_CHECK_MS = 1000


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when `parent` ends; exit at once if it already has."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere closed sockets do it
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(extra: int) -> None:
    """Allow `extra` bytes of address space beyond what is mapped now."""
    try:
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        mapped = 0
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = mapped + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(OSError, ValueError):  # a platform without the limit keeps the time limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def describe(error: BaseException) -> str:
    """The error and where it was raised, short enough for a record."""
    frames_ = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames_[-1].filename)}:{frames_[-1].lineno})" if frames_ else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}{where}" if text else f"{type(error).__name__}{where}"


def _call(function: Callable[..., Any], args: list[Any]) -> Any:
    value = function(*args)
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value


def _answer(function: Callable[..., Any], args: list[Any]) -> dict[str, Any]:
    """The reply; with `last` this process must not go on (a full memory leaves things half done)."""
    try:
        value = _call(function, args)
        json.dumps(value)
    except MemoryError:
        return {"raised": "MemoryError: the worker's memory limit was reached", "last": True}
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a verifier are answers too
        return {"raised": describe(error)}
    return {"value": value}


def _work(sock: socket.socket, config: dict[str, Any]) -> None:
    """Serve calls until the owner hangs up; never returns to the zygote's code."""
    try:
        target = load_object(config["target"])
        function = target(*config["init"]) if config["init"] is not None else target
        if not callable(function):
            raise TypeError(f"{config['target']!r} is a {type(function).__name__}, not a function")
    except BaseException as error:  # code of a user, SystemExit too: the owner is told
        frames.send(sock, {"failed": describe(error)})
        return
    limit_memory(config["memory_bytes"])
    frames.send(sock, {"ready": True})
    while True:
        reply = _answer(function, frames.receive(sock))
        frames.send(sock, reply)
        if "last" in reply:
            return


def _fork(control: socket.socket, sock: socket.socket, config: dict[str, Any]) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        sock.close()
        return pid
    code = 1
    try:
        os.setpgid(0, 0)  # what a verifier starts is killed with it
        die_with_parent(zygote)
        control.close()
        _work(sock, config)
        code = 0
    except frames.FrameClosed:
        code = 0
    finally:
        os._exit(code)


def _reap(pid: int) -> str:
    """Kill (again) and collect a worker; how it ended, in words."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return "it is gone"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _preload(entries: list[str]) -> None:
    """Import modules; `module:function` is also called (to fill caches that every fork then shares)."""
    for entry in entries:
        if ":" in entry:
            load_object(entry)()
        else:
            importlib.import_module(entry)
    gc.collect()
    gc.freeze()  # forks then share these pages instead of copying them


def _command(control: socket.socket, config: dict[str, Any], workers: set[int]) -> None:
    data, fds, _, _ = socket.recv_fds(control, 4096, 1)
    if not data:
        raise frames.FrameClosed("owner closed")
    order = json.loads(data)
    if order["op"] == "spawn":
        pid = _fork(control, socket.socket(fileno=fds[0]), config)
        workers.add(pid)
        frames.send(control, {"pid": pid})
    else:
        workers.discard(order["pid"])
        frames.send(control, {"ended": _reap(order["pid"])})


def zygote(control: socket.socket) -> None:
    """Obey the owner until it is gone."""
    owner = os.getppid()
    config = frames.receive(control)
    with contextlib.suppress(OSError):
        os.nice(config["nice"])
    sys.path[:] = config["path"]
    try:
        _preload(config["preload"])
    except BaseException as error:  # as above, of a module that is loaded ahead
        frames.send(control, {"failed": describe(error)})
        return
    frames.send(control, {"ready": True})
    workers: set[int] = set()
    poller = select.poll()
    poller.register(control, select.POLLIN | select.POLLHUP)
    try:
        while os.getppid() == owner:
            # The time-out notices an owner that died while a fork of it keeps the socket open.
            if poller.poll(_OWNER_CHECK_MS):
                _command(control, config, workers)
    except frames.FrameClosed:
        pass  # the owner is gone or has closed the pool: what is left is to end
    finally:
        for pid in workers:
            _reap(pid)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what Ctrl-C means
    zygote(socket.socket(fileno=int(sys.argv[1])))
