"""Rollouts as rows: queryable columns, message text as JSON, tokens as one blob."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer.errors import LedgerError
from trivet.buffer.schema import attachments, rollouts, tasks
from trivet.types import (
    CodecError,
    Group,
    IssueKey,
    Message,
    Pending,
    Reward,
    Rollout,
    SchemaError,
    Scored,
    Task,
    Trace,
    TraceError,
    Unscored,
    reward_from_dict,
    reward_to_dict,
)

_HEADER = ("episode", "preference", "counters", "timings", "id")  # what has no column of its own
_CHUNK = 500  # keys in one IN list: below every database's limit on bound values


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)


def to_json(value: object) -> str:
    """Readable JSON (text is searchable as it is), falling back to escapes for text UTF-8 cannot hold."""
    text = _ENCODER.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate from a broken decoder
        return json.dumps(value, separators=(",", ":"), default=_plain)
    return text


def printable(text: str) -> str:
    """`text` as a column can hold it: what UTF-8 cannot say is written as an escape."""
    return text.encode(errors="backslashreplace").decode()


def check_name(name: str, what: str) -> None:
    """Raises LedgerError on a name that no column can hold as it is."""
    if printable(name) != name:
        raise LedgerError(f"{what} {name!r} holds a lone surrogate: names must be valid text")


@dataclass(slots=True)
class Record:
    """A group as it goes into the tables, made before the writer is troubled."""

    issue: dict[str, Any]  # columns of the issue
    rows: list[dict[str, Any]]
    tasks: dict[str, str]  # hash -> body
    attachments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [row["id"] for row in self.rows]


def reward_columns(reward: Reward) -> dict[str, Any]:
    """The reward as its five columns."""
    cause = printable(reward.cause) if isinstance(reward, Unscored) else None
    return {
        "reward_kind": {Scored: "scored", Unscored: "unscored", Pending: "pending"}[type(reward)],
        "reward_value": reward.value if isinstance(reward, Scored) else None,
        "reward_cause": cause,
        "reward_until": reward.until if isinstance(reward, Pending) else None,
        "reward": to_json(reward_to_dict(reward)),
    }


def _media(messages: Iterable[Message]) -> set[str]:
    return {
        p.attachment for m in messages if not isinstance(m.content, str) for p in m.content if p.attachment
    }


def _task_hash(task: Task, known: dict[str, str], seen: dict[int, str]) -> str:
    digest = seen.get(id(task))
    if digest is None:
        try:
            body = to_json(task.to_dict())
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"task {task.id!r} cannot be stored: its payload or profile is not plain JSON ({error})"
            ) from error
        digest = hashlib.sha256(body.encode()).hexdigest()
        known[digest] = body
        seen[id(task)] = digest
    return digest


def _rollout_row(rollout: Rollout, task: str, position: int, stage: str, now: float) -> dict[str, Any]:
    trace = rollout.trace
    known = trace.column("version")[trace.column("sampled") & (trace.column("version") >= 0)]
    return {
        "id": rollout.id,
        "position": position,
        "task": task,
        "stage": stage,
        "task_id": rollout.task.id,
        "group_id": rollout.group,
        "attempt": rollout.attempt,
        "player": rollout.player,
        "role": rollout.role,
        "source": rollout.source,
        "termination": str(rollout.termination),
        **reward_columns(rollout.reward),
        "sampled_tokens": rollout.sampled_tokens,
        "min_version": int(known.min()) if len(known) else None,
        "max_version": int(known.max()) if len(known) else None,
        "created": now,
        "messages": to_json([m.to_dict() for m in rollout.messages]),
        "header": to_json({name: getattr(rollout, name) for name in _HEADER}),
        "trace": trace.to_bytes(),
    }


def _check(group: Group, key: IssueKey) -> None:
    if not group.rollouts:
        raise LedgerError(f"issue {key}: its group holds no rollout; use fail() when nothing could be played")
    for rollout in group.rollouts:
        if rollout.task.id != key.task_id:
            raise LedgerError(f"issue {key}: its group holds a rollout of task {rollout.task.id!r}")
        for name in (rollout.id, rollout.group, rollout.player, rollout.source, key.task_id, group.id):
            check_name(name, f"issue {key}: the name")
    ids = [r.id for r in group.rollouts if r.id]
    double = sorted({i for i in ids if ids.count(i) > 1})
    if double:
        raise LedgerError(f"issue {key}: rollout ids {double} are used more than once in the group")


def make_record(group: Group, stage: str, now: float, key: IssueKey | None = None) -> Record:
    """The rows of `group`; fills in empty group names and rollout ids (a retry gives the same).

    Raises LedgerError on an empty group, a foreign task, double ids or values that are not JSON.
    """
    key = key or group.issue
    _check(group, key)
    group.id = group.id or f"{stage}/{key}"
    known: dict[str, str] = {}
    seen: dict[int, str] = {}
    rows, refs = [], []
    for position, rollout in enumerate(group.rollouts):
        rollout.group = rollout.group or group.id
        rollout.id = rollout.id or f"{stage}/{key}/{position}"
        task = _task_hash(rollout.task, known, seen)
        try:
            rows.append(_rollout_row(rollout, task, position, stage, now))
        except (TypeError, ValueError) as error:
            raise LedgerError(f"rollout {rollout.id} cannot be stored: {error}") from error
        # Media of messages belong to the data set and to the text that outlives the tokens: never freed.
        names = {a.name for a in rollout.trace.attachments()}
        names -= _media(rollout.messages) | _media(rollout.task.messages)
        refs += [{"name": name, "rollout": rollout.id, "added": time.time()} for name in sorted(names)]
    lows = [r["min_version"] for r in rows if r["min_version"] is not None]
    highs = [r["max_version"] for r in rows if r["max_version"] is not None]
    issue = {
        "kind": group.kind,
        "group_id": group.id,
        "task": rows[0]["task"],
        "pending": sum(r["reward_kind"] == "pending" for r in rows),
        "min_version": min(lows, default=None),
        "max_version": max(highs, default=None),
    }
    return Record(issue, rows, known, refs)


def task_record(task: Task) -> Record:
    """A bare task as a record of kind `task`."""
    check_name(task.id, "task id")
    known: dict[str, str] = {}
    digest = _task_hash(task, known, {})
    return Record({"kind": "task", "task": digest, "pending": 0}, [], known)


def insert_records(connection: Connection, records: Sequence[tuple[int, Record]]) -> None:
    """Write tasks, rollouts and attachment references of records, each with its issue's number.

    Raises LedgerError when a rollout id is already taken.
    """
    bodies = {digest: body for _, record in records for digest, body in record.tasks.items()}
    known: set[str] = set()
    for part in chunks(list(bodies)):
        known.update(connection.scalars(sa.select(tasks.c.hash).where(tasks.c.hash.in_(part))))
    fresh = [{"hash": h, "body": b} for h, b in bodies.items() if h not in known]
    if fresh:
        connection.execute(sa.insert(tasks), fresh)
    rows = [{**row, "issue": seq} for seq, record in records for row in record.rows]
    for part in chunks([row["id"] for row in rows]):
        taken = connection.scalars(sa.select(rollouts.c.id).where(rollouts.c.id.in_(part))).all()
        if taken:
            raise LedgerError(f"rollout ids {sorted(taken)[:3]} are already stored: ids must be unique")
    if rows:
        connection.execute(sa.insert(rollouts), rows)
    refs = [ref for _, record in records for ref in record.attachments]
    if refs:
        connection.execute(sa.insert(attachments), refs)


def chunks(values: Sequence[Any], size: int = _CHUNK) -> Iterable[Sequence[Any]]:
    """`values` in runs of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def load_tasks(connection: Connection, hashes: Iterable[str]) -> dict[str, Task]:
    """Stored tasks by hash."""
    found: dict[str, Task] = {}
    for part in chunks(sorted(set(hashes))):
        for digest, body in connection.execute(sa.select(tasks).where(tasks.c.hash.in_(part))):
            found[digest] = Task.from_dict(json.loads(body))
    return found


def _load_rollout(row: Any, task: Task) -> Rollout:
    if row.trace is None:
        raise LedgerError(f"rollout {row.id}: its tokens were collected; only its columns and text are left")
    header = json.loads(row.header)
    header |= {"group": row.group_id, "termination": row.termination}
    header |= {name: getattr(row, name) for name in ("attempt", "player", "role", "source")}
    try:
        trace = Trace.from_bytes(row.trace)
        rollout = Rollout.from_parts(
            {
                **header,
                "task": task.to_dict(),
                "reward": json.loads(row.reward),
                "messages": json.loads(row.messages),
            },
            trace,
        )
    except (CodecError, TraceError, SchemaError, KeyError, ValueError) as error:
        raise LedgerError(
            f"rollout {row.id} cannot be read: {error}. Unless another version of trivet reads it, take its "
            "issue out with fail(key, 'damaged', tries=1)"
        ) from error
    rollout.task = task
    return rollout


def load_groups(connection: Connection, found: Sequence[Any]) -> list[Group]:
    """Groups of issue rows (`seq`, `task_id`, `epoch`, `round`, `group_id`, `kind`), in the rows' order.

    Raises LedgerError on a bare task, on a damaged rollout and on collected tokens.
    """
    bare = [IssueKey(r.task_id, r.epoch, r.round) for r in found if r.kind == "task"]
    if bare:
        raise LedgerError(f"issue {bare[0]} holds a bare task and no rollouts: read it with tasks()")
    groups = {r.seq: Group(r.group_id, IssueKey(r.task_id, r.epoch, r.round), [], r.kind) for r in found}
    for part in chunks(list(groups), 64):
        query = sa.select(rollouts).where(rollouts.c.issue.in_(part))
        rows = connection.execute(query.order_by(rollouts.c.issue, rollouts.c.position)).all()
        shared = load_tasks(connection, (row.task for row in rows))
        for row in rows:
            groups[row.issue].rollouts.append(_load_rollout(row, shared[row.task]))
    return list(groups.values())


def stored_reward(text: str) -> Reward:
    """The reward of its JSON column."""
    return reward_from_dict(json.loads(text))
