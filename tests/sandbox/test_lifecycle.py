"""Nothing is left: no process, no folder, no control group, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandbox.conftest import leftovers, soon

from trivet.sandbox import Bubblewrap, Limits, SandboxError, Tag, ZygotePool, client, reap
from trivet.sandbox.client import base_folder, hostname, owner_name, sandboxes

pytestmark = pytest.mark.usefixtures("nothing_left")
FOREVER = ["sh", "-c", "setsid sleep 1000 & sleep 1000"]


async def _success() -> None:
    async with await Bubblewrap().start() as sandbox:
        assert (await sandbox.exec(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo on"])).stdout == b"on\n"
        assert b"sleep 1000" in (await sandbox.exec(["ps", "ax"])).stdout  # background processes live on


async def _failure() -> None:
    with pytest.raises(KeyError):
        async with await Bubblewrap().start():
            raise KeyError


async def _timeout() -> None:
    async with await Bubblewrap().start() as sandbox:
        assert (await sandbox.exec(FOREVER, timeout=0.3)).cause == "timeout"
        assert b"sleep 1000" not in (await sandbox.exec(["ps", "ax"])).stdout  # the whole tree is gone
        assert (await sandbox.exec(["true"])).ok


async def _cancelled() -> None:
    async with await Bubblewrap().start() as sandbox:
        task = asyncio.create_task(sandbox.exec(FOREVER))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert b"sleep 1000" not in (await sandbox.exec(["ps", "ax"])).stdout


async def _cancelled_start() -> None:
    for pause in (0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06):
        task = asyncio.create_task(Bubblewrap().start())
        await asyncio.sleep(pause)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # it may have started before
            await (await task).close()
    assert soon(lambda: not sandboxes(f"{os.getpid()}-"))


async def _forgotten() -> None:
    await Bubblewrap().start()
    await ZygotePool(1).warm()


async def _deadline() -> None:
    sandbox = await Bubblewrap(Tag("short", lifetime_s=0.5)).start()
    assert await asyncio.to_thread(soon, lambda: not sandboxes(f"{os.getpid()}-"))
    with pytest.raises(SandboxError):
        await sandbox.exec(["true"])
    await sandbox.close()


@pytest.mark.parametrize(
    "way", [_success, _failure, _timeout, _cancelled, _cancelled_start, _forgotten, _deadline]
)
def test_nothing_is_left_after(way) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(way())


_OWNER = """
import asyncio, os, time
from trivet.sandbox import Bubblewrap, Limits, ZygotePool
async def main():
    sandbox, pool = await Bubblewrap().start(), ZygotePool(1)
    await sandbox.write("a", b"x")
    await sandbox.snapshot()
    long = Limits(wall_s=600.0, cpu_s=600)
    tasks = [sandbox.exec(["sleep", "600"], limits=long), pool.run("while True: pass", limits=long)]
    tasks = [asyncio.create_task(task) for task in tasks]
    await asyncio.sleep(1.0)
    print("ready", flush=True)
    if os.fork() == 0:  # a child that lives on holds nothing
        os.close(1)
        time.sleep(20)
        os._exit(0)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


@pytest.fixture
def owner() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    assert len(sandboxes(f"{process.pid}-")) >= 2
    return process


def test_nothing_is_left_after_kill_of_the_owner(owner: subprocess.Popen[bytes]) -> None:
    owner.kill()
    owner.wait()
    assert soon(lambda: not leftovers(owner.pid)), leftovers(owner.pid)


def test_nothing_is_left_after_kill_of_owner_and_keeper(owner: subprocess.Popen[bytes]) -> None:
    """The sandboxes die with their keeper; the next owner's reaper removes the folders and groups."""
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    for pid in (*map(int, children), owner.pid):
        os.kill(pid, signal.SIGKILL)
    owner.wait()
    assert soon(lambda: not sandboxes(f"{owner.pid}-"))
    assert soon(lambda: reap() is not None and not leftovers(owner.pid)), leftovers(owner.pid)


def test_a_killed_keeper_is_an_error_and_is_replaced() -> None:
    async def work() -> None:
        sandbox = await Bubblewrap().start()
        task = asyncio.create_task(sandbox.exec(["sleep", "100"]))
        await asyncio.sleep(0.2)
        keeper = client.client().process
        keeper.kill()
        with pytest.raises(SandboxError, match="keeps the sandboxes"):
            await task
        await asyncio.to_thread(keeper.wait, 10)
        async with await Bubblewrap().start() as other:
            assert (await other.exec(["true"])).ok

    asyncio.run(work())


def test_the_reaper_spares_the_living_and_strangers(tmp_path: Path) -> None:
    async def work() -> None:
        async with await Bubblewrap().start() as sandbox:
            dead = base_folder() / "999999999-1-abc"
            dead.mkdir()
            assert reap() == [dead.name]
            assert (await sandbox.exec(["true"])).ok

    asyncio.run(work())


def test_every_sandbox_is_labelled() -> None:
    async def work() -> bytes:
        async with await Bubblewrap(Tag("my run/3")).start() as sandbox:
            return (await sandbox.exec(["uname", "-n"])).stdout

    assert asyncio.run(work()).decode().strip() == hostname(owner_name(os.getpid()), Tag("my run/3"))
    assert hostname("1-2", Tag("my run/3")) == "trivet-1-2-my-run-3"


def test_helpers_are_nice_and_have_one_thread() -> None:
    """So that verifying does not slow down sampling on the same cores."""
    code = (
        "import os; print(os.nice(0), *(os.environ[n + '_NUM_THREADS'] for n in ('OMP', 'OPENBLAS', 'MKL')))"
    )

    async def work() -> set[bytes]:
        async with await Bubblewrap().start() as sandbox, ZygotePool(1) as pool:
            cold = await sandbox.exec([f"python3.{sys.version_info[1]}", "-c", code])
            warm = await pool.run(code, limits=Limits())
        return {cold.stdout, warm.stdout}

    assert asyncio.run(work()) == {b"19 1 1 1\n"}
    assert os.getpriority(os.PRIO_PROCESS, client.client().process.pid) == 19
