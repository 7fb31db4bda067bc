"""One verifier for the tests of this folder; they are skipped, with the reason, where no sandbox works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trivet.rewards.code import CodeVerifier
from trivet.sandbox import SandboxError
from trivet.types import Reward

Judge = Callable[..., Reward]


@pytest.fixture(scope="session")
def verifier() -> Iterator[CodeVerifier]:
    made = CodeVerifier(workers=2, test_s=2.0, total_s=6.0, memory_mb=128)
    try:
        asyncio.run(made.warm())
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def judge(verifier: CodeVerifier) -> Judge:
    def judged(program: str, tests: Any, problem: str = "a problem") -> Reward:
        return asyncio.run(verifier.verify(f"It is this:\n\n```python\n{program}\n```\n", tests, problem))

    return judged
