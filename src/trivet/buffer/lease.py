"""Leases: groups in a trainer's hands, and how they are taken and acknowledged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer.errors import LedgerError
from trivet.buffer.moves import Scope, check_lease, key_of, last_checkpoint, sweep
from trivet.buffer.records import load_groups, load_tasks
from trivet.buffer.schema import State, issues, leases, stages
from trivet.buffer.strategies import Candidates, get_strategy
from trivet.types import Group, IssueKey, Task

if TYPE_CHECKING:
    from trivet.buffer.stage import StageLedger


@dataclass(slots=True)
class Lease:
    """Groups handed out for one step. An empty one (`id` None) can still be acknowledged."""

    id: int | None
    keys: tuple[IssueKey, ...]
    asked: int
    expires: float
    replay: int | None = None  # the recorded step this lease replays
    _stage: StageLedger | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def short(self) -> int:
        """How many groups fewer than asked for; 0 for a full lease."""
        return max(0, self.asked - len(self.keys))

    def groups(self, known: Mapping[IssueKey, Group] | None = None) -> list[Group]:
        """The groups as stored now, in order of delivery; from the first call on their rewards are frozen.

        `known`: groups this process has just put and still holds; where they are the whole lease, they are
        given back without being read again. Groups decided otherwise since (stale, filtered ...) are left
        out. Raises LedgerError when the lease is over or a rollout is damaged.
        """
        if self._stage is None or self.id is None:
            return []
        if known is not None and all(key in known and known[key].ready for key in self.keys):
            self._stage._freeze(self)
            return [known[key] for key in self.keys]
        return self._stage._read(self)

    def tasks(self) -> list[Task]:
        """The groups' tasks, in order; also for records of kind `task`, which hold no rollouts."""
        return self._stage._tasks(self) if self._stage is not None and self.id is not None else []


def pinned(connection: Connection, scope: Scope) -> list[tuple[int, int]]:
    """(step, trained groups) of recorded steps that wait to be replayed, in order."""
    waiting = (scope.mine, issues.c.pin == State.TRAINED, issues.c.state == State.READY)
    query = sa.select(issues.c.step, sa.func.count()).where(*waiting).group_by(issues.c.step)
    return [(int(step), int(n)) for step, n in connection.execute(query.order_by(issues.c.step))]


def _recorded(connection: Connection, scope: Scope, n: int, step: int | None) -> tuple[int, list[int]] | None:
    """The recorded step to replay now and its issues in order; None when fresh groups are due."""
    steps = dict(pinned(connection, scope))
    if not steps:
        return None
    lowest = min(steps)
    wanted = lowest if step is None else step
    if wanted > lowest:
        raise LedgerError(
            f"take for step {wanted} in stage {scope.stage!r}: recorded steps {sorted(steps)} wait to be "
            f"replayed; take and acknowledge step {lowest} first, or unpin() to give the recorded order up"
        )
    if wanted not in steps:
        return None
    if steps[wanted] > n:
        raise LedgerError(
            f"take for step {wanted} in stage {scope.stage!r}: the recorded step has {steps[wanted]} groups, "
            f"{n} were asked for; ask for at least as many, or unpin() to give the recorded order up"
        )
    where = (
        scope.mine,
        issues.c.pin == State.TRAINED,
        issues.c.state == State.READY,
        issues.c.step == wanted,
    )
    return wanted, list(connection.scalars(sa.select(issues.c.seq).where(*where).order_by(issues.c.pos)))


def take(
    connection: Connection, scope: Scope, n: int, strategy: str, step: int | None
) -> tuple[int | None, int | None, tuple[IssueKey, ...], float]:
    """ready -> leased for up to `n` groups: (lease, recorded step, keys, expiry)."""
    pick = get_strategy(strategy)
    sweep(connection, scope)
    recorded = _recorded(connection, scope, n, step)
    if recorded is None:
        free = (scope.mine, issues.c.state == State.READY, issues.c.pin.is_(None))
        replay, seqs = None, pick(Candidates(connection, free), n)
    else:
        replay, seqs = recorded
    now = scope.clock()
    expires = now + scope.lease_s
    if not seqs:
        return None, None, (), expires
    row = {"stage": scope.stage, "session": scope.session, "status": "open", "expires": expires}
    row |= {"step": replay, "replay": replay is not None, "read": False}
    made = connection.execute(sa.insert(leases).values(row)).inserted_primary_key
    assert made is not None
    lease = int(made[0])
    move = sa.update(issues).where(issues.c.seq == sa.bindparam("which"), issues.c.state == State.READY)
    values = {"state": State.LEASED, "lease": lease, "changed": now, "pos": sa.bindparam("place")}
    connection.execute(move.values(values), [{"which": s, "place": i} for i, s in enumerate(seqs)])
    held = connection.execute(sa.select(issues).where(issues.c.lease == lease).order_by(issues.c.pos)).all()
    if [r.seq for r in held] != seqs:
        raise LedgerError(f"delivery strategy {strategy!r} picked a group twice, or one that is not ready")
    return lease, replay, tuple(key_of(r) for r in held), expires


def _check_step(connection: Connection, scope: Scope, step: int) -> None:
    covered = last_checkpoint(connection, scope)
    if covered is not None and step <= covered:
        raise LedgerError(
            f"ack of step {step} in stage {scope.stage!r}: checkpoint {covered} already covers it; "
            "count steps on from the checkpoint, or rewind() to an earlier one"
        )
    check_replayed(connection, scope, step - 1, f"ack of step {step}")


def check_replayed(connection: Connection, scope: Scope, step: int, doing: str) -> None:
    """Raises LedgerError while a recorded step up to `step` waits for its replay: it would be left behind."""
    waiting = (scope.mine, issues.c.pin == State.TRAINED, issues.c.step <= step)
    lowest = connection.scalar(sa.select(sa.func.min(issues.c.step)).where(*waiting))
    if lowest is not None:
        raise LedgerError(
            f"{doing} in stage {scope.stage!r}: recorded step {lowest} has not been replayed; take and "
            "acknowledge it first, or unpin() to give the recorded order up"
        )


def _redecide(connection: Connection, scope: Scope, step: int) -> None:
    """Make again the other decisions recorded for steps up to `step` that nobody made again."""
    where = (scope.mine, issues.c.pin.is_not(None), issues.c.pin != State.TRAINED, issues.c.step <= step)
    again = {"state": issues.c.pin, "pin": None, "changed": scope.clock()}
    connection.execute(sa.update(issues).where(*where).values(again))


def ack(connection: Connection, scope: Scope, lease: int | None, step: int) -> None:
    """leased -> trained(step), provisional until a checkpoint covers the step."""
    row = None if lease is None else check_lease(connection, scope, lease, f"ack of step {step}")
    if row is not None and row.replay and row.step != step:
        raise LedgerError(f"ack of step {step}: lease {lease} replays recorded step {row.step}")
    _check_step(connection, scope, step)
    if row is not None:
        trained = (scope.mine, issues.c.state == State.TRAINED, issues.c.step == step)
        before = connection.execute(
            sa.select(sa.func.count()).select_from(issues).where(*trained)
        ).scalar_one()
        values = {"state": State.TRAINED, "step": step, "pin": None, "pos": issues.c.pos + before}
        held = (issues.c.lease == lease, issues.c.state == State.LEASED)
        connection.execute(sa.update(issues).where(*held).values(**values, changed=scope.clock()))
        done = sa.update(leases).where(leases.c.lease == lease)
        connection.execute(done.values(status="acked", step=step))
    _redecide(connection, scope, step)
    higher = (stages.c.stage == scope.stage, stages.c.last_step < step)
    connection.execute(sa.update(stages).where(*higher).values(last_step=step))


def renew(connection: Connection, scope: Scope, lease: int) -> float:
    """A new expiry for an open lease."""
    check_lease(connection, scope, lease, "renew")
    expires = scope.clock() + scope.lease_s
    connection.execute(sa.update(leases).where(leases.c.lease == lease).values(expires=expires))
    return expires


def freeze(connection: Connection, scope: Scope, lease: int) -> None:
    """Note that a lease's groups are being read. An acknowledged lease may be read again."""
    row = connection.execute(sa.select(leases).where(leases.c.lease == lease)).one()
    if row.status == "acked":
        return
    check_lease(connection, scope, lease, "reading")
    if not row.read:
        connection.execute(sa.update(leases).where(leases.c.lease == lease).values(read=True))


def _rows(connection: Connection, lease: int) -> Sequence[Any]:
    held = (issues.c.lease == lease, issues.c.state.in_((State.LEASED, State.TRAINED)))
    return connection.execute(sa.select(issues).where(*held).order_by(issues.c.pos)).all()


def read_groups(connection: Connection, lease: int) -> list[Group]:
    """The groups of a lease, in order of delivery."""
    return load_groups(connection, _rows(connection, lease))


def read_tasks(connection: Connection, lease: int) -> list[Task]:
    """The tasks of a lease's groups, in order of delivery."""
    rows = _rows(connection, lease)
    found = load_tasks(connection, (row.task for row in rows))
    return [found[row.task] for row in rows]
