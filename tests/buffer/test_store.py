"""The database under the ledger: batches, flushes, and errors that say what to do."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trivet.buffer import Ledger, LedgerBusy, LedgerError, StageLedger, State, faults
from trivet.buffer.store import Database, sqlite_path
from trivet.types import Group, IssueKey

Make = Callable[..., Group]
Fill = Callable[..., list[IssueKey]]


@pytest.mark.parametrize(
    ("url", "path"),
    [
        (":memory:", ":memory:"),
        ("sqlite://", ":memory:"),
        ("sqlite:///runs/a.sqlite", "runs/a.sqlite"),
        ("sqlite:////tmp/a.sqlite", "/tmp/a.sqlite"),
        (Path("/tmp/with space?#.sqlite"), "/tmp/with space?#.sqlite"),
    ],
)
def test_urls(url: str | Path, path: str) -> None:
    assert sqlite_path(url) == path


@pytest.mark.parametrize("url", ["postgresql://host/db", "redis://host", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(LedgerError, match="give a file path, sqlite:///path or :memory:"):
        Ledger(url, owner="me")


def test_owner_and_lease_time_are_checked() -> None:
    with pytest.raises(LedgerError, match="needs an owner's name"):
        Ledger(":memory:", owner="")
    with pytest.raises(LedgerError, match="lease_s is 0"):
        Ledger(":memory:", owner="me", lease_s=0)


# -- batches and flushes -------------------------------------------------------------------------


def _blocked(database: Database) -> tuple[threading.Event, threading.Thread]:
    """A write that holds the writer until the event is set."""
    entered, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        assert go.wait(30)

    thread = threading.Thread(target=lambda: database.write("hold", hold))
    thread.start()
    assert entered.wait(30)
    return go, thread


@pytest.mark.parametrize("claimed", [10, 9])
def test_waiting_writes_share_one_commit_and_fail_alone(
    open_ledger: Callable[..., Ledger], make_group: Make, claimed: int
) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    keys = stage.issue([f"t{i}" for i in range(10)], 1)
    stage.claim(claimed)  # a put without a claim must fail, and only that
    commits: list[str] = []
    go, thread = _blocked(ledger._db)
    with ThreadPoolExecutor(10) as pool, faults.injected(commits.append):
        jobs = [pool.submit(stage.put, make_group(key)) for key in keys]
        while ledger._db._queue.qsize() < 10:
            time.sleep(0.01)
        go.set()
        thread.join()
        outcomes = [job.exception() for job in jobs]
    assert [o is None for o in outcomes] == [True] * claimed + [False] * (10 - claimed)
    assert all(o is None or "was not claimed" in str(o) for o in outcomes)
    # The blocker's, and one for all ten; with a refusal among them each is on its own.
    assert commits.count("committed") == (2 if claimed == 10 else 1 + claimed)
    assert stage.counts()["ready"] == claimed


def test_ack_and_checkpoint_are_flushed_and_puts_are_not(
    open_ledger: Callable[..., Ledger], filled: Fill
) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    modes: list[int] = []

    def hook(name: str) -> None:
        if name == "commit":
            raw = ledger._db._raw(ledger._db._connection)
            modes.append(raw.execute("PRAGMA synchronous").fetchone()[0])

    def flushed(call: Callable[[], object]) -> bool:
        modes.clear()
        with faults.injected(hook):
            call()
        assert set(modes) in ({1}, {2})  # NORMAL, FULL
        return modes == [2]

    assert not flushed(lambda: filled(stage, 4))
    lease = stage.take(2)
    assert flushed(lambda: stage.ack(lease, 1))
    assert flushed(lambda: stage.checkpoint(1))
    assert not flushed(lambda: stage.take(2))
    assert flushed(lambda: stage.rewind(1))
    assert flushed(lambda: ledger.new_version(1))


def test_a_stuck_writer_is_reported(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    go, thread = _blocked(ledger._db)
    ledger._db.wait_s = 0.2
    with pytest.raises(
        LedgerError, match=r"claim .*waited 0.2 s for the writer .* was not started and will not"
    ):
        stage.claim(1)
    go.set()
    thread.join()
    ledger._db.wait_s = 30.0
    assert stage.claim(1) == []


def test_a_closed_ledger_says_so(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    ledger.close()
    ledger.close()
    for call in (lambda: stage.claim(1), stage.pinned, stage.counts):
        with pytest.raises(LedgerError, match=r"the ledger .*ledger.sqlite is closed"):
            call()


def test_memory_needs_no_file_and_is_forgotten(make_group: Make, filled: Fill) -> None:
    with Ledger(":memory:", owner="me") as one, Ledger(":memory:", owner="me") as two:
        filled(one.stage("rl"), 2)
        assert two.stages() == []


# -- errors --------------------------------------------------------------------------------------


def test_another_process_that_holds_the_file(open_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    stage = open_ledger(busy_s=0.2).stage("rl")
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "ledger.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(
            LedgerBusy, match=r"issue .*another process has held the ledger .* more than 0.2 s"
        ):
            stage.issue(["a"], 1)
        assert stage.pinned() == []  # readers go on
        child.communicate("")
    stage.issue(["a"], 1)
    assert stage.counts()[State.ISSUED] == 1


def test_a_full_disk_loses_nothing(open_ledger: Callable[..., Ledger], make_group: Make) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    keys = stage.issue([f"t{i}" for i in range(200)], 1)
    stage.claim(200)
    raw = ledger._db._raw(ledger._db._connection)
    pages = raw.execute("PRAGMA page_count").fetchone()[0]
    raw.execute(f"PRAGMA max_page_count={pages + 20}")
    stored = 0

    def fill() -> None:
        nonlocal stored
        for key in keys:
            stage.put(make_group(key, 4))
            stored += 1

    with pytest.raises(LedgerError, match=r"put .*no space left for the ledger .*ledger.sqlite.* Free space"):
        fill()
    assert 0 < stored < 200
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(stage.put, make_group(key, 4)) for key in keys[stored : stored + 8]]
        assert all(isinstance(job.exception(), LedgerError) for job in jobs)
    raw.execute("PRAGMA max_page_count=1000000")
    for key in keys[stored:]:
        stage.put(make_group(key, 4))
    assert stage.counts()[State.READY] == 200


def test_a_read_only_ledger(open_ledger: Callable[..., Ledger]) -> None:
    ledger = open_ledger()
    stage = ledger.stage("rl")
    raw = ledger._db._raw(ledger._db._connection)
    raw.execute("PRAGMA query_only=1")
    with pytest.raises(LedgerError, match=r"issue .*cannot be written: .* read-only"):
        stage.issue(["a"], 1)
    raw.execute("PRAGMA query_only=0")


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be opened: does its folder exist"):
        Ledger(tmp_path / "nowhere" / "ledger.sqlite", owner="me")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("step,reward\n" * 1000)
    with pytest.raises(LedgerError, match="is not a SQLite database, so not a ledger"):
        Ledger(path, owner="me")
    assert path.read_text().startswith("step,reward")  # and it is left alone


def test_a_database_that_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE notes (text)")
    with pytest.raises(LedgerError, match=r"is a database but not a ledger \(it has \['notes'\]\)"):
        Ledger(path, owner="me")


def test_a_newer_schema(open_ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    open_ledger().close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as raw:
        raw.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(
        LedgerError, match=r"has schema version 99, this trivet reads 1; use the trivet that wrote"
    ):
        open_ledger()


def _scribble(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(data)


def test_a_damaged_file(open_ledger: Callable[..., Ledger], filled: Fill, tmp_path: Path) -> None:
    ledger = open_ledger()
    filled(ledger.stage("rl"), 50)
    ledger.close()
    path = tmp_path / "ledger.sqlite"
    _scribble(path, 4096, path.stat().st_size)
    with pytest.raises(LedgerError, match=r"opening.*: the ledger .* is damaged\. Keep the file"):
        open_ledger()


def test_a_damaged_blob_names_its_rollout(
    open_ledger: Callable[..., Ledger], filled: Fill, tmp_path: Path
) -> None:
    ledger = open_ledger()
    stage: StageLedger = ledger.stage("rl")
    keys = filled(stage, 2)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as raw:
        raw.execute("UPDATE rollouts SET trace = substr(trace, 1, 300) WHERE id = 'rl/t0@1.0/1'")
    lease = stage.take(2)
    with pytest.raises(
        LedgerError, match=r"rollout rl/t0@1.0/1 cannot be read: .*take its issue out with fail"
    ):
        lease.groups()
    stage.fail(keys[0], "damaged", 1)
    assert [g.issue for g in lease.groups()] == [keys[1]]


def test_tables_and_statements_are_not_particular_to_sqlite() -> None:
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql

    from trivet.buffer import moves
    from trivet.buffer.schema import metadata

    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in metadata.sorted_tables:
        assert str(sa.schema.CreateTable(table).compile(dialect=dialect))
    for statement in (moves._FIND, moves._LATE_CLAIMS, moves._LATE_LEASES, moves._LATE_FEEDBACK):
        assert str(statement.compile(dialect=dialect))
    assert "BIGSERIAL" in str(sa.schema.CreateTable(metadata.tables["issues"]).compile(dialect=dialect))


def test_importing_the_room_does_not_import_sqlalchemy() -> None:
    script = "import sys, trivet.buffer; sys.exit('sqlalchemy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_a_home_folder_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert sqlite_path("~/l.sqlite") == sqlite_path("sqlite:///~/l.sqlite") == "/home/me/l.sqlite"
