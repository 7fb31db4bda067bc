"""Checkpoints, going back to them, and collecting what they no longer need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer import sessions as who
from trivet.buffer.errors import LedgerError
from trivet.buffer.lease import check_replayed, pinned
from trivet.buffer.moves import Scope, key_of, last_checkpoint, release_leases
from trivet.buffer.records import chunks, to_json
from trivet.buffer.schema import (
    TERMINAL,
    State,
    attachments,
    checkpoints,
    garbage,
    issues,
    leases,
    rollouts,
    stages,
)
from trivet.types import IssueKey


@dataclass(frozen=True, slots=True)
class Decision:
    """A recorded decision other than trained, to be made again when its step is replayed."""

    key: IssueKey
    state: State
    step: int
    cause: str | None
    gap: int | None
    tries: int | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was taken back from owners that will not come back."""

    claims: int  # in_flight -> issued
    groups: int  # leased -> ready
    alive: int  # claims of owners that may still be playing


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind undid."""

    step: int
    undone: dict[State, int]  # decisions of later steps, by state
    recovered: Recovered
    pinned: list[tuple[int, int]] = field(default_factory=list)  # (step, groups) to be replayed
    checkpoints: list[int] = field(default_factory=list)  # later ones, dropped

    def __str__(self) -> str:
        undone = ", ".join(f"{n} {state}" for state, n in self.undone.items()) or "nothing"
        replay = ", ".join(f"step {step} ({n} groups)" for step, n in self.pinned) or "no step"
        return (
            f"rewound to step {self.step}: undone {undone}; returned {self.recovered.claims} claims and "
            f"{self.recovered.groups} leased groups; to replay: {replay}"
        )


@dataclass(frozen=True, slots=True)
class Freed:
    """What a collection freed. `attachments`: names no rollout refers to any more."""

    rollouts: int
    bytes: int
    attachments: tuple[str, ...]


def checkpoint(connection: Connection, scope: Scope, step: int, state: str) -> None:
    """Make acknowledgements up to `step` final, together with the state they led to."""
    newest = last_checkpoint(connection, scope)
    if newest is not None and step < newest:
        raise LedgerError(
            f"checkpoint of step {step} in stage {scope.stage!r}: there is one of step {newest}; "
            f"rewind({step}) first"
        )
    check_replayed(connection, scope, step, f"checkpoint of step {step}")
    here = (checkpoints.c.stage == scope.stage, checkpoints.c.step == step)
    connection.execute(sa.delete(checkpoints).where(*here))
    row = {"stage": scope.stage, "step": step, "state": state, "created": scope.clock()}
    connection.execute(sa.insert(checkpoints).values(row))
    higher = (stages.c.stage == scope.stage, stages.c.last_step < step)
    connection.execute(sa.update(stages).where(*higher).values(last_step=step))


def encode_state(state: Any) -> str:
    """The JSON of a checkpoint's state. Raises LedgerError on what is not JSON."""
    try:
        return to_json(state)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"a checkpoint's state must be JSON: {error}") from error


def read_state(connection: Connection, scope: Scope, step: int) -> Any:
    """The state stored with checkpoint `step`."""
    query = sa.select(checkpoints).where(checkpoints.c.stage == scope.stage)
    rows = {row.step: row for row in connection.execute(query)}
    if step not in rows:
        raise LedgerError(f"stage {scope.stage!r} has no checkpoint of step {step}; there are {sorted(rows)}")
    return json.loads(rows[step].state)


def recover(connection: Connection, scope: Scope, dead: Sequence[str], *, own_leases: bool) -> Recovered:
    """Return claims and leases of dead owners (and this session's own leases, where asked)."""
    playing = (scope.mine, issues.c.state == State.IN_FLIGHT, issues.c.kind.is_(None))
    open_ = (leases.c.stage == scope.stage, leases.c.status == "open")
    holders = set(connection.scalars(sa.select(issues.c.session).where(*playing).distinct()))
    holders |= set(connection.scalars(sa.select(leases.c.session).where(*open_).distinct()))
    gone = who.dead(connection, holders, scope.session, dead)
    now = scope.clock()
    back = {"state": State.ISSUED, "session": None, "expires": None, "changed": now}
    late = sa.or_(issues.c.session.in_(gone), issues.c.expires <= now)
    claims = connection.execute(sa.update(issues).where(*playing, late).values(back)).rowcount
    over = leases.c.session.in_([*gone, scope.session] if own_leases else gone)
    ids = connection.scalars(
        sa.select(leases.c.lease).where(*open_, sa.or_(over, leases.c.expires <= now))
    ).all()
    groups = release_leases(connection, ids, "released", now)
    alive = connection.execute(sa.select(sa.func.count()).select_from(issues).where(*playing)).scalar_one()
    return Recovered(claims, groups, alive)


def _check_rewind(connection: Connection, scope: Scope, step: int) -> None:
    row = connection.execute(sa.select(stages).where(stages.c.stage == scope.stage)).one()
    if step < row.collected:
        raise LedgerError(
            f"rewind of stage {scope.stage!r} to step {step}: data up to step {row.collected} was collected; "
            f"the earliest step it can go back to is {row.collected}"
        )
    if step > row.last_step:
        raise LedgerError(
            f"rewind of stage {scope.stage!r} to step {step}: this ledger knows steps up to {row.last_step}. "
            "The checkpoint is of another run, of a rolled-back line, or the ledger file is an older copy; "
            "resume from a checkpoint this ledger has"
        )


def rewind(connection: Connection, scope: Scope, step: int, dead: Sequence[str]) -> Rewound:
    """Go back to checkpoint `step`: undo and pin every later decision, recover from dead owners."""
    _check_rewind(connection, scope, step)
    recovered = recover(connection, scope, dead, own_leases=True)
    later = (scope.mine, issues.c.state.in_(TERMINAL), issues.c.step > step)
    count = sa.select(issues.c.state, sa.func.count()).where(*later).group_by(issues.c.state)
    undone = {State(state): int(n) for state, n in connection.execute(count)}
    back = sa.case((issues.c.kind.is_(None), State.ISSUED), else_=State.READY)
    values = {"pin": issues.c.state, "state": back, "lease": None, "changed": scope.clock()}
    connection.execute(sa.update(issues).where(*later).values(values))
    acked = (leases.c.stage == scope.stage, leases.c.status == "acked", leases.c.step > step)
    connection.execute(sa.update(leases).where(*acked).values(status="undone"))
    newer = (checkpoints.c.stage == scope.stage, checkpoints.c.step > step)
    dropped = list(
        connection.scalars(sa.select(checkpoints.c.step).where(*newer).order_by(checkpoints.c.step))
    )
    connection.execute(sa.delete(checkpoints).where(*newer))
    connection.execute(sa.update(stages).where(stages.c.stage == scope.stage).values(last_step=step))
    return Rewound(step, undone, recovered, pinned(connection, scope), dropped)


def decided(connection: Connection, scope: Scope, step: int) -> list[Decision]:
    """The recorded decisions other than trained that wait to be made again at `step`, in issue order."""
    where = (scope.mine, issues.c.pin.is_not(None), issues.c.pin != State.TRAINED, issues.c.step == step)
    rows = connection.execute(sa.select(issues).where(*where).order_by(issues.c.seq))
    return [Decision(key_of(r), State(r.pin), r.step, r.cause, r.gap, r.tries) for r in rows]


def unpin(connection: Connection, scope: Scope) -> int:
    """Give recorded decisions up: groups are ready for any batch, the rest is issued again; how many.

    An issue whose next round was opened keeps its decision, or its prompt would be trained twice.
    """
    later = issues.alias("later")
    same = (
        later.c.stage == issues.c.stage,
        later.c.epoch == issues.c.epoch,
        later.c.task_id == issues.c.task_id,
    )
    requeued = sa.exists().where(*same, later.c.round == issues.c.round + 1)
    held = (scope.mine, issues.c.pin.is_not(None), issues.c.state != State.LEASED)
    now = scope.clock()
    keep = {"state": issues.c.pin, "pin": None, "changed": now}
    connection.execute(sa.update(issues).where(*held, issues.c.pin != State.TRAINED, requeued).values(keep))
    free = sa.case((issues.c.pending > 0, State.IN_FLIGHT), else_=issues.c.state)
    clear = dict.fromkeys(("pin", "step", "pos", "cause", "gap", "tries"))
    return connection.execute(
        sa.update(issues).where(*held).values(**clear, state=free, changed=now)
    ).rowcount


_NOTHING = dict.fromkeys(
    (
        *("pin", "step", "pos", "cause", "gap", "tries", "session", "expires", "lease"),
        *("kind", "group_id", "task", "min_version", "max_version"),
    )
)


def resample(connection: Connection, scope: Scope) -> int:
    """Return to issued, without their rollouts, what was played for a step that was never acknowledged."""
    recorded = (scope.mine, issues.c.pin == State.TRAINED)
    top = connection.scalar(sa.select(sa.func.max(issues.c.step)).where(*recorded))
    if top is None:
        top = connection.scalar(sa.select(stages.c.last_step).where(stages.c.stage == scope.stage))
    unused = sa.and_(issues.c.state == State.READY, issues.c.pin.is_(None))
    broken = sa.and_(issues.c.pin.is_not(None), issues.c.pin != State.TRAINED, issues.c.step > top)
    found = connection.execute(sa.select(issues).where(scope.mine, sa.or_(unused, broken))).all()
    clear = {**_NOTHING, "state": State.ISSUED, "pending": 0, "changed": scope.clock()}
    for part in chunks(found):
        seqs = [row.seq for row in part]
        ids = connection.scalars(sa.select(rollouts.c.id).where(rollouts.c.issue.in_(seqs))).all()
        _unrefer(connection, ids)
        connection.execute(sa.delete(rollouts).where(rollouts.c.issue.in_(seqs)))
        connection.execute(sa.update(issues).where(issues.c.seq.in_(seqs)).values(clear))
    for row in found:
        again = (
            issues.c.task_id == row.task_id,
            issues.c.epoch == row.epoch,
            issues.c.round == row.round + 1,
        )
        unplayed = (scope.mine, *again, issues.c.state == State.ISSUED, issues.c.pin.is_(None))
        connection.execute(sa.delete(issues).where(*unplayed))
    return len(found)


def collect(connection: Connection, scope: Scope, oldest: int) -> Freed:
    """Drop the token blobs of decisions up to step `oldest`, the oldest kept checkpoint."""
    newest = last_checkpoint(connection, scope)
    if newest is None or oldest > newest:
        have = "none" if newest is None else f"up to step {newest}"
        raise LedgerError(
            f"collect up to step {oldest} in stage {scope.stage!r}: checkpoints exist {have}; "
            "only what a durable checkpoint covers can be collected"
        )
    done = (scope.mine, issues.c.state.in_(TERMINAL), issues.c.step <= oldest)
    old = (rollouts.c.trace.is_not(None), rollouts.c.issue.in_(sa.select(issues.c.seq).where(*done)))
    size = sa.select(rollouts.c.id, sa.func.length(rollouts.c.trace).label("size")).where(*old)
    found = connection.execute(size).all()
    for part in chunks([row.id for row in found]):
        connection.execute(sa.update(rollouts).where(rollouts.c.id.in_(part)).values(trace=None))
    names = _unrefer(connection, [row.id for row in found])
    older = (checkpoints.c.stage == scope.stage, checkpoints.c.step < oldest)
    connection.execute(sa.delete(checkpoints).where(*older))
    higher = (stages.c.stage == scope.stage, stages.c.collected < oldest)
    connection.execute(sa.update(stages).where(*higher).values(collected=oldest))
    return Freed(len(found), sum(row.size for row in found), names)


def _unrefer(connection: Connection, ids: Sequence[str]) -> tuple[str, ...]:
    """Drop the attachment references of rollouts; the names that nothing refers to any more."""
    added: dict[str, float] = {}
    for part in chunks(ids):
        refs = attachments.c.rollout.in_(part)
        for name, when in connection.execute(sa.select(attachments.c.name, attachments.c.added).where(refs)):
            added[name] = max(when, added.get(name, 0.0))
        connection.execute(sa.delete(attachments).where(refs))
    for part in chunks(sorted(added)):
        held = attachments.c.name.in_(part)
        for name in connection.scalars(sa.select(attachments.c.name).where(held)):
            added.pop(name, None)
        connection.execute(sa.delete(garbage).where(garbage.c.name.in_(part)))
    if added:
        connection.execute(sa.insert(garbage), [{"name": n, "added": when} for n, when in added.items()])
    return tuple(sorted(added))


def unreferenced(connection: Connection) -> dict[str, float]:
    """Attachments to be removed, with the time their last rollout was stored."""
    held = sa.exists().where(attachments.c.name == garbage.c.name)
    return {row.name: row.added for row in connection.execute(sa.select(garbage).where(~held))}


def removed(connection: Connection, names: Sequence[str]) -> None:
    """Their files are gone (or in use again): forget them."""
    for part in chunks(names):
        connection.execute(sa.delete(garbage).where(garbage.c.name.in_(part)))
