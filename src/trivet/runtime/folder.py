"""The run folder: where a run lives, who may write to it, which stages are done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trivet.recipe import Recipe, dump_recipe

# What may differ when a run goes on: how long it runs, what is shown, what it runs on. Whole names, as
# `changed_keys` gives them: a task's or environment's own argument may have the same last part.
_FREE = re.compile(
    r"(?:monitor|runtime|buffer\.lease_s|description|"
    r"stages\.\d+\.(?:steps|epochs|until|max_seconds|checkpoints))"
)


class RunFolderError(RuntimeError):
    """The run folder cannot be used as asked; the message says why and what to do."""


def write_atomically(path: Path, text: str) -> None:
    """All of `text` or the old file: written beside, flushed to disk, renamed. Raises RunFolderError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFolderError(
            f"{path} cannot be written: {error.strerror}. Free space there or see to its permissions, then "
            "start the same command again: it goes on from the last checkpoint"
        ) from error


def changed_keys(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names at which two resolved recipes differ, those that may differ left out."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if not _FREE.fullmatch(f"{prefix}{key}"):
                yield from changed_keys(old.get(key), new.get(key), f"{prefix}{key}.")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from changed_keys(a, b, f"{prefix}{i}.")
    elif old != new:
        yield prefix.rstrip(".")


class RunFolder:
    """`recipe.yaml` (resolved), `state.json` (stages that are done), `ledger.sqlite`, a folder per stage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    @classmethod
    def open(cls, recipe: Recipe, *, fresh: bool = False) -> RunFolder:
        """Make or re-open the folder and lock it for this process.

        `fresh` puts an existing folder aside as NAME.1, NAME.2, ... Raises RunFolderError when another
        process runs in it, when it was begun with another recipe, or when it cannot be written.
        """
        folder = cls(Path(recipe.output.format(name=recipe.name)))
        if fresh and folder.path.exists():
            with folder.locked():
                folder._put_aside()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"{folder.path}: cannot make the run folder: {error.strerror}") from error
        folder._acquire()
        try:
            folder._check_recipe(recipe)
            write_atomically(folder.path / "recipe.yaml", dump_recipe(recipe))
        except BaseException:  # whatever it is, the lock goes
            folder.close()
            raise
        return folder

    # -- lock ------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        import fcntl

        try:
            # Kept open and never unlinked: the kernel drops the lock when the process dies.
            self._lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            self._lock = None
            raise RunFolderError(
                f"{self.path}: process {owner} is running in this folder; wait for it, end it, or give the "
                "run another folder (output=...)"
            ) from None
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot write here: {error.strerror}") from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- contents --------------------------------------------------------------------------------

    def _put_aside(self) -> None:
        n = 1
        while (aside := self.path.with_name(f"{self.path.name}.{n}")).exists():
            n += 1
        self.path.rename(aside)

    def _check_recipe(self, recipe: Recipe) -> None:
        import yaml

        stored = self.path / "recipe.yaml"
        if not stored.exists():
            return
        old, new = yaml.safe_load(stored.read_text()), yaml.safe_load(dump_recipe(recipe))
        changed = list(changed_keys(old, new))
        if changed:
            shown = ", ".join(changed[:6]) + (" ..." if len(changed) > 6 else "")
            raise RunFolderError(
                f"{self.path} was begun with another recipe; these keys differ: {shown}. Give this run "
                "its own folder (output=...), or --fresh to put the old one aside and start anew"
            )

    @property
    def state(self) -> dict[str, Any]:
        """{"stages": {name: {...}}} of the stages that are done."""
        path = self.path / "state.json"
        return json.loads(path.read_text()) if path.exists() else {"stages": {}}

    def finish_stage(self, name: str, facts: dict[str, Any]) -> None:
        state = self.state
        state["stages"][name] = {**facts, "finished": time.time()}
        write_atomically(self.path / "state.json", json.dumps(state, indent=1))

    def stage(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(exist_ok=True)
        return path
