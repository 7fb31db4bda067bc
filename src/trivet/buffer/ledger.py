"""The ledger: the durable log of prompts, rollouts and weight versions of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer import sessions
from trivet.buffer.errors import LedgerError
from trivet.buffer.moves import Scope
from trivet.buffer.schema import SCHEMA_VERSION, issues, meta, metadata, stages
from trivet.buffer.stage import StageLedger
from trivet.buffer.store import Database
from trivet.buffer.versions import Version, VersionTable
from trivet.types import canonical_json

Fingerprint = str | Mapping[str, str]
"""What the data is: one string, or named parts, so that an error can say which part differs."""


def _tag(fingerprint: Fingerprint) -> str:
    return fingerprint if isinstance(fingerprint, str) else canonical_json(dict(fingerprint))


def _parts(tag: str) -> dict[str, Any]:
    try:
        value = json.loads(tag)
    except ValueError:
        return {"data": tag}
    return value if isinstance(value, dict) else {"data": tag}


def _differences(old: str, new: str) -> str:
    a, b = _parts(old), _parts(new)
    names = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
    return "; ".join(f"{name}: stored {a.get(name)!r}, now {b.get(name)!r}" for name in names)


class Ledger:
    """Opens (or makes) the ledger at `url`: a file path, `sqlite:///path`, or `:memory:`.

    `owner` names who claims and leases; a later opening under that name takes over from the earlier one.
    `lease_s` (seconds) bounds claims and leases; `busy_s` how long to wait for another process's transaction.
    Raises LedgerError with what to do: busy, full, read-only, damaged, foreign or newer file.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        owner: str,
        fingerprint: Fingerprint = "",
        lease_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
        busy_s: float = 30.0,
    ) -> None:
        if not owner:
            raise LedgerError("the ledger needs an owner's name: claims and leases belong to somebody")
        if not lease_s > 0:
            raise LedgerError(f"lease_s is {lease_s!r}: give seconds above 0")
        self.owner = owner
        self.lease_s = lease_s
        self.fingerprint = fingerprint
        self._clock = clock
        self._db = Database(url, busy_s=busy_s)
        try:
            self._db.write("opening", self._prepare)
            self.session = self._db.write("opening", lambda c: sessions.register(c, owner, clock()))
        except BaseException:  # whatever ends the opening: its writer thread must not stay
            self._db.close()
            raise
        self._versions = VersionTable(self._db)

    def _prepare(self, connection: Connection) -> None:
        """Make the tables in an empty database; refuse one that is not ours or newer."""
        tables = set(sa.inspect(connection).get_table_names())
        if not tables:
            metadata.create_all(connection)
            connection.execute(sa.insert(meta).values(key="schema", value=str(SCHEMA_VERSION)))
            return
        query = sa.select(meta.c.value).where(meta.c.key == "schema")
        value = connection.scalar(query) if {"meta", "issues"} <= tables else None
        if value is None:
            raise LedgerError(
                f"opening: {self._db.where} is a database but not a ledger (it has {sorted(tables)[:5]}); "
                "point buffer.url elsewhere"
            )
        if int(value) != SCHEMA_VERSION:
            raise LedgerError(
                f"opening: the ledger {self._db.where} has schema version {value}, this trivet reads "
                f"{SCHEMA_VERSION}; use the trivet that wrote it, or a newer one"
            )

    # -- stages ----------------------------------------------------------------------------------

    def stage(self, name: str, *, fingerprint: Fingerprint | None = None, adopt: bool = False) -> StageLedger:
        """The stage's part of the ledger; `fingerprint` defaults to the ledger's.

        Raises LedgerError when the stage's state belongs to other data, unless `adopt` says that the state
        shall be kept with the new data. An empty fingerprint claims nothing and changes nothing.
        """
        if not name:
            raise LedgerError("a stage needs a name")
        tag = _tag(self.fingerprint if fingerprint is None else fingerprint)
        self._db.write(f"opening stage {name!r}", lambda c: self._open_stage(c, name, tag, adopt))
        return StageLedger(self._db, Scope(name, self.session, self.owner, self.lease_s, self._clock))

    def _open_stage(self, connection: Connection, name: str, tag: str, adopt: bool) -> None:
        row = connection.execute(sa.select(stages).where(stages.c.stage == name)).one_or_none()
        if row is None:
            new = {
                "stage": name,
                "fingerprint": tag,
                "created": self._clock(),
                "last_step": 0,
                "collected": 0,
            }
            connection.execute(sa.insert(stages).values(new))
            return
        if not tag or row.fingerprint == tag:
            return
        if row.fingerprint and not adopt:
            n = connection.scalar(
                sa.select(sa.func.count()).select_from(issues).where(issues.c.stage == name)
            )
            raise LedgerError(
                f"stage {name!r} of the ledger {self._db.where} holds {n} issues of other data "
                f"({_differences(row.fingerprint, tag)}). Restore the data or settings of the run, "
                "start a new run folder, or adopt the new data on purpose (stage(name, adopt=True)): the "
                "position in the epoch and all that was trained are then kept"
            )
        connection.execute(sa.update(stages).where(stages.c.stage == name).values(fingerprint=tag))

    def stages(self) -> list[str]:
        """Names of the stages, oldest first."""
        query = sa.select(stages.c.stage).order_by(stages.c.created, stages.c.stage)
        return self._db.read("stages", lambda c: list(c.scalars(query)))

    # -- versions --------------------------------------------------------------------------------

    def new_version(
        self,
        step: int,
        parent: int | None = None,
        checksum: str = "",
        incarnation: str = "",
        *,
        stage: str = "",
    ) -> int:
        """A version number for weights about to be published after `step`; larger than all before it.

        Durable before it is returned: never handed out twice, whatever happens. The first is 1.
        """
        row: dict[str, object] = {"step": step, "stage": stage, "parent": parent, "checksum": checksum}
        return self._versions.new({**row, "incarnation": incarnation, "created": self._clock()})

    def seal(self, version: int, checksum: str) -> None:
        """Record the checksum of a version's weights, known once they are published. Once only."""
        self._versions.seal(version, checksum)

    def version(self, version: int | None = None) -> Version | None:
        """The record of a version; without one, of the latest publication (None before the first)."""
        return self._versions.newest() if version is None else self._versions.get(version)

    def line(self, version: int | None = None) -> list[int]:
        """A version (default: the latest) and its ancestors, newest first; empty before the first."""
        newest = self._versions.newest() if version is None else self._versions.get(version)
        return [] if newest is None else self._versions.line(newest.version)

    def staleness(self, version: int, of: int | None = None) -> int | None:
        """Publications from `version` to `of` (default: the latest) along its line; None: off the line."""
        return self.gaps([version], of)[version]

    def gaps(self, versions: Iterable[int], of: int | None = None) -> dict[int, int | None]:
        """`staleness` of many versions at once."""
        newest = self._versions.newest() if of is None else self._versions.get(of)
        if newest is None:
            raise LedgerError("staleness: no version was handed out yet")
        return self._versions.gaps(versions, newest.version)

    # -- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is queued and close the file; claims of this session count as dead from now on."""
        try:
            self._db.write("closing", lambda c: sessions.deregister(c, self.session, self._clock()))
        except LedgerError:
            if not self._db.ended:
                raise
        finally:
            self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
