"""Weight versions: numbers handed out by the database, never used twice, and who descends from whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer.errors import LedgerError
from trivet.buffer.schema import versions
from trivet.buffer.store import Database


@dataclass(frozen=True, slots=True)
class Version:
    """One publication of weights."""

    version: int
    step: int
    stage: str
    parent: int | None
    checksum: str
    incarnation: str
    created: float

    @property
    def weights(self) -> tuple[str, int, str]:
        """What tells published weights apart, whoever published them."""
        return self.stage, self.step, self.checksum


class VersionTable:
    """Versions of all stages and restarts of a run. Rows are added, never removed."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._known: dict[int, Version] = {}

    def new(self, row: dict[str, object]) -> int:
        """Insert a version; its number. Raises LedgerError on an unknown parent."""

        def run(connection: Connection) -> int:
            parent = row["parent"]
            known = sa.select(versions.c.version).where(versions.c.version == parent)
            if parent is not None and connection.scalar(known) is None:
                raise LedgerError(f"new version: its parent {parent} does not exist")
            key = connection.execute(sa.insert(versions).values(row)).inserted_primary_key
            assert key is not None
            return int(key[0])

        return self._db.write("new_version", run, durable=True)

    def seal(self, version: int, checksum: str) -> None:
        """Set a version's checksum. Raises LedgerError when another one is recorded."""
        self.get(version)
        here = versions.c.version == version

        def run(connection: Connection) -> None:
            stored = connection.execute(sa.select(versions.c.checksum).where(here)).scalar_one()
            if stored and stored != checksum:
                raise LedgerError(
                    f"version {version} has checksum {stored!r} already; {checksum!r} is other weights"
                )
            connection.execute(sa.update(versions).where(here).values(checksum=checksum))

        self._db.write("seal", run)
        self.refresh()

    def newest(self) -> Version | None:
        """The latest publication of the ledger, whatever its line."""
        number = self._db.read("version", lambda c: c.scalar(sa.select(sa.func.max(versions.c.version))))
        return None if number is None else self.get(number)

    def refresh(self) -> None:
        """Read all versions anew: other processes add some and seal some."""
        rows = self._db.read("version", lambda c: c.execute(sa.select(versions)).all())
        self._known = {row.version: Version(**row._mapping) for row in rows}

    def get(self, version: int) -> Version:
        """Raises LedgerError on a version that was never handed out."""
        if version not in self._known:
            self.refresh()
        if version not in self._known:
            latest = max(self._known, default=0)
            raise LedgerError(
                f"version {version} was never handed out by this ledger; the latest is {latest}"
            )
        return self._known[version]

    def line(self, version: int) -> list[int]:
        """`version` and its ancestors, newest first."""
        out = [version]
        while (parent := self.get(out[-1]).parent) is not None:
            out.append(parent)
        return out

    def gaps(self, asked: Iterable[int], of: int) -> dict[int, int | None]:
        """Publications from each version to `of` along `of`'s line; None off the line.

        A version published before a rewind counts as the one that replaced it when stage, step and checksum
        agree: a replayed step then sees the staleness it was recorded with.
        """
        self.refresh()
        distance: dict[int, int] = {}
        twins: dict[tuple[str, int, str], int] = {}
        count = 0
        for v in self.line(of):
            row = self.get(v)
            twin = twins.get(row.weights) if row.checksum else None
            # A resumed run publishes its checkpoint's weights again: that is one publication, not two.
            distance[v] = count if twin is None else twin
            if twin is None:
                count += 1
                if row.checksum:
                    twins[row.weights] = distance[v]
        out: dict[int, int | None] = {}
        for v in set(asked):
            row = self.get(v)
            out[v] = distance.get(v, twins.get(row.weights) if row.checksum else None)
        return out
