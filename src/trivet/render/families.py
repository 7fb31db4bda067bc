"""Model families whose templates do more than ChatML: the `renderers` library behind our protocol.

The one module that imports it (lazily: it pulls in HTTP clients). Its renders are compared with the
tokenizer's own template at construction, and everything it puts in front of an answer, such as an empty
thinking block, is kept out of the loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trivet.render.base import Rendered, RenderError, Segment
from trivet.render.template import ChatTemplate, to_chat
from trivet.render.wire import INVALID_CALL
from trivet.types import Message, Origin, ToolCall

Tools = Sequence[Mapping[str, Any]]
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
_PROBE = Message("user", "Hello")


def _library() -> Any:
    try:
        import renderers.base
        import renderers.configs
    except ImportError as error:
        raise RenderError(
            f"this model's family needs the package renderers, which cannot be imported ({error}): "
            "pip install renderers"
        ) from error
    return renderers


def known() -> list[str]:
    """Names of the families."""
    base = _library().base
    base._populate_registry()
    return sorted(set(base.RENDERER_REGISTRY) - {"default"})


def family_of(tokenizer: Any) -> str | None:
    """The family that the tokenizer's name belongs to, None where the library does not list it."""
    return _library().base.MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))


def _to_chat(message: Message) -> dict[str, Any]:
    out = to_chat(message)
    for call in out.get("tool_calls", ()):
        if call["function"]["name"] == INVALID_CALL:
            raise RenderError(
                "a tool call that could not be read has no place in this family's format: keep the policy's "
                "own tokens (extend) instead of rendering the message again"
            )
    return out


class Family:
    """A renderer of the library. See `Renderer` for the methods' contracts."""

    def __init__(
        self,
        tokenizer: Any,
        kind: str,
        template_args: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        library = _library()
        if kind not in known():
            raise RenderError(
                f"renderer {kind!r} is not known: use auto, chatml, or one of {', '.join(known())}"
            )
        self.name = kind
        self.tokenizer = tokenizer
        self.system_prompt: str | None = None
        try:
            # `all`: what the policy wrote stays in its history, as the trace has it; full renders do not
            # change.
            config = library.configs._config_class_for(kind)(thinking_retention="all")
            config = library.base.merge_chat_template_kwargs(config, template_args)
            self._inner = library.base.create_renderer(tokenizer, config)
        except (
            ValueError,
            AssertionError,
            NotImplementedError,
            TypeError,
        ) as error:  # the library's refusals
            raise RenderError(
                f"renderer {kind} does not fit this tokenizer or its arguments: {error}"
            ) from error
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(self._inner.get_stop_token_ids()))
        self._probe_ids = self._ids([_PROBE], True)
        self._prompt = self._probe_ids[len(self._ids([_PROBE], False)) :]
        if getattr(tokenizer, "chat_template", None):
            self._verify(ChatTemplate(tokenizer, template_args))
        self.system_prompt = system_prompt

    def _ids(self, messages: Sequence[Message], generate: bool) -> list[int]:
        return list(self._inner.render_ids([_to_chat(m) for m in messages], add_generation_prompt=generate))

    # -- segments --------------------------------------------------------------------------------

    def _given(self, ids: Sequence[int], message: Message) -> int:
        """How many of an answer's first tokens the policy does not write: what the generation prompt
        supplies, and the whole of an empty thinking block that the template put before an answer without
        reasoning."""
        prompt = self._prompt
        header = self.decode(np.asarray(prompt)).partition("<think>")[0]
        if list(ids[: len(prompt)]) == prompt:
            count = len(prompt)
        else:  # the header alone, never half a thinking block
            fits = (
                n for n in range(len(prompt), 0, -1) if header.startswith(self.decode(np.asarray(prompt[:n])))
            )
            count = next((n for n in fits if list(ids[:n]) == prompt[:n]), 0)
        if message.reasoning is None:
            for stop in range(min(len(ids), len(prompt) + 8), count, -1):
                text = self.decode(np.asarray(ids[:stop]))
                if text.startswith(header) and _EMPTY_THOUGHT.fullmatch(text[len(header) :]):
                    return stop
        return count

    def _render(self, messages: Sequence[Message], tools: Tools, generate: bool) -> Any:
        try:
            return self._inner.render(
                [_to_chat(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                add_generation_prompt=generate,
            )
        except (ValueError, TypeError, KeyError) as error:
            raise RenderError(f"renderer {self.name} refuses this conversation: {error}") from error

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if not messages:
            raise RenderError("a conversation without messages cannot be rendered")
        if self.system_prompt is None or messages[0].role == "system":
            return list(messages)
        return [Message("system", self.system_prompt), *messages]

    def render(self, messages: Sequence[Message], *, tools: Tools = (), generate: bool = False) -> Rendered:
        chat = self._with_system(messages)
        out = self._render(chat, tools, generate)
        if not out.sampled_mask:
            raise RenderError(f"renderer {self.name} cannot tell which tokens the policy writes: use another")
        ids, owner = list(out.token_ids), [int(i) for i in out.message_indices]
        shift = len(chat) - len(messages)
        labels: list[_Label] = []
        for index, sampled in zip(owner, out.sampled_mask, strict=True):
            trained = bool(sampled) and index >= 0 and chat[index].role == "assistant"
            inserted = index < shift or (chat[index].role == "assistant" and not trained)
            origin = Origin.INSERTED if inserted else Origin.MESSAGE
            labels.append((origin, index - shift if index >= shift else -1, trained))
        for index, message in enumerate(chat):
            if message.role == "assistant" and index in owner:
                first = owner.index(index)
                for i in range(first, first + self._given(ids[first:], message)):
                    labels[i] = (Origin.GENERATION_PROMPT, index - shift, False)
        if generate:
            _label_prompt(labels, owner, len(messages))
        return _rendered(ids, labels)

    def extend(
        self,
        messages: Sequence[Message],
        answer: int,
        answer_ids: np.ndarray,
        *,
        tools: Tools = (),
        generate: bool = True,
    ) -> Rendered:
        if not 0 <= answer < len(messages) - 1 or messages[answer].role != "assistant":
            raise RenderError(f"message {answer} of {len(messages)} is not an answer that something follows")
        new = messages[answer + 1 :]
        before = self._render(self._with_system(messages[:answer]), tools, True).token_ids
        seen = [*before, *(int(i) for i in answer_ids)]
        out = self._inner.bridge_to_next_turn(
            list(before),
            seen[len(before) :],
            [_to_chat(m) for m in new],
            tools=[dict(t) for t in tools] or None,
        )
        if out is None or list(out.token_ids[: len(seen)]) != seen:
            raise RenderError(
                f"renderer {self.name} cannot continue this conversation after message {answer} without "
                f"tokenising it again (roles that follow: {[m.role for m in new]}; answers among them, or an "
                "answer cut inside its reasoning, start a new branch)"
            )
        ids, owner = list(out.token_ids[len(seen) :]), [int(i) for i in out.message_indices[len(seen) :]]
        labels: list[_Label] = []
        for index in owner:
            glue = index < 0
            labels.append(
                (Origin.INSERTED, answer, False) if glue else (Origin.MESSAGE, answer + 1 + index, False)
            )
        _label_prompt(labels, owner, len(messages))
        if not generate:
            kept = sum(label[0] is not Origin.GENERATION_PROMPT for label in labels)
            ids, labels = ids[:kept], labels[:kept]
        return _rendered(ids, labels)

    # -- back to messages ------------------------------------------------------------------------

    def parse(self, ids: np.ndarray) -> Message:
        out = self._inner.parse_response([int(i) for i in ids], prompt_ids=self._probe_ids)
        calls = tuple(_read_call(call, number) for number, call in enumerate(out.tool_calls, 1))
        return Message("assistant", out.content or "", reasoning=out.reasoning_content, tool_calls=calls)

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def _verify(self, template: ChatTemplate) -> None:
        """Compare with the tokenizer's own template. Raises RenderError."""
        system, answer = Message("system", "Be brief."), Message("assistant", "Yes.")
        for chat, generate in (([_PROBE], True), ([system, _PROBE], True), ([_PROBE, answer], False)):
            ours, official = self._ids(chat, generate), template.ids(chat, generate=generate)
            if ours != official:
                raise RenderError(
                    f"renderer {self.name} does not fit the chat template of {template.name}: it renders "
                    f"{self.decode(np.asarray(ours))!r}, the template {self.decode(np.asarray(official))!r}"
                )


_Label = tuple[Origin, int, bool]
"""Of one token: origin, message, trained."""


def _label_prompt(labels: list[_Label], owner: Sequence[int], message: int) -> None:
    """The tokens behind the last message's are the generation prompt."""
    for i in range(len(labels) - 1, -1, -1):
        if owner[i] >= 0:
            break
        labels[i] = (Origin.GENERATION_PROMPT, message, False)


def _rendered(ids: Sequence[int], labels: Sequence[_Label]) -> Rendered:
    """Runs of equal labels as segments."""
    cuts = [i for i in range(1, len(ids)) if labels[i] != labels[i - 1]]
    bounds = [0, *cuts, len(ids)]
    segments = [Segment(a, b, *labels[a]) for a, b in pairwise(bounds) if a < b]
    ids_T = np.asarray(ids, np.int32)
    ids_T.flags.writeable = False
    return Rendered(ids_T, tuple(segments))


def _read_call(call: Any, number: int) -> ToolCall:
    arguments, error = call.arguments, str(call.status)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as failed:
            error = f"arguments are not valid JSON: {failed}"
    if str(call.status) == "ok" and call.name and isinstance(arguments, dict):
        return ToolCall(call.name, arguments, call.id or "")
    return ToolCall(INVALID_CALL, {"error": f"tool call {number}: {error}", "text": call.raw})
