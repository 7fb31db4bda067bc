"""Random operations with random deaths, compared with a model that is a dictionary."""

from __future__ import annotations

import contextlib
import copy
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.buffer import Lease, Ledger, StageLedger, faults
from trivet.types import Group, IssueKey, Pending, Scored

TERMINAL = ("trained", "filtered", "stale", "failed", "surplus")


@dataclass
class Issue:
    state: str = "issued"
    step: int | None = None
    pin: str | None = None
    stored: bool = False
    session: int = 0
    lease: int | None = None

    def row(self) -> tuple[object, ...]:
        return self.state, self.step, self.pin, self.stored


@dataclass
class Model:
    """What the ledger must hold. Keys stay in order of issue."""

    issues: dict[IssueKey, Issue] = field(default_factory=dict)
    open: list[int] = field(default_factory=list)  # open leases, oldest first
    leases: dict[int, int | None] = field(default_factory=dict)  # lease -> recorded step
    order: dict[tuple[int, IssueKey], int] = field(default_factory=dict)  # place in a trained step
    last: int = 0
    saved: int = 0
    versions: int = 0
    epoch: int = 0

    def keys(self, state: str, **more: object) -> list[IssueKey]:
        return [
            k
            for k, i in self.issues.items()
            if i.state == state and all(getattr(i, name) == value for name, value in more.items())
        ]

    def snapshot(self) -> dict[IssueKey, tuple[object, ...]]:
        return {k: i.row() for k, i in self.issues.items()}

    def rewind(self, session: int) -> None:
        for issue in self.issues.values():
            if issue.state == "leased":
                issue.state, issue.lease = "ready", None
            if issue.state == "in_flight" and not issue.stored and issue.session != session:
                issue.state = "issued"
            if issue.state in TERMINAL and (issue.step or 0) > self.saved:
                issue.pin, issue.state, issue.lease = issue.state, "ready" if issue.stored else "issued", None
        self.open, self.last = [], self.saved


class Machine:
    """Applies one operation to ledger and model at once."""

    def __init__(self, path: Path, make_group: Callable[..., Group]) -> None:
        self.path, self.make = path, make_group
        self.model = Model()
        self.session = 0
        self.held: dict[int, Lease] = {}
        self.ledgers: list[Ledger] = []
        self.reopen()

    def reopen(self) -> None:
        """The process starts again; the old one is not closed."""
        self.ledger = Ledger(self.path, owner="me")
        self.ledgers.append(self.ledger)
        self.stage: StageLedger = self.ledger.stage("s")
        self.session += 1

    # Each operation changes `model` as the ledger must change, and returns the call to be made, or None when
    # there is nothing to do.

    def issue(self, model: Model, n: int) -> Callable[[], Any]:
        model.epoch += 1
        epoch, ids = model.epoch, [f"t{i}" for i in range(n % 4 + 1)]
        model.issues |= {IssueKey(t, epoch): Issue() for t in ids}
        return lambda: self.stage.issue(ids, epoch)

    def claim(self, model: Model, n: int) -> Callable[[], Any]:
        keys = model.keys("issued", pin=None)[: n + 1]
        for key in keys:
            model.issues[key].state, model.issues[key].session = "in_flight", self.session

        def call() -> None:
            assert self.stage.claim(n + 1) == keys

        return call

    def _mine(self, model: Model, n: int) -> IssueKey | None:
        keys = model.keys("in_flight", stored=False, session=self.session)
        return keys[n % len(keys)] if keys else None

    def put(self, model: Model, n: int) -> Callable[[], Any] | None:
        if (key := self._mine(model, n)) is None:
            return None
        model.issues[key].state, model.issues[key].stored = "ready", True
        return lambda: self.stage.put(self.make(key, 1))

    def put_pending(self, model: Model, n: int) -> Callable[[], Any] | None:
        if (key := self._mine(model, n)) is None:
            return None
        model.issues[key].stored = True
        return lambda: self.stage.put(self.make(key, 1, reward=lambda _: Pending(1e12)))

    def reward(self, model: Model, n: int) -> Callable[[], Any] | None:
        keys = model.keys("in_flight", stored=True)
        if not keys:
            return None
        key = keys[n % len(keys)]
        model.issues[key].state = "ready"
        return lambda: self.stage.reward(f"s/{key}/0", Scored(1.0))

    def _drop(self, model: Model, key: IssueKey, state: str, stored: bool) -> None:
        issue = model.issues[key]
        issue.state, issue.step, issue.stored = state, model.last + 1, stored or issue.stored

    def filtered(self, model: Model, n: int) -> Callable[[], Any] | None:
        if (key := self._mine(model, n)) is None:
            return None
        self._drop(model, key, "filtered", True)
        return lambda: self.stage.filtered(key, "equal", self.make(key, 1))

    def fail(self, model: Model, n: int) -> Callable[[], Any] | None:
        if (key := self._mine(model, n)) is None:
            return None
        self._drop(model, key, "failed", False)
        return lambda: self.stage.fail(key, "sandbox", 2)

    def stale(self, model: Model, n: int) -> Callable[[], Any] | None:
        keys = model.keys("ready", pin=None) + model.keys("leased", pin=None)
        if not keys:
            return None
        key = keys[n % len(keys)]
        self._drop(model, key, "stale", True)
        model.issues[key].lease = None
        return lambda: self.stage.stale(key, 3)

    def surplus(self, model: Model, n: int) -> Callable[[], Any] | None:
        keys = model.keys("ready", pin=None)
        if not keys:
            return None
        self._drop(model, keys[-1], "surplus", True)
        return lambda: self.stage.surplus(keys[-1])

    def requeue(self, model: Model, n: int) -> Callable[[], Any] | None:
        keys = [
            k
            for s in ("surplus", "failed")
            for k in model.keys(s)
            if k._replace(round=k.round + 1) not in model.issues
        ]
        if not keys:
            return None
        key = keys[n % len(keys)]
        model.issues[key._replace(round=key.round + 1)] = Issue()
        return lambda: self.stage.requeue(key)

    def take(self, model: Model, n: int) -> Callable[[], Any]:
        waiting = model.keys("ready", pin="trained")
        step = min((model.issues[k].step or 0 for k in waiting), default=None)
        if step is None:
            want, keys = n + 1, model.keys("ready", pin=None)[: n + 1]
        else:
            keys = [k for k in waiting if model.issues[k].step == step]
            keys.sort(key=lambda k: model.order[step, k])
            want = len(keys)
        number = max(model.leases, default=0) + 1
        if keys:
            model.open.append(number)
            model.leases[number] = step
        for key in keys:
            model.issues[key].state, model.issues[key].lease = "leased", number

        def call() -> None:
            lease = self.stage.take(want)
            assert (lease.keys, lease.short, lease.replay) == (tuple(keys), want - len(keys), step)
            assert lease.id == (number if keys else None)
            if keys:
                self.held[number] = lease

        return call

    def ack(self, model: Model, n: int) -> Callable[[], Any] | None:
        recorded = [i.step or 0 for i in model.issues.values() if i.pin == "trained"]
        usable = [
            x for x in model.open if (model.leases[x] or model.last + 1) <= min(recorded, default=1 << 30)
        ]
        if not usable:
            return None
        number = usable[0]
        step = model.leases[number] or model.last + 1
        model.open.remove(number)
        before = sum(i.state == "trained" and i.step == step for i in model.issues.values())
        held = [k for k, i in model.issues.items() if i.lease == number and i.state == "leased"]
        for key in held:
            model.issues[key].state, model.issues[key].step, model.issues[key].pin = "trained", step, None
        lease = self.held[number]
        for place, key in enumerate(k for k in lease.keys if k in held):
            model.order[step, key] = before + place
        for issue in model.issues.values():
            if issue.pin not in (None, "trained") and (issue.step or 0) <= step:
                issue.state, issue.pin = str(issue.pin), None
        model.last = max(model.last, step)
        return lambda: self.stage.ack(lease, step)

    def release(self, model: Model, n: int) -> Callable[[], Any] | None:
        if not model.open:
            return None
        number = model.open.pop()
        for issue in model.issues.values():
            if issue.lease == number and issue.state == "leased":
                issue.state, issue.lease = "ready", None
        return lambda: self.stage.release(self.held[number])

    def checkpoint(self, model: Model, n: int) -> Callable[[], Any] | None:
        if any(i.pin == "trained" and (i.step or 0) <= model.last for i in model.issues.values()):
            return None
        model.saved = step = model.last
        return lambda: self.stage.checkpoint(step, {"step": step})

    def rewind(self, model: Model, n: int) -> Callable[[], Any]:
        model.rewind(self.session)
        return lambda: self.stage.rewind(model.saved)

    def version(self, model: Model, n: int) -> Callable[[], Any]:
        model.versions += 1

        def call() -> None:
            assert self.ledger.new_version(0) == model.versions

        return call

    # -- running ---------------------------------------------------------------------------------

    def apply(self, name: str, n: int, death: int | None) -> bool:
        """One operation, dying at statement `death` where given; whether it died."""
        after = copy.deepcopy(self.model)
        call = getattr(self, name)(after, n)
        if call is None:
            return False
        try:
            with faults.injected(faults.crash_at(death)) if death else contextlib.nullcontext():
                call()
        except faults.Crash:
            stored = self.stored()
            assert stored in (self.model.snapshot(), after.snapshot()), (name, n, death)
            if stored == after.snapshot() and self.counters() == (after.saved, after.versions):
                self.model = after
            return True
        self.model = after
        return False

    def counters(self) -> tuple[int, int]:
        with contextlib.closing(sqlite3.connect(self.path)) as raw:
            saved = raw.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]
            return saved, raw.execute("SELECT coalesce(max(version), 0) FROM versions").fetchone()[0]

    def stored(self) -> dict[IssueKey, tuple[object, ...]]:
        """What is in the file, read beside the ledger."""
        with contextlib.closing(sqlite3.connect(self.path)) as raw:
            rows = raw.execute(
                "SELECT task_id, epoch, round, state, step, pin, kind IS NOT NULL, lease, session, "
                "(SELECT count(*) FROM rollouts WHERE issue = seq) FROM issues ORDER BY seq"
            ).fetchall()
        for row in rows:
            state, lease, session, stored, rollouts = row[3], row[7], row[8], row[6], row[9]
            assert (lease is not None) == (state in ("leased", "trained"))
            assert (session is not None) == (state == "in_flight" and not stored)
            assert rollouts == stored  # nothing lost, nothing stored twice
        return {IssueKey(*row[:3]): (*row[3:6], bool(row[6])) for row in rows}

    def check(self) -> None:
        stored = self.stored()
        assert stored == self.model.snapshot()
        assert list(stored) == list(self.model.issues)  # order of issue
        assert self.counters() == (self.model.saved, self.model.versions)

    def resume(self) -> None:
        """After a death: open anew and go back to the last checkpoint."""
        self.reopen()
        self.check()
        self.apply("rewind", 0, None)
        self.check()


NAMES = [
    *("issue", "claim", "claim", "put", "put", "put", "put", "take", "take", "ack", "ack", "ack"),
    *("put_pending", "reward", "filtered", "fail", "stale", "surplus", "requeue", "release"),
    *("checkpoint", "rewind", "version"),
]
steps = st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.none() | st.integers(1, 25))


@contextlib.contextmanager
def _machine(make_group: Callable[..., Group]) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder) / "ledger.sqlite", make_group)
        try:
            yield machine
        finally:
            for ledger in machine.ledgers:
                ledger.close()


def _play(machine: Machine, operations: list[tuple[str, int, int | None]]) -> None:
    deaths = 0
    for name, n, death in operations:
        if machine.apply(name, n, death if deaths < 6 else None):
            deaths += 1
            machine.resume()
        else:
            machine.check()
    machine.apply("rewind", 0, None)
    machine.check()
    final = [k for k, i in machine.model.issues.items() if i.state == "trained"]
    assert all((machine.model.issues[k].step or 0) <= machine.model.saved for k in final)


@settings(max_examples=15)
@given(st.lists(steps, max_size=60))
def test_any_sequence_with_any_deaths(make_group: Callable[..., Group], operations: list) -> None:
    with _machine(make_group) as machine:
        _play(machine, operations)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(steps, min_size=30, max_size=100))
def test_many_long_sequences_with_many_deaths(make_group: Callable[..., Group], operations: list) -> None:
    with _machine(make_group) as machine:
        _play(machine, operations)
