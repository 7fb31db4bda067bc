"""Moving issues from state to state: every rule about who may do what is here.

All functions run inside one transaction of the writer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer.errors import LedgerError
from trivet.buffer.records import Record, chunks, insert_records, reward_columns
from trivet.buffer.schema import LEGAL, State, checkpoints, issues, leases, rollouts, sessions, stages
from trivet.types import FEEDBACK_TIMEOUT, IssueKey, Pending, Reward, Unscored


@dataclass(frozen=True, slots=True)
class Scope:
    """The stage, and on whose behalf and at what time an operation runs."""

    stage: str
    session: int
    owner: str
    lease_s: float
    clock: Callable[[], float]

    @property
    def mine(self) -> sa.ColumnElement[bool]:
        return issues.c.stage == self.stage


# What nearly every operation runs is built once: building a statement costs as much as running it.
_FIND = sa.select(issues).where(
    issues.c.stage == sa.bindparam("at"),
    issues.c.task_id == sa.bindparam("wanted"),
    issues.c.epoch == sa.bindparam("in_epoch"),
    issues.c.round == sa.bindparam("in_round"),
)
_LATE_CLAIMS = (
    sa.update(issues)
    .where(issues.c.stage == sa.bindparam("at"), issues.c.state == State.IN_FLIGHT)
    .where(issues.c.kind.is_(None), issues.c.expires <= sa.bindparam("now"))
    .values(state=State.ISSUED, session=None, expires=None, changed=sa.bindparam("now"))
)
_LATE_LEASES = sa.select(leases.c.lease).where(
    leases.c.stage == sa.bindparam("at"), leases.c.status == "open", leases.c.expires <= sa.bindparam("now")
)
_LATE_FEEDBACK = sa.select(rollouts.c.id, rollouts.c.issue).where(
    rollouts.c.reward_until <= sa.bindparam("now"), rollouts.c.stage == sa.bindparam("at")
)


def key_of(row: Any) -> IssueKey:
    """The issue key of a row."""
    return IssueKey(row.task_id, row.epoch, row.round)


def find(connection: Connection, scope: Scope, key: IssueKey) -> Any:
    """The issue's row. Raises LedgerError when it was never issued."""
    named = {"at": scope.stage, "wanted": key.task_id, "in_epoch": key.epoch, "in_round": key.round}
    row = connection.execute(_FIND, named).one_or_none()
    if row is None:
        raise LedgerError(
            f"issue {IssueKey(*key)} does not exist in stage {scope.stage!r}: call issue() first"
        )
    return row


def refusal(scope: Scope, row: Any, wanted: State | str, why: str = "") -> LedgerError:
    """The error of an illegal move: issue, state, wanted state, reason."""
    text = f"issue {key_of(row)} of stage {scope.stage!r} is {row.state}; it cannot become {wanted}"
    return LedgerError(f"{text}: {why}" if why else text)


def _holder(connection: Connection, session: int) -> str:
    row = connection.execute(sa.select(sessions).where(sessions.c.session == session)).one()
    return f"{row.owner!r} (session {row.session}, process {row.pid})"


def check_claim(connection: Connection, scope: Scope, row: Any, wanted: State) -> None:
    """Raises LedgerError unless this session plays the issue. A claim holds until somebody else has it."""
    if row.state == State.ISSUED:
        why = "it was not claimed, or the claim ran out and was returned"
        raise refusal(scope, row, wanted, f"{why}; claim() it again")
    if row.kind is None and row.session != scope.session:
        holder = _holder(connection, row.session)
        raise refusal(
            scope, row, wanted, f"it is being played by {holder}, not by {scope.owner!r}; drop this result"
        )


def check_lease(connection: Connection, scope: Scope, lease: int, doing: str) -> Any:
    """The lease's row. Raises LedgerError unless it is open, this session's and not run out."""
    row = connection.execute(sa.select(leases).where(leases.c.lease == lease)).one_or_none()
    if row is None or row.stage != scope.stage:
        raise LedgerError(f"{doing}: lease {lease} does not exist in stage {scope.stage!r}")
    now = scope.clock()
    if row.status != "open":
        raise LedgerError(
            f"{doing}: lease {lease} is {row.status}; its groups are no longer yours: take() again"
        )
    if row.session != scope.session:
        raise LedgerError(f"{doing}: lease {lease} belongs to {_holder(connection, row.session)}")
    if row.expires <= now:
        raise LedgerError(
            f"{doing}: lease {lease} of {scope.owner!r} ran out {now - row.expires:.1f} s ago and its groups "
            "return to ready: raise buffer.lease_s or renew() the lease during long steps"
        )
    return row


def release_leases(connection: Connection, ids: Sequence[int], status: str, now: float) -> int:
    """Return the groups of leases to ready; how many."""
    if not ids:
        return 0
    held = (issues.c.lease.in_(ids), issues.c.state == State.LEASED)
    pos = sa.case((issues.c.pin.is_(None), sa.null()), else_=issues.c.pos)
    n = connection.execute(
        sa.update(issues).where(*held).values(state=State.READY, lease=None, pos=pos, changed=now)
    ).rowcount
    connection.execute(sa.update(leases).where(leases.c.lease.in_(ids)).values(status=status))
    return n


def _expire_feedback(connection: Connection, scope: Scope, now: float) -> None:
    """Pending rewards whose time is over become Unscored; their groups may become ready."""
    found = connection.execute(_LATE_FEEDBACK, {"at": scope.stage, "now": now}).all()
    if not found:
        return
    gone = reward_columns(Unscored(FEEDBACK_TIMEOUT, "no feedback came in time"))
    for part in chunks([row.id for row in found]):
        connection.execute(sa.update(rollouts).where(rollouts.c.id.in_(part)).values(gone))
    for part in chunks(sorted({row.issue for row in found})):
        settle(connection, part, now)


def settle(connection: Connection, seqs: Sequence[int], now: float) -> None:
    """Recount the pending rewards of stored issues; those with none left become ready."""
    waiting = (
        sa.select(sa.func.count())
        .where(rollouts.c.issue == issues.c.seq, rollouts.c.reward_until.is_not(None))
        .scalar_subquery()
    )
    connection.execute(sa.update(issues).where(issues.c.seq.in_(seqs)).values(pending=waiting))
    done = (issues.c.seq.in_(seqs), issues.c.state == State.IN_FLIGHT, issues.c.pending == 0)
    connection.execute(
        sa.update(issues).where(*done, issues.c.kind.is_not(None)).values(state=State.READY, changed=now)
    )


def sweep(connection: Connection, scope: Scope) -> None:
    """Apply what time alone decides: claims and leases that ran out, feedback that did not come."""
    now = scope.clock()
    values = {"at": scope.stage, "now": now}
    connection.execute(_LATE_CLAIMS, values)
    release_leases(connection, connection.scalars(_LATE_LEASES, values).all(), "expired", now)
    _expire_feedback(connection, scope, now)


# -- issue, claim, put ---------------------------------------------------------------------------


def insert_issues(connection: Connection, scope: Scope, keys: Sequence[IssueKey]) -> list[IssueKey]:
    """Issue those of `keys` (one epoch and round) that are not issued yet, in order; the new ones."""
    if not keys:
        return []
    epoch, round_ = keys[0].epoch, keys[0].round
    where = (scope.mine, issues.c.epoch == epoch, issues.c.round == round_)
    known: set[str] = set()
    for part in chunks([key.task_id for key in keys]):
        known.update(
            connection.scalars(sa.select(issues.c.task_id).where(*where, issues.c.task_id.in_(part)))
        )
    fresh = [key for key in keys if key.task_id not in known]
    common = {"stage": scope.stage, "state": State.ISSUED, "changed": scope.clock(), "pending": 0}
    if fresh:
        connection.execute(sa.insert(issues), [{**key._asdict(), **common} for key in fresh])
    return fresh


def claim(connection: Connection, scope: Scope, n: int) -> list[IssueKey]:
    """Up to `n` issued ones become this session's, in issue order."""
    sweep(connection, scope)
    free = (scope.mine, issues.c.state == State.ISSUED, issues.c.pin.is_(None))
    found = connection.execute(sa.select(issues).where(*free).order_by(issues.c.seq).limit(n)).all()
    now = scope.clock()
    taken = {
        "state": State.IN_FLIGHT,
        "session": scope.session,
        "expires": now + scope.lease_s,
        "changed": now,
    }
    for part in chunks([row.seq for row in found]):
        connection.execute(sa.update(issues).where(issues.c.seq.in_(part)).values(taken))
    return [key_of(row) for row in found]


def abandon(connection: Connection, scope: Scope, keys: Sequence[IssueKey]) -> None:
    """Give claimed issues back unplayed. Those whose claim ran out are not held any more: passed over."""
    for key in keys:
        row = find(connection, scope, key)
        taken_over = row.state == State.IN_FLIGHT and row.kind is None and row.session != scope.session
        if row.state == State.ISSUED or taken_over:
            continue
        if row.state != State.IN_FLIGHT or row.kind is not None:
            raise refusal(
                scope, row, State.ISSUED, "only a claimed issue with nothing stored can be given back"
            )
        back = {"state": State.ISSUED, "session": None, "expires": None, "changed": scope.clock()}
        connection.execute(sa.update(issues).where(issues.c.seq == row.seq).values(back))


def _stored(record: Record, state: State, now: float) -> dict[str, Any]:
    return {**record.issue, "state": state, "session": None, "expires": None, "changed": now}


def find_all(connection: Connection, scope: Scope, keys: Sequence[IssueKey]) -> dict[IssueKey, Any]:
    """Rows of issues by key, few statements for many. Raises LedgerError when one was never issued."""
    wanted, rows = set(keys), {}
    # Epochs and rounds too: without them no index serves, and all that was ever issued is read.
    where = (
        scope.mine,
        issues.c.epoch.in_({key.epoch for key in keys}),
        issues.c.round.in_({key.round for key in keys}),
    )
    for part in chunks(sorted({key.task_id for key in keys})):
        for row in connection.execute(sa.select(issues).where(*where, issues.c.task_id.in_(part))):
            if key_of(row) in wanted:
                rows[key_of(row)] = row
    for key in keys:
        if key not in rows:
            find(connection, scope, key)  # raises
    return rows


def _set_stored(connection: Connection, scope: Scope, stored: Sequence[tuple[int, Record]]) -> None:
    """The issues' new states, in one statement for all. Every record has the same columns."""
    now = scope.clock()
    values = [
        {
            "which": seq,
            **_stored(record, State.IN_FLIGHT if record.issue["pending"] else State.READY, now),
        }
        for seq, record in stored
    ]
    names = [name for name in values[0] if name != "which"]
    update = sa.update(issues).where(issues.c.seq == sa.bindparam("which"))
    columns = {name: sa.bindparam(f"new_{name}") for name in names}
    rows = [{"which": v["which"], **{f"new_{name}": v[name] for name in names}} for v in values]
    connection.execute(update.values(columns), rows)


def store(
    connection: Connection, scope: Scope, records: Sequence[tuple[IssueKey, Record]]
) -> list[list[str]]:
    """in_flight -> ready (or in_flight, stored, while rewards are pending); rollout ids by group."""
    if not records:
        return []
    rows = find_all(connection, scope, [key for key, _ in records])
    for key, _ in records:
        if rows[key].kind is not None or State(rows[key].state).terminal:
            why = "its group is already stored; drop this second result"
            raise refusal(scope, rows[key], State.READY, why)
        check_claim(connection, scope, rows[key], State.READY)
    stored = [(rows[key].seq, record) for key, record in records]
    insert_records(connection, stored)
    _set_stored(connection, scope, stored)
    return [record.ids for _, record in records]


def store_new(
    connection: Connection, scope: Scope, records: Sequence[tuple[IssueKey, Record]]
) -> list[IssueKey]:
    """Issue and store records at once; those already issued are left as they are. The new keys."""
    fresh = set(insert_issues(connection, scope, [key for key, _ in records]))
    new = [(key, record) for key, record in records if key in fresh]
    if not new:
        return []
    where = (scope.mine, issues.c.epoch == new[0][0].epoch, issues.c.round == new[0][0].round)
    seqs: dict[str, int] = {}
    for part in chunks([key.task_id for key, _ in new]):
        found = sa.select(issues.c.task_id, issues.c.seq).where(*where, issues.c.task_id.in_(part))
        seqs.update((row.task_id, row.seq) for row in connection.execute(found))
    insert_records(connection, [(seqs[key.task_id], record) for key, record in new])
    _set_stored(connection, scope, [(seqs[key.task_id], record) for key, record in new])
    return [key for key, _ in new]


# -- decisions -----------------------------------------------------------------------------------


def next_step(connection: Connection, scope: Scope) -> int:
    """The step after the last one acknowledged: what a decision without a step is tied to."""
    return (
        1
        + connection.execute(sa.select(stages.c.last_step).where(stages.c.stage == scope.stage)).scalar_one()
    )


def _check_pin(scope: Scope, row: Any, wanted: State, step: int | None) -> None:
    if row.pin != wanted or step not in (None, row.step):
        asked = "" if step is None else f" at step {step}"
        why = f"it is pinned: step {row.step} decided {row.pin} before the rewind, now{asked} {wanted}"
        raise refusal(scope, row, wanted, f"{why}; replay that step, or unpin() to decide anew")


def decide(
    connection: Connection, scope: Scope, key: IssueKey, wanted: State, step: int | None, *,
    record: Record | None = None, **why: Any,
) -> None:  # fmt: skip
    """Make a terminal decision other than trained. `why` holds cause, gap or tries."""
    sweep(connection, scope)
    row = find(connection, scope, key)
    state = State(row.state)
    if row.pin is not None:
        _check_pin(scope, row, wanted, step)
        step = row.step
    elif state is State.ISSUED:
        check_claim(connection, scope, row, wanted)
    elif wanted not in LEGAL[state]:
        raise refusal(scope, row, wanted)
    if state is State.IN_FLIGHT:
        check_claim(connection, scope, row, wanted)
    if state is State.LEASED:
        check_lease(connection, scope, row.lease, f"issue {key} -> {wanted}")
    values: dict[str, Any] = {"state": wanted, "pin": None, "step": step, **why}
    if record is not None:
        if row.kind is not None:
            raise refusal(scope, row, wanted, "its group is already stored; decide without passing the group")
        insert_records(connection, [(row.seq, record)])
        values |= record.issue
    values["step"] = next_step(connection, scope) if step is None else step
    values |= {"session": None, "expires": None, "lease": None, "pos": None, "changed": scope.clock()}
    connection.execute(sa.update(issues).where(issues.c.seq == row.seq).values(values))


def requeue(connection: Connection, scope: Scope, key: IssueKey) -> IssueKey:
    """Open the next round of an issue that ended untrained; the same call again gives the same key."""
    row = find(connection, scope, key)
    if not State(row.state).terminal or row.state == State.TRAINED:
        raise refusal(
            scope, row, "requeued", "only filtered, stale, failed and surplus issues are played again"
        )
    again = IssueKey(key.task_id, key.epoch, key.round + 1)
    insert_issues(connection, scope, [again])
    return again


def late_reward(connection: Connection, scope: Scope, rollout: str, reward: Reward) -> None:
    """Set the reward of a stored rollout while its issue is open and unread."""
    sweep(connection, scope)
    query = sa.select(issues, rollouts.c.reward).join(rollouts, rollouts.c.issue == issues.c.seq)
    row = connection.execute(query.where(scope.mine, rollouts.c.id == rollout)).one_or_none()
    if row is None:
        raise LedgerError(f"rollout {rollout!r} does not exist in stage {scope.stage!r}")
    doing = f"reward for rollout {rollout!r} refused: issue {key_of(row)} is {row.state}"
    if State(row.state).terminal:
        raise LedgerError(f"{doing}; the reward came too late (kept: {json.loads(row.reward)})")
    if row.pin is not None:
        raise LedgerError(f"{doing} and pinned to step {row.step}, which is replayed as it was recorded")
    if row.lease is not None:
        lease = connection.execute(sa.select(leases).where(leases.c.lease == row.lease)).one()
        if lease.read:
            raise LedgerError(
                f"{doing} and its batch has been read (lease {row.lease}); the reward came too late"
            )
    if isinstance(reward, Pending) and row.state != State.IN_FLIGHT:
        raise LedgerError(f"{doing}; a known reward cannot become pending again")
    connection.execute(sa.update(rollouts).where(rollouts.c.id == rollout).values(reward_columns(reward)))
    settle(connection, [row.seq], scope.clock())


def last_checkpoint(connection: Connection, scope: Scope) -> int | None:
    """The step of the newest checkpoint, None before the first."""
    query = sa.select(sa.func.max(checkpoints.c.step)).where(checkpoints.c.stage == scope.stage)
    return connection.execute(query).scalar_one()
