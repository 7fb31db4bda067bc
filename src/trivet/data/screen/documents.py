"""What is screened: the texts of a conversation or of a prompt, and where it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.data.record import Record
from trivet.data.screen.phrases import WordBuffer, word_buffer
from trivet.data.screen.words import normalise
from trivet.types import Message


@dataclass(frozen=True, slots=True)
class Document:
    """Texts in order. `roles` names who wrote each; empty: all are prompts, as in a set of RL tasks."""

    texts: tuple[str, ...]
    roles: tuple[str, ...] = ()
    source: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        if self.roles and len(self.roles) != len(self.texts):
            raise ValueError(f"{self.place}: {len(self.roles)} roles for {len(self.texts)} texts")

    @property
    def prompts(self) -> tuple[str, ...]:
        """What users wrote."""
        if not self.roles:
            return self.texts
        return tuple(text for text, role in zip(self.texts, self.roles, strict=True) if role == "user")

    def is_prompt(self, text: int) -> bool:
        return not self.roles or self.roles[text] == "user"

    def key(self) -> str:
        """Name by content: the same in every run, wherever the document stands."""
        text = "\n".join(normalise(text) for text in self.texts)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Batch(Sequence[Document]):
    """Documents that several passes look at: their words are found once."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = list(documents)

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Batch:
        return documents if isinstance(documents, Batch) else cls(documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, at: Any) -> Any:
        return self._documents[at]

    @cached_property
    def size_D(self) -> NDArray[np.int64]:
        """Texts of each document."""
        return np.fromiter((len(document.texts) for document in self._documents), np.int64, len(self))

    @cached_property
    def buffer(self) -> WordBuffer:
        """The words of all texts; none of them runs on into the next."""
        return word_buffer([text for document in self._documents for text in document.texts])

    def without(self, documents: Collection[int]) -> Batch:
        """The others; this batch itself if there is nothing to leave out."""
        if not documents:
            return self
        return Batch(document for d, document in enumerate(self._documents) if d not in documents)


def document_of(messages: Iterable[Message], source: str = "", place: str = "") -> Document:
    """A conversation as a document: contents, reasoning and the arguments of calls, of every role. Media
    parts are not looked at."""
    texts: list[str] = []
    roles: list[str] = []
    for message in messages:
        for text in _texts(message):
            if text:
                texts.append(text)
                roles.append(message.role)
    return Document(tuple(texts), tuple(roles) if texts else (), source, place)


def document_of_record(record: Record) -> Document:
    """A record with everything in it that could be trained: the rejected answer of a pair included."""
    return document_of([*record.messages, *(record.rejected or ())], record.source, record.place)


def _texts(message: Message) -> Sequence[str]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content if part.type == "text")
    calls = ("\n".join(_leaves(call.arguments)) for call in message.tool_calls)
    return (message.reasoning or "", content, *calls)


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers in a value: as JSON, a line break would be a letter."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif value is not None:
        yield str(value)
