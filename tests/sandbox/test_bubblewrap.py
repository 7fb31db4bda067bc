"""The bubblewrap backend: commands, files, bounds."""

from __future__ import annotations

import asyncio
import sys

import pytest

from trivet.sandbox import Bubblewrap, ExecResult, Limits, PathError, Template

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
            assert await sandbox.read("/work/a/b") == b"two"
            with pytest.raises(PathError, match="nothing"):
                await sandbox.read("nothing")
        async with await backend.start(Template(snapshot=taken)) as sandbox:
            assert await sandbox.read("a/b") == b"one"

    asyncio.run(work())
