"""The worker pool: it survives whatever a verifier does, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet.rewards.pool import Outcome, PoolError, WorkerPool

TARGETS = str(Path(__file__).with_name("pool_targets.py"))


def gone(pid: int, limit_s: float = 10.0) -> bool:
    """The process ends (or is a zombie) within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(f"{TARGETS}:answer", 2, limit_s=1.0) as pool:
        asyncio.run(pool.warm())
        yield pool


def call(pool: WorkerPool, *args: object) -> Outcome:
    return asyncio.run(pool.call(*args))


def test_values_come_back(pool: WorkerPool) -> None:
    assert call(pool, "echo", {"a": [1, 2.5, "ü", None]}).value == {"a": [1, 2.5, "ü", None]}


def test_hanging_verifier_golden_case(pool: WorkerPool) -> None:
    async def six() -> list[Outcome]:
        kinds = ["hang", "echo", "hang", "echo", "hang", "echo"]
        return await asyncio.gather(*(pool.call(kind, 1) for kind in kinds))

    begin = time.monotonic()
    outcomes = asyncio.run(six())
    seconds = time.monotonic() - begin
    print(f"six samples, three hang, limit 1 s, two workers: {seconds:.2f} s")
    assert [o.kind for o in outcomes] == ["timed_out", "value"] * 3
    assert seconds < 2 * 3 * pool.limit_s
    assert call(pool, "echo", 2).value == 2
    deadline = time.monotonic() + 10
    while len(pool.alive()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool.alive()) == 2


@pytest.mark.parametrize("kind", ["spin", "deaf"])
def test_busy_and_deaf_verifiers_are_killed(pool: WorkerPool, kind: str) -> None:
    outcome = call(pool, kind)
    assert outcome.kind == "timed_out"
    assert "took over 1 s" in outcome.detail
    assert call(pool, "echo", 1).value == 1


@pytest.mark.parametrize(
    ("kind", "outcome", "detail"),
    [
        ("exit", "crashed", "exit code 3"),
        ("segfault", "crashed", "SIGSEGV"),
        ("leave", "raised", "SystemExit: 4"),
        ("raise", "raised", "ValueError: no such luck (pool_targets.py:"),
        ("memory", "raised", "memory limit"),
        ("object", "raised", "not JSON serializable"),
    ],
)
def test_misbehaviour_is_reported_and_survived(
    pool: WorkerPool, kind: str, outcome: str, detail: str
) -> None:
    for _ in range(2):
        got = call(pool, kind)
        assert got.kind == outcome
        assert detail in got.detail
        assert call(pool, "echo", 5).value == 5


def test_workers_are_polite(pool: WorkerPool) -> None:
    facts = call(pool, "facts").value
    assert facts["nice"] == 19
    assert facts["threads"] == "1"


def test_what_a_verifier_started_dies_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert call(pool, "child", str(note)).kind == "timed_out"
    assert gone(int(note.read_text()))


def test_workers_killed_from_outside_are_replaced(pool: WorkerPool) -> None:
    for pid in pool.alive():
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert [call(pool, "echo", i).value for i in range(4)] == [0, 1, 2, 3]


def test_killed_zygote_is_replaced(pool: WorkerPool) -> None:
    assert pool._zygote is not None
    workers = pool.alive()
    os.kill(pool._zygote.process.pid, signal.SIGKILL)
    assert all(gone(pid) for pid in workers)
    assert [call(pool, "echo", i).value for i in range(4)] == [0, 1, 2, 3]


def test_init_and_coroutines() -> None:
    with WorkerPool(f"{TARGETS}:Maker", 1, init=[40]) as pool:
        assert call(pool, 2).value == 42
    with WorkerPool(f"{TARGETS}:later", 1) as pool:
        assert call(pool, 21).value == 42


@pytest.mark.parametrize(
    ("target", "preload", "words"),
    [
        (f"{TARGETS}:anwser", (), "did you mean 'answer'"),
        ("no_such_module:f", (), "no_such_module"),
        (f"{TARGETS}:answer", ("no_such_library",), "no_such_library"),
    ],
)
def test_targets_that_do_not_load(target: str, preload: tuple[str, ...], words: str) -> None:
    with WorkerPool(target, 1, preload=preload) as pool:
        for _ in range(2):
            with pytest.raises(PoolError, match=words):
                call(pool, "echo", 1)


def test_arguments_must_be_json(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="not JSON"):
        call(pool, "echo", object())
    assert call(pool, "echo", 1).value == 1


def test_close_does_not_wait_for_a_verifier() -> None:
    pool = WorkerPool(f"{TARGETS}:answer", 1, limit_s=600)
    asyncio.run(pool.warm())
    (pid,) = pool.alive()
    futures = [pool.submit("hang"), pool.submit("hang")]
    time.sleep(0.2)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 10
    for future in futures:
        with pytest.raises(PoolError, match="closed"):
            future.result(5)
    assert gone(pid)
    with pytest.raises(PoolError, match="closed"):
        pool.submit("echo", 1)
    pool.close()


OWNER = """
import asyncio, sys, time
from trivet.rewards.pool import WorkerPool
pool = WorkerPool({target!r}, 2, limit_s=600)
asyncio.run(pool.warm())
future = pool.submit("hang")
print(pool._zygote.process.pid, *pool.alive(), flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(600)", "time.sleep(0.1)"])
def test_no_orphans_after_kill_or_exit(then: str) -> None:
    """The owner is killed with SIGKILL, or simply ends with a call under way and the pool not closed."""
    script = OWNER.format(target=f"{TARGETS}:answer", then=then)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    if "600" in then:
        owner.kill()
    assert owner.wait(10) in (0, -signal.SIGKILL)
    assert all(gone(pid) for pid in pids)
    owner.stdout.close()


def test_a_worker_that_cannot_be_replaced_does_not_end_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files left to open, for a moment: the next call tries again instead of waiting for ever."""
    with WorkerPool(f"{TARGETS}:answer", 1, limit_s=5.0) as pool:
        asyncio.run(pool.warm())
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", _no_files)
            assert pool.submit("exit").result(20).kind == "crashed"
            with pytest.raises(OSError, match="Too many open files"):
                pool.submit("echo", 1).result(20)
        assert pool.submit("echo", 1).result(20).value == 1


def _no_files() -> None:
    raise OSError(errno.EMFILE, "Too many open files")
