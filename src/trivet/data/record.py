"""One conversation on its way from a source to a training set, and what was done to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trivet.types import Message, content_hash


class RecordDropped(ValueError):
    """A record that cannot be used. `cause` is a word to count by (`answer_conflict`, `too_long` ...); the
    text says what was seen."""

    def __init__(self, cause: str, text: str = "") -> None:
        super().__init__(text or cause)
        self.cause = cause


@dataclass(slots=True)
class Record:
    """A normalised conversation.

    `place` is where it was read ("chats.jsonl:12"); `done` names what changed it, in order (repairs, splits);
    `rejected` holds the answer a preference pair rejects, from the first message that differs. `category`
    names the capability it teaches. `part` counts the examples that one row became.
    """

    messages: list[Message]
    source: str = ""
    place: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""
    category: str = ""
    weight: float = 1.0
    part: int = 0
    done: list[str] = field(default_factory=list)
    rejected: list[Message] | None = None

    def key(self) -> str:
        """Hash of what would be trained: messages and tools, wherever they came from."""
        return content_hash([[m.to_dict() for m in self.messages], self.tools])


@dataclass(slots=True)
class Drop:
    """A row or record that was left out, and why."""

    cause: str
    place: str
    source: str = ""
    text: str = ""


Step = Callable[[Record], Record | list[Record]]
"""What one pass does: the record (changed in place or new), several in its stead, or raises RecordDropped."""


def run_step(
    records: Iterable[Record | Drop], step: Step, counts: Counter[str] | None = None
) -> Iterator[Record | Drop]:
    """A step over a stream: drops pass through, what the step refuses becomes a drop and is counted."""
    for record in records:
        if isinstance(record, Drop):
            yield record
            continue
        try:
            out = step(record)
        except RecordDropped as error:
            if counts is not None:
                counts[error.cause] += 1
            yield Drop(error.cause, record.place, record.source, str(error))
            continue
        yield from out if isinstance(out, list) else (out,)
