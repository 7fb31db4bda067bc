"""Examples as token ids with a loss weight for each, through the chat template of their source."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trivet.data.interleave import probe_empty_think
from trivet.data.record import Record, RecordDropped
from trivet.render import Renderer, RenderError, get_renderer, load_tokenizer, supervised_tokens
from trivet.render.template import ChatTemplate
from trivet.types import Message, SchemaError, content_hash


@dataclass(frozen=True, slots=True)
class Tokens:
    """`ids_T` int32 and `train_T` float32, the loss weight of every token (0: context)."""

    ids_T: np.ndarray
    train_T: np.ndarray


def tokenizer_hash(tokenizer: Any) -> str:
    """16 hexadecimal digits: of what turns text into ids; templates, padding and truncation aside."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"padding": None, "truncation": None}
    return content_hash(state)


def _renderer(tokenizer: Any, kind: str, template_args: Mapping[str, Any] | None) -> Renderer:
    """As `get_renderer`; `auto` ends with the template itself, which writes examples but cannot sample."""
    try:
        return get_renderer(tokenizer, kind, template_args)
    except RenderError:
        if kind != "auto" or not getattr(tokenizer, "chat_template", None):
            raise
    return get_renderer(tokenizer, "template", template_args)


class SourceRenderer:
    """One tokenizer under one chat template.

    `chat_template`: a Jinja file instead of the tokenizer's own. Raises RenderError.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        kind: str = "auto",
        template_args: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        max_length: int | None = None,
    ) -> None:
        if chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            try:
                tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
            except OSError as error:
                raise RenderError(f"chat_template {chat_template}: {error.strerror}") from error
        try:
            self.renderer: Renderer = _renderer(tokenizer, kind, template_args)
        except RenderError as error:
            if chat_template is None:
                raise
            raise RenderError(f"chat_template {chat_template}: {error}") from error
        self.official = (
            ChatTemplate(tokenizer, template_args) if getattr(tokenizer, "chat_template", None) else None
        )
        self.max_length = max_length

    def adds_empty_think(self) -> bool:
        """The template puts an empty thinking block before a last answer without reasoning."""

        def text(messages: Sequence[Message]) -> str:
            return self.renderer.decode(self.renderer.render(messages, tools=(), generate=False).ids_T)

        return probe_empty_think(text)

    def tokens(self, record: Record, *, compare: bool = False) -> Tokens:
        """The example's tokens. Raises RecordDropped: not_renderable, too_long.

        `compare`: with the ids of the official template; RenderError where they differ, since others that
        were not compared will differ too.
        """
        try:
            ids_T, train_T = supervised_tokens(
                self.renderer, record.messages, tools=record.tools, weight=record.weight
            )
        except (RenderError, SchemaError) as error:
            raise RecordDropped("not_renderable", str(error)) from error
        if self.max_length is not None and len(ids_T) > self.max_length:
            raise RecordDropped(
                "too_long", f"{len(ids_T)} tokens, above max_length {self.max_length}: dropped, not cut"
            )
        if compare and self.official is not None and not self._departs(record):
            self._compare(record, ids_T)
        return Tokens(ids_T, train_T)

    def _departs(self, record: Record) -> bool:
        departs = getattr(self.renderer, "departs", None)
        return departs is not None and departs(record.messages, record.tools)

    def _compare(self, record: Record, ids_T: np.ndarray) -> None:
        assert self.official is not None
        try:
            own = np.asarray(self.official.ids(record.messages, record.tools))
        except RenderError as error:
            raise RecordDropped("not_renderable", str(error)) from error
        # One token more may end the last turn, where the template leaves that to the next turn.
        closed = len(ids_T) == len(own) + 1 and int(ids_T[-1]) in self.renderer.stop_ids
        if len(own) == len(ids_T) - closed and (own == ids_T[: len(own)]).all():
            return
        at = int(np.argmin(own[: len(ids_T)] == ids_T[: len(own)])) if len(own) and len(ids_T) else 0
        raise RenderError(
            f"{record.place}: the rendering is not the chat template's own: they part at token {at} "
            f"({self.renderer.decode(ids_T[max(0, at - 4) : at + 4])!r} instead of "
            f"{self.renderer.decode(own[max(0, at - 4) : at + 4])!r})",
        )


def source_renderers(
    tokenizer: str, sources: Mapping[str, str | None], **options: Any
) -> tuple[dict[str, SourceRenderer], str]:
    """(a renderer for each source, the tokenizer's hash). `sources`: label -> its chat template's file."""
    loaded = load_tokenizer(tokenizer)
    by_template = {
        template: SourceRenderer(loaded, chat_template=template, **options)
        for template in dict.fromkeys(sources.values())
    }
    return {label: by_template[template] for label, template in sources.items()}, tokenizer_hash(loaded)
