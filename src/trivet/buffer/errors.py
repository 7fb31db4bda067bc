"""What goes wrong with a ledger, said so that a person can act on it."""

from __future__ import annotations

import errno
import sqlite3


class LedgerError(RuntimeError):
    """The ledger refuses; the message names the issue or file, what it found and what to do."""


class LedgerBusy(LedgerError):
    """Another process held the ledger for longer than the busy time-out."""


class AttachmentError(RuntimeError):
    """An attachment's file is missing or damaged."""


def _advice(code: int, where: str, busy_s: float) -> str | None:
    """What a SQLite result code means for `where`; None for codes that speak for themselves."""
    return {
        sqlite3.SQLITE_BUSY: (
            f"another process has held the ledger {where} for more than {busy_s:g} s; see who writes to it "
            "(lsof on the file), stop it or raise busy_s. Nothing of this operation was written"
        ),
        sqlite3.SQLITE_LOCKED: f"the ledger {where} is locked by another connection of this process",
        sqlite3.SQLITE_FULL: (
            f"no space left for the ledger {where}; nothing of this operation was written. Free space on "
            "that disk (older checkpoints, samples), then resume: all that was acknowledged is intact"
        ),
        sqlite3.SQLITE_READONLY: (
            f"the ledger {where} cannot be written: the file, its folder or the file system is read-only. "
            "Change its permissions or point buffer.url to a writable place"
        ),
        sqlite3.SQLITE_CANTOPEN: (
            f"the ledger {where} cannot be opened: does its folder exist, may this user write there?"
        ),
        sqlite3.SQLITE_CORRUPT: (
            f"the ledger {where} is damaged. Keep the file, salvage it with `sqlite3 FILE .recover`, or "
            "start a new run folder from the last checkpoint's weights"
        ),
        sqlite3.SQLITE_NOTADB: (
            f"{where} is not a SQLite database, so not a ledger; point buffer.url elsewhere"
        ),
        sqlite3.SQLITE_IOERR: (
            f"reading or writing the ledger {where} failed; is it on a network file system (not supported) "
            "or a failing disk? Nothing of this operation was written"
        ),
    }.get(code)


def translate(error: BaseException, where: str, busy_s: float, doing: str) -> LedgerError:
    """A database driver's error as a LedgerError with its cause, the file and what to do."""
    orig = getattr(error, "orig", None) or error
    code = getattr(orig, "sqlite_errorcode", None)
    if code is None and isinstance(orig, OSError) and orig.errno == errno.ENOSPC:
        code = sqlite3.SQLITE_FULL
    primary = None if code is None else code & 0xFF
    name = getattr(orig, "sqlite_errorname", type(orig).__name__)
    advice = None if primary is None else _advice(primary, where, busy_s)
    text = f"{doing}: {advice or f'the ledger {where} failed'} ({name}: {orig})"
    return LedgerBusy(text) if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) else LedgerError(text)
