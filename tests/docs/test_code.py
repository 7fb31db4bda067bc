"""The pages' Python and SQL is executed as it stands."""

from __future__ import annotations

import ast
import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT, Block, blocks, name_of, pages, write_files

from trivet.envs import make_env
from trivet.types import Message, Rollout, Scored, Task, Termination, Trace

RUN = [page for page in pages() if any(block.mark == "runs" for block in blocks(page))]
SQL = [block for page in pages() for block in blocks(page, "sql")]
# References are written by others and show signatures too.
PYTHON = [block for page in pages() if "reference" not in page.parts for block in blocks(page, "python")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's own folder: the working directory, and where its modules are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_marked_blocks_run(page: Path, folder: Path, small_run: Path) -> None:
    (folder / "runs").symlink_to(small_run / "runs")
    write_files(page, folder)
    space: dict[str, Any] = {"__name__": "docs_example"}
    for block in blocks(page, "python"):
        if block.mark == "runs":
            exec(compile(block.code, block.place, "exec"), space)


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.place)
def test_every_block_is_python(block: Block) -> None:
    ast.parse(block.code, block.place)


@pytest.mark.parametrize("block", SQL, ids=lambda b: b.place)
def test_queries_run(block: Block, small_run: Path) -> None:
    with sqlite3.connect(small_run / "runs" / "small" / "ledger.sqlite") as ledger:
        rows = ledger.execute(block.code).fetchall()
    assert rows or "unscored" in block.code


def test_the_environment_of_the_readme() -> None:
    """Its class is found under its name and scores the share of capitals."""
    (block,) = [b for b in blocks(ROOT / "README.md", "python") if "register_env" in b.code]
    exec(compile(block.code, block.place, "exec"), {"__name__": "docs_example"})
    task = Task("shout", (Message("user", "say it"),))
    rollout = Rollout(task, Trace(), Scored(0), Termination.FINISHED)
    for text, share in (("HELLO", 1.0), ("Hello", 0.2), ("123", 0.0)):
        reward = asyncio.run(make_env("shout").score(task, Message("assistant", text), rollout))  # type: ignore[attr-defined]
        assert reward == Scored(share)
