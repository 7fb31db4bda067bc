"""What backends share that only reach a sandbox through a shell in it: limits, killing by a mark, owners."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from trivet.sandbox.base import Cause, Limits, SandboxError
from trivet.sandbox.client import owner_name

T = TypeVar("T")
_MARK = "TRIVET_EXEC"
_SIGXCPU = 128 + 24

# Limits are only ever lowered, by the shell that then becomes the program. `ulimit -f` counts 512 bytes in
# POSIX mode and 1024 in others', so that a file may become half as large as allowed. What a shell does not
# know (`-u` in dash) is left to the walls.
_LIMITS = """
lower() {
  now=$(ulimit -H $1 2>/dev/null) || return 0
  if [ "$now" = unlimited ] || [ "$now" -gt "$2" ]; then ulimit $1 "$2" 2>/dev/null; fi
}
"""
# Whatever carries the mark in its environment, again and again while something is found.
_KILL = """
round=0
while [ $round -lt 20 ]; do
  round=$((round + 1)); found=
  for file in /proc/[0-9]*/environ; do
    if tr '\\0' '\\n' < "$file" 2>/dev/null | grep -qx 'MARK'; then
      pid=${file#/proc/}; kill -9 "${pid%/environ}" 2>/dev/null && found=1
    fi
  done 2>/dev/null
  [ -n "$found" ] || break
done
"""


def new_mark() -> tuple[str, str]:
    """A variable (name, value) that marks one program and all that inherits its environment."""
    return _MARK, secrets.token_hex(8)


def kill_script(mark: tuple[str, str]) -> str:
    """Ends what carries the mark. What strips its environment to escape this ends with its sandbox."""
    return _KILL.replace("MARK", "=".join(mark))


def limits_script(limits: Limits, processes: bool = True) -> str:
    """Shell lines that lower the rlimits of `Limits`."""
    bounds = [("-t", limits.cpu_s), ("-v", limits.memory_mb << 10), ("-n", limits.files), ("-c", 0)]
    bounds += [("-f", limits.file_mb << 10)] + ([("-u", limits.processes)] if processes else [])
    return _LIMITS + "\n".join(f"lower {flag} {value}" for flag, value in bounds)


def program_script(argv: list[str], limits: Limits, stdin_file: str) -> str:
    """A bash script that runs `argv` with its stdin from a file, which is removed once it is open.

    The shell's own notices ("Killed") must not mix with the program's stderr: descriptor 3 carries that.
    """
    remove = "" if stdin_file == "/dev/null" else f"; rm -f {stdin_file}"
    lines = [
        limits_script(limits),
        f"exec < {stdin_file}{remove}",
        f"{{ {shlex.join(argv)} 2>&3 3>&-; }} 3>&2 2>/dev/null",
        "exit $?",
    ]
    return "\n".join(lines)


def verdict(code: int) -> tuple[Cause, int]:
    """(cause, exit code) of a program that nobody killed from outside, as a shell reports it."""
    if code == 0:
        return "ok", 0
    if code == _SIGXCPU:
        return "timeout", code
    if code < 0 or code > 128:  # below 0: servers that report the death of the shell itself
        return "killed", code if code > 0 else 137
    return "exit", code


def alive(owner: str) -> bool:
    """Whether the process that `owner_name` named still runs."""
    pid = owner.partition("-")[0]
    try:
        return pid.isdigit() and owner_name(int(pid)) == owner
    except SandboxError:
        return False


async def finished(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """The result of `work`, which has time limits of its own. If cancelled, what it still makes is undone.

    A server that was asked for a sandbox makes it although nobody waits any more.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        with contextlib.suppress(SandboxError):  # it was not made, or ends at its deadline
            await undo(task.result())
        raise
