"""The E2B backend through the unmodified SDK, against a small server of that protocol over bubblewrap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from trivet.sandbox import Bubblewrap, Limits, PathError, SandboxError, Tag, Template
from trivet.sandbox.bubblewrap import WORK
from trivet.sandbox.e2b import E2B

pytest.importorskip("e2b", reason="needs the package e2b")
pytest.importorskip("uvicorn", reason="the test server needs uvicorn")

from tests.sandbox.e2b_server import KEY, E2BServer

pytestmark = pytest.mark.usefixtures("walls")

_SHORT = Limits(wall_s=5.0, output_bytes=4096)


@asynccontextmanager
async def _served(**options: Any) -> AsyncIterator[tuple[E2BServer, E2B]]:
    server = E2BServer(Bubblewrap())
    async with server.serve() as address:
        options = {"api_key": KEY, "api_url": address, "sandbox_url": address} | options
        backend = E2B(http_version="1.1", request_timeout_s=20.0, workdir="/work", **options)
        try:
            yield server, backend
        finally:
            await backend.close()


def _run(body: Callable[[E2BServer, E2B], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(100):
            async with _served(**options) as (server, backend):
                await body(server, backend)

    asyncio.run(main())


def test_programs_their_output_and_their_causes() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        async with await backend.start(env={"COLOUR": "green"}, limits=_SHORT) as box:
            said = await box.exec(["cat"], stdin="héllo\n".encode())
            assert (said.stdout, said.cause, said.exit_code) == ("héllo\n".encode(), "ok", 0)
            said = await box.exec(
                ["sh", "-c", "echo $COLOUR $SHAPE; pwd; echo no >&2; exit 7"], env={"SHAPE": "o"}
            )
            assert (said.stdout, said.stderr) == (b"green o\n/work\n", b"no\n")
            assert (said.cause, said.exit_code) == ("exit", 7)
            said = await box.exec(["sh", "-c", "kill -SEGV $$"])
            assert (said.cause, said.exit_code, said.stderr) == ("killed", 139, b"")
            assert (await box.exec(["sh", "-c", "cat; ls -A /tmp"], stdin=b"1\n")).stdout == b"1\n"
            assert (await box.exec(["no-such-program"])).exit_code == 127
            strange = ["printf", "%s|", "a b", "'", '"$HOME"', "`id`", "\n", "*"]
            assert (await box.exec(strange)).stdout == b'a b|\'|"$HOME"|`id`|\n|*|'

    _run(body)


def test_limits_hold_inside() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        async with await backend.start(limits=_SHORT) as box:
            flood = await box.exec(["sh", "-c", "yes | head -c 100000"])
            assert flood.cause == "output" and len(flood.stdout) == 4096
            limits = Limits(cpu_s=1, memory_mb=64, file_mb=1, files=16)
            said = await box.exec(
                ["sh", "-c", "ulimit -t; ulimit -v; ulimit -f; ulimit -n; ulimit -c"], limits=limits
            )
            assert said.stdout.split() == [b"1", b"65536", b"2048", b"16", b"0"]  # sh counts 512 bytes
            spin = await box.exec(["sh", "-c", "while :; do :; done"], limits=Limits(cpu_s=1, wall_s=20.0))
            assert spin.cause in ("timeout", "killed") and spin.seconds < 15

    _run(body)


def test_a_program_that_does_not_end_is_killed_with_what_it_started() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        async with await backend.start() as box:
            slow = ["sh", "-c", "setsid sleep 987 & sleep 987"]
            assert (await box.exec(slow, timeout=0.5)).cause == "timeout"
            assert await _sleepers(box) == 0
            task = asyncio.ensure_future(box.exec(slow))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await _sleepers(box) == 0

    _run(body)


async def _sleepers(box: Any) -> int:
    script = "for f in /proc/[0-9]*/cmdline; do grep -qz '^987$' $f 2>/dev/null && echo $f; done"
    return len((await box.exec(["sh", "-c", script])).stdout.split())


def test_files_and_folders(tmp_path: Path) -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        async with await backend.start() as box:
            await box.write("a/b.bin", bytes(range(256)))
            assert await box.read(f"{WORK}/a/b.bin") == bytes(range(256))
            with pytest.raises(PathError):
                await box.read("absent")
            with pytest.raises(PathError, match="limit"):
                await box.read("a/b.bin", limit_bytes=255)
            source = tmp_path / "source"
            (source / "deep").mkdir(parents=True)
            (source / "deep" / "x.txt").write_text("x")
            (source / "run.sh").write_text("echo ran\n")
            (source / "run.sh").chmod(0o755)
            await box.upload_dir(source, "up")
            assert (await box.exec(["sh", "-c", "cat up/deep/x.txt; ./up/run.sh"])).stdout == b"xran\n"
            await box.exec(["sh", "-c", "ln -s /etc/passwd up/out; ln -s deep/x.txt up/in; mkfifo up/pipe"])
            await box.download_dir("up", tmp_path / "down")
            assert (tmp_path / "down" / "deep" / "x.txt").read_text() == "x"
            assert (tmp_path / "down" / "in").read_text() == "x"
            assert not (tmp_path / "down" / "out").is_symlink()
            assert not (tmp_path / "down" / "pipe").exists()
            with pytest.raises(PathError):
                await box.download_dir("absent", tmp_path / "none")

    _run(body)


def test_a_snapshot_is_a_template() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        async with await backend.start() as box:
            await box.write("kept", b"1")
            snapshot = await box.snapshot()
            await box.write("kept", b"2")
        async with await backend.start(Template(snapshot=snapshot)) as box:
            assert await box.read("kept") == b"1"

    _run(body)


def test_nothing_is_left_on_the_server() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        boxes = [await backend.start() for _ in range(3)]
        assert len(server.live) == 3
        await boxes[0].close()
        await boxes[0].close()
        assert len(server.live) == 2
        with pytest.raises(SandboxError, match="closed"):
            await boxes[0].exec(["true"])
        await backend.close()
        assert server.live == {}

    _run(body)


def test_a_cancelled_start_leaves_nothing() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        server.delay_s = 0.5
        task = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.pids == 1000 and server.live == {}
        server.delay_s = 0.0
        async with await backend.start() as box:
            assert (await box.exec(["true"])).ok

    _run(body)


def test_the_server_ends_what_has_passed_its_deadline() -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        box = await backend.start()
        assert len(server.live) == 1
        for _ in range(200):
            if not server.live:
                break
            await asyncio.sleep(0.05)
        assert server.live == {}
        with pytest.raises(SandboxError):
            await box.exec(["true"])
        with pytest.raises(SandboxError):
            await box.read("x")

    _run(body, tag=Tag("short", 1.0))


def test_the_reaper_kills_only_what_dead_owners_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: E2BServer, backend: E2B) -> None:
        await backend.start()
        with monkeypatch.context() as patch:
            patch.setattr("trivet.sandbox.e2b.owner_name", lambda pid: "1-7")  # not when process 1 began
            await backend.start()
        assert len(server.live) == 2
        assert await backend.reap() == 1
        assert len(server.live) == 1

    _run(body, tag=Tag("reaped"))


def test_failures_are_errors_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)

    async def body(server: E2BServer, backend: E2B) -> None:
        with pytest.raises(SandboxError, match="template 'absent' not found"):
            await backend.start(Template(image="absent"))
        with pytest.raises(SandboxError, match="cannot mount"):
            await backend.start(Template(packages=(Path("/usr"),)))
        server.refuse = 1
        with pytest.raises(SandboxError, match="no room"):
            await backend.start()
        wrong = E2B(api_key="e2b_" + "1" * 40, **_addresses(backend))
        with pytest.raises(SandboxError, match="key"):
            await wrong.start()
        with pytest.raises(SandboxError, match="E2B_API_KEY"):
            await E2B(**_addresses(backend)).start()

    _run(body)


def _addresses(backend: E2B) -> dict[str, Any]:
    return {key: backend._options[key] for key in ("api_url", "sandbox_url", "http_version")}


def test_a_server_that_is_not_there_is_an_error_not_a_verdict() -> None:
    async def main() -> None:
        address = "http://127.0.0.1:9"
        options: dict[str, Any] = {"api_url": address, "sandbox_url": address, "http_version": "1.1"}
        backend = E2B(api_key=KEY, request_timeout_s=5.0, **options)
        with pytest.raises(SandboxError, match="starting an E2B sandbox"):
            await backend.start()

    asyncio.run(main())
