"""The database under the ledger: one writer thread, batched transactions, readers on their own connections.

Everything particular to SQLite is in `_sqlite_*`. A write is a function of a connection; the writer runs what
has queued up in one transaction and answers the callers after the commit. When one of them raises, all are
undone and run again one by one, so that only the one that raised fails. So one commit (and one disk flush,
where asked for) serves all threads that wait.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from trivet.buffer import faults
from trivet.buffer.errors import LedgerError, translate

_R = TypeVar("_R")
MEMORY = ":memory:"
_MAX_BATCH = 256


@dataclass(slots=True)
class _Op:
    name: str
    run: Callable[[Connection], Any]
    durable: bool
    future: Future[Any] = field(default_factory=Future)


def sqlite_path(url: str | Path) -> str:
    """The file of `url` (a path, `sqlite:///path` or `:memory:`). Raises LedgerError on other databases."""
    text = str(url)  # `~` at a path's start is the home folder
    if text in (MEMORY, "sqlite://", "sqlite:///:memory:"):
        return MEMORY
    if text.startswith("sqlite:///"):
        return os.path.expanduser(text.removeprefix("sqlite:///"))
    if "://" in text:
        raise LedgerError(f"buffer url {text!r}: give a file path, sqlite:///path or :memory:")
    if not text:
        raise LedgerError("buffer url is empty: give a file path, sqlite:///path or :memory:")
    return os.path.expanduser(text)


def _sqlite_engine(path: str, busy_s: float, begin: str) -> Engine:
    """An engine whose transactions open with `begin`; Python's own transaction handling is switched off."""
    memory = path == MEMORY
    options: dict[str, Any] = {"connect_args": {"timeout": busy_s, "check_same_thread": False}}
    if memory:
        options["poolclass"] = StaticPool
    engine = sa.create_engine(sa.URL.create("sqlite", database=None if memory else path), **options)

    @event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


class Database:
    """Runs reads and writes; thread-safe. Writes outlive a kill, `durable` ones a power loss too."""

    def __init__(self, url: str | Path, *, busy_s: float) -> None:
        self.path = sqlite_path(url)
        self.where = "in memory" if self.path == MEMORY else str(self.path)
        self.busy_s = busy_s
        self.wait_s = 3 * busy_s + 30.0  # begin, retry, commit
        self._lock = threading.Lock()
        self._ended: str | None = None  # why no more operations are accepted
        self._queue: queue.SimpleQueue[_Op | None] = queue.SimpleQueue()
        self._writer = _sqlite_engine(self.path, busy_s, "BEGIN IMMEDIATE")
        self._reader = None if self.path == MEMORY else _sqlite_engine(self.path, busy_s, "BEGIN")
        event.listen(self._writer, "before_cursor_execute", lambda *_: faults.point("statement"))
        self._synchronous = ""
        try:
            self._connection = self._sqlite_open()
        except DBAPIError as error:
            self._dispose()
            raise translate(error, self.where, busy_s, "opening") from error
        except LedgerError:
            self._dispose()
            raise
        self._thread = threading.Thread(target=self._loop, name="ledger-writer", daemon=True)
        self._thread.start()

    def _sqlite_open(self) -> Connection:
        connection = self._writer.connect()
        if self.path != MEMORY:
            try:
                mode = self._raw(connection).execute("PRAGMA journal_mode=WAL").fetchone()[0]
            except sqlite3.Error as error:
                connection.invalidate()
                raise translate(error, self.where, self.busy_s, "opening") from error
            if mode != "wal":
                raise LedgerError(
                    f"opening: the file system of {self.where} does not support SQLite's write-ahead log (it "
                    f"answered {mode!r}); put the ledger on a local disk (buffer.url), never on a network one"
                )
        return connection

    @staticmethod
    def _raw(connection: Connection) -> sqlite3.Connection:
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, sqlite3.Connection)
        return raw

    # -- callers' side ---------------------------------------------------------------------------

    def write(self, name: str, run: Callable[[Connection], _R], *, durable: bool = False) -> _R:
        """Run `run(connection)` in the writer's next transaction and return its result after the commit.

        `run` may be run again after a rollback: it must not change anything but the database. `durable`
        flushes the disk before returning. Raises LedgerError, and whatever `run` raises.
        """
        op = _Op(name, run, durable)
        with self._lock:
            if self._ended is not None:
                raise LedgerError(f"{name}: the ledger {self.where} {self._ended}")
            self._queue.put(op)
        try:
            return op.future.result(self.wait_s)
        except WaitTimeout:
            if op.future.done():  # `run` itself raised a time-out
                raise
            waiting = self._queue.qsize()
            state = "was not started and will not be" if op.future.cancel() else "is still being written"
            raise LedgerError(
                f"{name}: waited {self.wait_s:g} s for the writer of {self.where} ({waiting} more operations "
                f"wait); it {state}. Is the disk stuck, or the machine suspended?"
            ) from None

    def read(self, name: str, run: Callable[[Connection], _R]) -> _R:
        """Run `run(connection)` on a consistent snapshot, beside the writer."""
        if self._reader is None:  # one connection holds the whole database
            return self.write(name, run)
        if self._ended is not None:
            raise LedgerError(f"{name}: the ledger {self.where} {self._ended}")
        try:
            with self._reader.begin() as connection:
                return run(connection)
        except DBAPIError as error:
            raise translate(error, self.where, self.busy_s, name) from error

    @property
    def ended(self) -> bool:
        """Closed or crashed."""
        return self._ended is not None

    def close(self) -> None:
        """Finish what is queued, then close. Idempotent."""
        with self._lock:
            first = self._ended is None
            if first:
                self._ended = "is closed"
                self._queue.put(None)
        if first:
            self._thread.join(self.wait_s)
            self._dispose()

    def _dispose(self) -> None:
        for engine in (self._reader, self._writer):
            if engine is not None:
                engine.dispose()

    # -- the writer thread -----------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                self._connection.close()
                return
            try:
                self._commit(batch)
            except faults.Crash as crash:
                self._die(batch, crash)
                return

    def _next_batch(self) -> list[_Op]:
        """What is queued (at least one operation); empty at the end."""
        batch: list[_Op] = []
        while len(batch) < _MAX_BATCH:
            try:
                op = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if op is None:
                if batch:
                    self._queue.put(None)
                break
            if op.future.set_running_or_notify_cancel():
                batch.append(op)
        return batch

    def _commit(self, batch: list[_Op]) -> None:
        results = []
        try:
            with self._transaction(any(op.durable for op in batch)):
                for op in batch:
                    results.append(op.run(self._connection))
                faults.point("commit")
            faults.point("committed")
        except Exception as error:  # any operation's: it goes to who asked for it
            # The whole transaction is undone. Refusals are rare: each operation then meets its fate alone.
            if len(batch) > 1:
                for op in batch:
                    self._commit([op])
            elif isinstance(error, DBAPIError | sqlite3.Error):
                batch[0].future.set_exception(translate(error, self.where, self.busy_s, batch[0].name))
            else:
                batch[0].future.set_exception(error)
            return
        for op, result in zip(batch, results, strict=True):
            op.future.set_result(result)

    @contextlib.contextmanager
    def _transaction(self, durable: bool) -> Iterator[None]:
        if self._connection.closed or self._connection.invalidated:
            self._connection = self._writer.connect()
            self._synchronous = ""
        faults.point("begin")
        wanted = "FULL" if durable else "NORMAL"
        if wanted != self._synchronous:
            self._raw(self._connection).execute(f"PRAGMA synchronous={wanted}")
            self._synchronous = wanted
        with self._connection.begin():
            yield

    def _die(self, batch: list[_Op], crash: BaseException) -> None:
        """The process is gone as far as the database can tell; those who wait learn of it."""
        with self._lock:
            self._ended = f"has crashed at {crash}"
        self._queue.put(None)
        while (op := self._queue.get()) is not None:
            if op.future.set_running_or_notify_cancel():
                batch.append(op)
        for op in batch:
            if not op.future.done():
                op.future.set_exception(crash)
        self._dispose()
