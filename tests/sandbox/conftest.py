"""Sandbox tests are skipped, with the reason, where bubblewrap cannot build its walls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from trivet.sandbox import Bubblewrap, SandboxError, shut_down


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
