"""What a renderer is: messages to token ids and back, with the origin of every token known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trivet.types import Message, Origin


class RenderError(ValueError):
    """A conversation cannot be rendered; the message says which part and what to do."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start:stop of one origin and one message. `trained` marks what supervision may train."""

    start: int
    stop: int
    origin: Origin
    message: int
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids (int32, shape (_T,)) and the segments that tile them in order."""

    ids_T: np.ndarray
    segments: tuple[Segment, ...]

    def mask_T(self) -> np.ndarray:
        """True where supervision trains: an assistant message's own tokens and the token ending its turn."""
        mask = np.zeros(len(self.ids_T), np.bool_)
        for segment in self.segments:
            mask[segment.start : segment.stop] = segment.trained
        return mask


class Renderer(Protocol):
    """render, parse, extend, stop_ids, mask (on `Rendered`)."""

    name: str
    stop_ids: tuple[int, ...]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generate: bool = False,
    ) -> Rendered:
        """The whole conversation; `generate` adds the generation prompt. Ids are the official template's."""
        ...

    def extend(
        self,
        messages: Sequence[Message],
        answer: int,
        answer_ids: np.ndarray,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generate: bool = True,
    ) -> Rendered:
        """Only the suffix after a sampled answer: glue the template puts behind the turn, the messages after
        index `answer`, the generation prompt. Segment positions count from the suffix's start."""
        ...

    def parse(self, ids: np.ndarray) -> Message:
        """The assistant message that sampled ids spell (reasoning and tool calls split off)."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Ids as text, special tokens shown."""
        ...
