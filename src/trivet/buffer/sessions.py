"""Who holds claims and leases, and which holders are dead."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer.schema import sessions


def _machine() -> str:
    """Where process ids mean the same: host, its boot and the process-id namespace (containers)."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    return "/".join(parts)


def _process(pid: int) -> str:
    """What tells a process from a later one with its number: its start time in clock ticks, where known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _gone(pid: int, process: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return bool(process) and _process(pid) != process


def register(connection: Connection, owner: str, now: float) -> int:
    """A new session of `owner`: its number."""
    pid = os.getpid()
    row = {"owner": owner, "machine": _machine(), "pid": pid, "process": _process(pid), "opened": now}
    key = connection.execute(sa.insert(sessions).values(row)).inserted_primary_key
    assert key is not None
    return int(key[0])


def deregister(connection: Connection, session: int, now: float) -> None:
    """The session ended in an orderly way."""
    connection.execute(sa.update(sessions).where(sessions.c.session == session).values(closed=now))


def dead(connection: Connection, among: Iterable[int], session: int, names: Iterable[str] = ()) -> list[int]:
    """Those of the sessions `among` that will not come back.

    Closed ones, earlier sessions of this session's own owner name (it took over), processes of this machine
    that are gone, and sessions of owners in `names`. Of other machines nothing is known: their claims and
    leases run out.
    """
    own = connection.execute(sa.select(sessions).where(sessions.c.session == session)).one()
    machine, listed = _machine(), set(names)
    out = []
    for row in connection.execute(sa.select(sessions).where(sessions.c.session.in_(sorted(set(among))))):
        replaced = row.owner == own.owner and row.session < session
        gone = row.machine == machine and _gone(row.pid, row.process)
        if row.closed is not None or replaced or gone or row.owner in listed:
            out.append(int(row.session))
    return out
