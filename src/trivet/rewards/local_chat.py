"""A model's directory behind the embedded engine, asked as an API is: for judges that run on this machine."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.rewards.chat_api import ChatError, ChatReply
from trivet.types import Message

if TYPE_CHECKING:
    from trivet.engine.torch import TorchEngine
    from trivet.render import Renderer


class LocalChat:
    """`await chat(messages, seed=...)`: the model's reply. Loaded when first asked.

    `max_tokens` of a reply, `temperature` (0: greedy), `slots` replies at once, `context` tokens of question
    and reply. Raises ChatError: refused (the question does not fit, or cannot be rendered), server (the
    engine failed).
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        slots: int = 8,
        context: int = 4096,
        dtype: str = "float32",
        renderer: str = "auto",
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not Path(directory).is_dir():
            raise ValueError(f"judge: {directory} is no model's directory")
        if max_tokens < 1 or slots < 1 or context <= max_tokens or temperature < 0:
            raise ValueError(
                f"judge: max_tokens {max_tokens} and slots {slots} must be 1 or more, context {context} "
                f"above max_tokens, temperature {temperature} at least 0"
            )
        self.directory, self.max_tokens, self.temperature = Path(directory), max_tokens, temperature
        self.slots, self.context, self.dtype = slots, context, dtype
        self._kind, self._args = renderer, dict(template_args or {})
        self._lock = threading.Lock()
        self._open: tuple[TorchEngine, Renderer] | None = None
        self._asked = itertools.count()

    def _opened(self) -> tuple[TorchEngine, Renderer]:
        with self._lock:
            if self._open is None:
                from trivet.engine.torch import TorchEngine
                from trivet.render import get_renderer, load_tokenizer

                tokenizer = load_tokenizer(self.directory)
                renderer = get_renderer(tokenizer, self._kind, self._args)
                engine = TorchEngine(
                    str(self.directory), slots=self.slots, context=self.context, dtype=self.dtype
                )
                self._open = engine, renderer
            return self._open

    async def __call__(self, messages: Sequence[Mapping[str, str]], *, seed: int = 0) -> ChatReply:
        """The model's answer to a conversation of role and content."""
        from trivet.engine.base import EngineError, Sampling
        from trivet.render import RenderError
        from trivet.types import SchemaError

        try:
            engine, renderer = await asyncio.to_thread(self._opened)
            said = [Message(m["role"], m["content"]) for m in messages]  # type: ignore[arg-type]
            rendered = await asyncio.to_thread(renderer.render, said, tools=(), generate=True)
        except (RenderError, SchemaError) as error:
            raise ChatError("refused", str(error)) from error
        room = self.context - len(rendered.ids_T)
        if room < 1:
            raise ChatError(
                "refused",
                f"a question of {len(rendered.ids_T)} tokens, context is {self.context}",
                retry=False,
            )
        sampling = Sampling(
            max_tokens=min(self.max_tokens, room),
            seed=seed,
            temperature=self.temperature,
            stop_ids=renderer.stop_ids,
        )
        try:
            out = await engine.generate(rendered.ids_T, sampling, session=f"judge-{next(self._asked)}")
        except EngineError as error:
            raise ChatError("server", f"{type(error).__name__}: {error}") from error
        reply = await asyncio.to_thread(renderer.parse, out.ids_T)
        return ChatReply(reply.text, len(rendered.ids_T), len(out.ids_T))

    async def aclose(self) -> None:
        """Free the model."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            await asyncio.to_thread(opened[0].close)
