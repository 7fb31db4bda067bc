"""A policy as an environment sees it: an engine, a renderer and how to sample."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import numpy as np

from trivet.agents.attempt import Attempt
from trivet.agents.conversation import Conversation
from trivet.engine.base import Engine
from trivet.recipe import schema
from trivet.render.base import Rendered, Renderer
from trivet.types import Attachment, Message, Task, canonical_json

_PROMPTS_KEPT = 256
_PromptKey = tuple[int | str, ...]


class AttachmentWriter(Protocol):
    """Where heavy columns go (`buffer.AttachmentStore`); start:stop are token positions in the node."""

    def put(self, array: np.ndarray, kind: str, start: int, stop: int) -> Attachment: ...


class Policy:
    """Gives conversations; holds no state of any of them.

    `context` is the longest sequence (tokens) a conversation may reach, `top` how many log-probabilities per
    sampled token are asked for and written to `attachments`. `executor` runs rendering and parsing
    (None: the event loop's default threads). `system_prompt` goes before a task without a system message.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: schema.Sampling,
        *,
        context: int,
        player: str = "policy",
        system_prompt: str | None = None,
        executor: Executor | None = None,
        attachments: AttachmentWriter | None = None,
        top: int = 0,
    ) -> None:
        if context < 2:
            raise ValueError(f"policy {player!r}: context of {context} tokens holds no prompt and answer")
        if top and attachments is None:
            raise ValueError(f"policy {player!r}: top={top} needs an attachment store to write to")
        self.engine = engine
        self.renderer = renderer
        self.sampling = sampling
        self.context = context
        self.player = player
        self._system = None if system_prompt is None else Message("system", system_prompt)
        self.executor = executor
        self.attachments = attachments
        self.top = top
        self._prompts: OrderedDict[_PromptKey, tuple[tuple[Message, ...], Rendered]] = OrderedDict()
        self._lock = threading.Lock()

    def conversation(
        self, task: Task, attempt: Attempt, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Conversation:
        """A new conversation that opens with the task's messages.

        Raises SchemaError when the task holds media, ConversationError when it ends in an answer.
        """
        return Conversation(self, task, attempt, tools)

    def opening(self, task: Task) -> list[Message]:
        """The task's messages, with the system prompt where the task has none of its own."""
        messages = list(task.messages)
        if self._system is not None and messages[0].role != "system":
            messages.insert(0, self._system)
        return messages

    def render_opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        """The first request of a conversation; a group's attempts share one rendering. Any thread."""
        # A group's attempts hold the same message objects; kept in the entry, so that their ids stay theirs.
        # Tools are plain objects that anybody may change: they are known by what they say.
        kept = tuple(messages)
        offered = canonical_json([dict(tool) for tool in tools]) if tools else ""
        key = (*map(id, kept), offered)
        with self._lock:
            entry = self._prompts.get(key)
        rendered = entry[1] if entry is not None else None
        if rendered is None:
            rendered = self.renderer.render(messages, tools=tools, generate=True)
            with self._lock:
                self._prompts[key] = (kept, rendered)
                while len(self._prompts) > _PROMPTS_KEPT:
                    self._prompts.popitem(last=False)
        return rendered
