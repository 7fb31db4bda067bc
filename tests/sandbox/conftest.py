"""Sandbox tests are skipped, with the reason, where bubblewrap cannot build its walls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trivet.sandbox import Bubblewrap, SandboxError, groups, shut_down
from trivet.sandbox.client import base_folder, sandboxes


@pytest.fixture(scope="session")
def walls() -> Iterator[None]:
    async def probe() -> None:
        async with await Bubblewrap().start() as sandbox:
            await sandbox.exec(["true"])

    try:
        asyncio.run(probe())
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    yield
    shut_down()


def leftovers(pid: int) -> list[str]:
    """What is there of the sandboxes of process `pid`: processes, folders, control groups."""
    found = [f"process {inner}" for inner in sandboxes(f"{pid}-")]
    with contextlib.suppress(FileNotFoundError):
        found += [f"folder {path}" for path in base_folder().iterdir() if path.name.startswith(f"{pid}-")]
    found += [f"group {path}" for path in groups.names() if Path(path).name.startswith(f"trivet-{pid}-")]
    return found


def soon(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether the condition comes true within the limit."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture
def nothing_left(walls: None) -> Iterator[None]:
    """After the test and a shut-down nothing of this process's sandboxes exists."""
    yield
    shut_down()
    assert soon(lambda: not leftovers(os.getpid())), leftovers(os.getpid())
