"""Ledgers on files and in memory, a clock that tests move, and the driver module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trivet.buffer import Ledger, StageLedger
from trivet.types import Group, IssueKey


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"buffer_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    return _load("driver")


@pytest.fixture(scope="session")
def make_group(driver: ModuleType) -> Callable[..., Group]:
    return driver.make_group


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_ledger(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Ledger]]:
    """Opens the test's ledger file, as often as asked; all are closed at the end."""
    opened: list[Ledger] = []

    def open_(owner: str = "me", **more: Any) -> Ledger:
        ledger = Ledger(tmp_path / "ledger.sqlite", owner=owner, **{"lease_s": 60.0, "clock": clock, **more})
        opened.append(ledger)
        return ledger

    yield open_
    for ledger in opened:
        ledger.close()


@pytest.fixture(params=["file", "memory"])
def stage(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[StageLedger]:
    """A stage of a new ledger, once on a file and once in memory."""
    url = ":memory:" if request.param == "memory" else str(tmp_path / "stage.sqlite")
    with Ledger(url, owner="me", lease_s=60.0, clock=clock) as ledger:
        yield ledger.stage("rl")


@pytest.fixture
def filled(make_group: Callable[..., Group]) -> Callable[..., list[IssueKey]]:
    """Issues `n` tasks of an epoch and puts a group for each."""

    def fill(stage: StageLedger, n: int, epoch: int = 1, **more: Any) -> list[IssueKey]:
        stage.issue([f"t{i}" for i in range(n)], epoch)
        keys = stage.claim(n)
        for key in keys:
            stage.put(make_group(key, **more))
        return keys

    return fill
