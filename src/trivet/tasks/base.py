"""What a taskset is, and what is common to all of its sources."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from trivet.types import Task, content_hash


class TasksetError(ValueError):
    """A taskset cannot be made; the message names the place (file:line) and what to do."""


@dataclass(frozen=True, slots=True)
class Taskset:
    """Tasks with ids that differ, in order of play.

    `fingerprint` is a hash of all ids and contents, whatever their order; `dropped` counts, by cause, rows
    of the source that gave no task. `layout` is the known layout the source was recognised as ("" where it
    was read by its fields), `layout_env` the environment that judges such tasks.
    """

    name: str
    tasks: list[Task]
    fingerprint: str
    dropped: dict[str, int] = field(default_factory=dict)
    layout: str = ""
    layout_env: str = ""

    def __len__(self) -> int:
        return len(self.tasks)


def fingerprint(tasks: Iterable[Task]) -> str:
    """16 hexadecimal digits over all ids and contents; neither order nor the place of the files enters."""
    digest = hashlib.sha256()
    rows = ([task.id, task.env, [m.to_dict() for m in task.messages], task.payload] for task in tasks)
    for one in sorted(map(content_hash, rows)):
        digest.update(one.encode())
    return digest.hexdigest()[:16]


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" or nothing: the end of an error message."""
    near = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def share_of(key: str) -> float:
    """A number in [0, 1) that depends on `key` alone: what splits are cut by, whatever seed or order."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2.0**64
