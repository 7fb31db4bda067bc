"""One stage's part of the ledger: what explorers, trainers and the runtime call.

Every method is one transaction, thread-safe and synchronous; on an event loop use `asyncio.to_thread`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer import lease as leasing
from trivet.buffer import moves, replay
from trivet.buffer.attachments import AttachmentStore
from trivet.buffer.errors import LedgerError
from trivet.buffer.lease import Lease
from trivet.buffer.moves import Scope
from trivet.buffer.records import (
    Record,
    check_name,
    load_groups,
    make_record,
    printable,
    stored_reward,
    task_record,
)
from trivet.buffer.replay import Decision, Freed, Recovered, Rewound
from trivet.buffer.schema import TERMINAL, State, checkpoints, issues, rollouts
from trivet.buffer.store import Database
from trivet.types import Group, IssueKey, Reward, Task

_R = TypeVar("_R")
_EXAMPLES = 256  # put in one transaction


def _whole(value: int, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LedgerError(f"{what} is {value!r}: give a whole number of at least {least}")
    return value


class StageLedger:
    """The issues, groups, leases and checkpoints of one stage. Made by `Ledger.stage`."""

    def __init__(self, database: Database, scope: Scope) -> None:
        self.name = scope.stage
        self._db = database
        self._scope = scope

    def _write(self, name: str, run: Callable[[Connection], _R], *, durable: bool = False) -> _R:
        return self._db.write(f"{name} (stage {self.name!r})", run, durable=durable)

    # -- explorer --------------------------------------------------------------------------------

    def issue(self, task_ids: Sequence[str], epoch: int, round: int = 0) -> list[IssueKey]:
        """Issue each task once for this epoch and round, in the given order; issued ones stay as they are."""
        keys = [IssueKey(task, _whole(epoch, "epoch"), _whole(round, "round")) for task in task_ids]
        for key in keys:
            check_name(key.task_id, "task id")
        if len(set(keys)) < len(keys):
            seen: set[IssueKey] = set()
            double = next(k for k in keys if k in seen or seen.add(k))
            raise LedgerError(
                f"task id {double.task_id!r} comes twice in epoch {epoch}: task ids must be unique"
            )
        self._write("issue", lambda c: moves.insert_issues(c, self._scope, keys))
        return keys

    def claim(self, n: int) -> list[IssueKey]:
        """Up to `n` issued ones become in_flight for this session, in issue order."""
        _whole(n, "claim: n")
        return self._write("claim", lambda c: moves.claim(c, self._scope, n))

    def abandon(self, keys: Iterable[IssueKey]) -> None:
        """Give claimed issues back unplayed (an orderly stop). All or none."""
        held = list(keys)
        self._write("abandon", lambda c: moves.abandon(c, self._scope, held))

    def put(self, group: Group) -> list[str]:
        """Store a played group; its rollout ids. Empty ids and group names in `group` are filled in.

        The issue becomes ready, or waits in flight for pending rewards. Raises LedgerError when this session
        does not play the issue, when a group of it is stored already, or when the group is malformed.
        """
        return self.put_all([group])[0]

    def put_all(self, groups: Iterable[Group]) -> list[list[str]]:
        """`put` of many groups in one transaction, all or none; their rollout ids."""
        records = [(group.issue, self._record(group, group.issue)) for group in groups]
        if len({key for key, _ in records}) < len(records):
            raise LedgerError("put_all: an issue comes twice; each has one group")
        return self._write("put", lambda c: moves.store(c, self._scope, records))

    def put_examples(self, groups: Iterable[Group], epoch: int) -> list[IssueKey]:
        """Issue and store groups that need no playing (sft, preference, replay); the keys that were new.

        The key is (group.issue.task_id, epoch, 0). Repeating a call is harmless: what is there stays.
        """
        pairs = ((IssueKey(g.issue.task_id, _whole(epoch, "epoch")), g) for g in groups)
        return self._store_new((key, self._record(group, key)) for key, group in pairs)

    def put_tasks(self, tasks: Iterable[Task], epoch: int) -> list[IssueKey]:
        """Store bare tasks (kind `task`), to be read with `lease.tasks()`; the keys that were new."""
        _whole(epoch, "epoch")
        return self._store_new((IssueKey(task.id, epoch), task_record(task)) for task in tasks)

    def _record(self, group: Group, key: IssueKey) -> Record:
        return make_record(group, self.name, self._scope.clock(), key)

    def _store_new(self, records: Iterable[tuple[IssueKey, Record]]) -> list[IssueKey]:
        new: list[IssueKey] = []
        source = iter(records)
        while part := list(itertools.islice(source, _EXAMPLES)):
            double = len({key for key, _ in part}) < len(part)
            if double:
                raise LedgerError("put_examples: a task id comes twice in one epoch: task ids must be unique")
            new += self._write("put_examples", lambda c, part=part: moves.store_new(c, self._scope, part))
        return new

    def reward(self, rollout_id: str, reward: Reward) -> None:
        """Set a stored rollout's reward. Refused once its batch was read or its issue is terminal."""
        self._write("reward", lambda c: moves.late_reward(c, self._scope, rollout_id, reward))

    # -- decisions -------------------------------------------------------------------------------

    def _decide(
        self, key: IssueKey, state: State, step: int | None, group: Group | None = None, **why: Any
    ) -> None:
        record = None if group is None else self._record(group, key)
        if step is not None:
            _whole(step, f"issue {key}: step")
        self._write(state, lambda c: moves.decide(c, self._scope, key, state, step, record=record, **why))

    def filtered(
        self, key: IssueKey, cause: str, group: Group | None = None, *, step: int | None = None
    ) -> None:
        """A filter refused the group, judging for `step` (default: the one after the last acknowledged)."""
        self._decide(key, State.FILTERED, step, group, cause=printable(cause))

    def fail(
        self, key: IssueKey, cause: str, tries: int, group: Group | None = None, *, step: int | None = None
    ) -> None:
        """The issue could not be played within its tries."""
        self._decide(key, State.FAILED, step, group, cause=printable(cause), tries=_whole(tries, "tries"))

    def surplus(self, key: IssueKey, group: Group | None = None, *, step: int | None = None) -> None:
        """The group is not needed: its batch was already full."""
        self._decide(key, State.SURPLUS, step, group)

    def stale(self, key: IssueKey, gap: int, *, step: int | None = None) -> None:
        """The stored group is `gap` publications old and too old for training."""
        self._decide(key, State.STALE, step, gap=_whole(gap, "gap"))

    def requeue(self, key: IssueKey) -> IssueKey:
        """Open the next round of an issue that ended filtered, stale, failed or surplus; its key."""
        return self._write("requeue", lambda c: moves.requeue(c, self._scope, key))

    # -- trainer ---------------------------------------------------------------------------------

    def take(self, n: int, strategy: str = "fifo", *, step: int | None = None) -> Lease:
        """Lease up to `n` ready groups; `lease.short` says how many are missing.

        While recorded steps wait to be replayed, the lease holds exactly the groups of the step asked for
        (the earliest without `step`), in their recorded order. Raises LedgerError on a step out of turn.
        """
        _whole(n, "take: n", 1)
        found, replayed, keys, expires = self._write(
            "take", lambda c: leasing.take(c, self._scope, n, strategy, step)
        )
        return Lease(found, keys, n, expires, replayed, self)

    def ack(self, lease: Lease, step: int) -> None:
        """The lease's groups were trained at `step`; provisional until a checkpoint of at least `step`.

        Other decisions recorded for the step before a rewind, and not made again since, are made again now.
        """
        _whole(step, "ack: step")
        self._write("ack", lambda c: leasing.ack(c, self._scope, lease.id, step), durable=True)

    def release(self, lease: Lease) -> None:
        """Give the lease's groups back; they are ready again, and a replayed step stays pinned."""
        if lease.id is not None:
            self._write("release", lambda c: self._release(c, lease))

    def _release(self, connection: Connection, lease: Lease) -> None:
        assert lease.id is not None
        moves.check_lease(connection, self._scope, lease.id, "release")
        moves.release_leases(connection, [lease.id], "released", self._scope.clock())

    def renew(self, lease: Lease) -> None:
        """Move the lease's expiry to a full lease time from now. Raises LedgerError when it is over."""
        held = lease.id
        if held is not None:
            lease.expires = self._write("renew", lambda c: leasing.renew(c, self._scope, held))

    def _freeze(self, lease: Lease) -> None:
        held = lease.id
        assert held is not None
        self._write("groups", lambda c: leasing.freeze(c, self._scope, held))

    def _read(self, lease: Lease) -> list[Group]:
        self._freeze(lease)
        held = lease.id
        assert held is not None
        return self._db.read("groups", lambda c: leasing.read_groups(c, held))

    def _tasks(self, lease: Lease) -> list[Task]:
        held = lease.id
        assert held is not None
        return self._db.read("tasks", lambda c: leasing.read_tasks(c, held))

    # -- runtime ---------------------------------------------------------------------------------

    def checkpoint(self, step: int, state: Any = None) -> None:
        """Make all acknowledgements up to `step` final, in one durable transaction with `state` (JSON).

        Call it when weights and optimiser of `step` are safely on disk.
        """
        _whole(step, "checkpoint: step")
        text = replay.encode_state(state)
        self._write("checkpoint", lambda c: replay.checkpoint(c, self._scope, step, text), durable=True)

    def checkpoints(self) -> list[int]:
        """Steps of the stage's checkpoints, in order."""
        query = (
            sa.select(checkpoints.c.step).where(checkpoints.c.stage == self.name).order_by(checkpoints.c.step)
        )
        return self._db.read("checkpoints", lambda c: list(c.scalars(query)))

    def state(self, step: int) -> Any:
        """What was stored with the checkpoint of `step`."""
        return self._db.read("state", lambda c: replay.read_state(c, self._scope, step))

    def rewind(self, step: int, dead: Sequence[str] = ()) -> Rewound:
        """Go back to the checkpoint of `step` (0: the stage's start) and say what was undone.

        Decisions of later steps are undone and pinned to their step; claims and leases of dead owners (and of
        those named in `dead`) return, as do this session's own leases.
        """
        _whole(step, "rewind: step")
        names = list(dead)
        return self._write("rewind", lambda c: replay.rewind(c, self._scope, step, names), durable=True)

    def recover(self, dead: Sequence[str] = ()) -> Recovered:
        """Return claims and leases of dead owners without undoing any step (a restarted explorer)."""
        names = list(dead)
        return self._write("recover", lambda c: replay.recover(c, self._scope, names, own_leases=False))

    def pinned(self) -> list[tuple[int, int]]:
        """(step, groups) of the recorded steps that wait to be replayed, in order."""
        return self._db.read("pinned", lambda c: leasing.pinned(c, self._scope))

    def decided(self, step: int) -> list[Decision]:
        """Recorded decisions other than trained that wait to be made again at `step`, in issue order."""
        return self._db.read("decided", lambda c: replay.decided(c, self._scope, step))

    def unpin(self) -> int:
        """Give the recorded steps up: their groups are ready for any batch; how many issues that concerns."""
        return self._write("unpin", lambda c: replay.unpin(c, self._scope), durable=True)

    def resample(self) -> int:
        """After a rewind: issue again what was played for the step that was never finished; how many.

        Ready groups that belong to no recorded step, and decisions recorded for steps after the last trained
        one, go back to issued and their rollouts are dropped. For synchronous runs, which play a broken step
        again as a whole; an asynchronous run keeps and uses what it has.
        """
        return self._write("resample", lambda c: replay.resample(c, self._scope), durable=True)

    def collect(self, oldest_step: int, store: AttachmentStore | None = None) -> Freed:
        """Free the tokens of all decisions that the oldest kept checkpoint covers; columns and text stay.

        Attachments nobody refers to any more are removed from `store`; without it they are remembered for the
        next collection that has one.
        """
        _whole(oldest_step, "collect: step")
        freed = self._write("collect", lambda c: replay.collect(c, self._scope, oldest_step))
        if store is not None:
            names = self._db.read("collect", replay.unreferenced)
            store.free(names)
            self._write("collect", lambda c: replay.removed(c, sorted(names)))
        return freed

    # -- questions -------------------------------------------------------------------------------

    def counts(self, epoch: int | None = None) -> dict[str, int]:
        """Issues by state (all states, zeros included), of one epoch or of all."""
        where = [self._scope.mine] if epoch is None else [self._scope.mine, issues.c.epoch == epoch]
        query = sa.select(issues.c.state, sa.func.count()).where(*where).group_by(issues.c.state)

        def run(connection: Connection) -> dict[str, int]:
            moves.sweep(connection, self._scope)
            return {s.value: 0 for s in State} | {str(s): int(n) for s, n in connection.execute(query)}

        return self._write("counts", run)

    def epoch_done(self, epoch: int) -> bool:
        """Every issue of the epoch is terminal, and there is at least one."""
        counts = self.counts(epoch)
        return sum(counts.values()) > 0 and all(n == 0 for s, n in counts.items() if s not in TERMINAL)

    def keys(self, *states: State, epoch: int | None = None) -> list[IssueKey]:
        """Keys of the issues in these states, in issue order."""
        where = [self._scope.mine, issues.c.state.in_(states)]
        if epoch is not None:
            where.append(issues.c.epoch == epoch)
        query = sa.select(issues).where(*where).order_by(issues.c.seq)
        return self._db.read("keys", lambda c: [moves.key_of(row) for row in c.execute(query)])

    def order(self, key: IssueKey) -> int:
        """The issue's place in the order of issue: a number that grows with every issue of the ledger."""
        return self._db.read("order", lambda c: int(moves.find(c, self._scope, key).seq))

    def orders(self, keys: Sequence[IssueKey]) -> dict[IssueKey, int]:
        """`order` of many issues at once."""
        rows = self._db.read("orders", lambda c: moves.find_all(c, self._scope, keys))
        return {key: int(rows[key].seq) for key in keys}

    def groups(self, keys: Iterable[IssueKey]) -> list[Group]:
        """Stored groups by key, whatever their state (a replayed filter, a page of samples).

        Keys with nothing stored are passed over. Raises LedgerError on collected tokens.
        """
        wanted = list(keys)

        def run(connection: Connection) -> list[Group]:
            found = [moves.find(connection, self._scope, key) for key in wanted]
            return load_groups(connection, [row for row in found if row.kind is not None])

        return self._db.read("groups", run)

    def reward_of(self, rollout_id: str) -> Reward:
        """The reward stored for a rollout. Raises LedgerError when there is no such rollout."""
        here = (rollouts.c.id == rollout_id, rollouts.c.stage == self.name)
        text = self._db.read("reward_of", lambda c: c.scalar(sa.select(rollouts.c.reward).where(*here)))
        if text is None:
            raise LedgerError(f"rollout {rollout_id!r} does not exist in stage {self.name!r}")
        return stored_reward(text)
