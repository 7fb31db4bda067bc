"""Any chat template as a renderer of examples: spans of the assistant are found by rendering prefixes.

The ids are the official template's own, always. What belongs to an answer is told from what stands around it
by two more renders: the conversation before it with the generation prompt, and the conversation that ends
with it. It renders whole conversations only: sampling needs a renderer that knows how a turn goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trivet.render.base import Rendered, RenderError, Segment
from trivet.render.template import ChatTemplate
from trivet.types import Message, Origin

Tools = Sequence[Mapping[str, Any]]
_OPEN_THOUGHT = re.compile(r"<think>\s*$")
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
_ENDS = (
    *("im_end", "eot", "eom", "end", "return", "call", "endoftext", "end_of_text", "end_of_turn"),
    *("end_of_turn_token", "observation", "user"),
)
"""What families call the token that ends a turn; some have none, and the next turn's mark ends it."""


class TemplateSpans:
    """Renders through the tokenizer's chat template alone. Raises RenderError where an answer cannot be told
    from its surroundings (templates that write earlier turns differently once a later one follows)."""

    name = "template"

    def __init__(
        self,
        tokenizer: Any,
        template_args: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.template = ChatTemplate(tokenizer, template_args)
        self.stop_ids = tuple(self._stops())

    def _stops(self) -> list[int]:
        """Special tokens that end a turn, by what they are called, and the tokenizer's own end."""
        out = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        for token, id_ in self.tokenizer.get_added_vocab().items():
            if token.startswith("<") and token.strip("<>|｜").split("_id")[0].lower() in _ENDS:
                out.append(id_)
        return list(dict.fromkeys(out))

    def _all(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        if self.system_prompt is None or messages[0].role == "system":
            return list(messages), 0
        return [Message("system", self.system_prompt), *messages], 1

    def render(self, messages: Sequence[Message], *, tools: Tools = (), generate: bool = False) -> Rendered:
        chat, shift = self._all(messages)
        text = self.template.text(chat, tools, generate)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids_T, start_T = np.asarray(encoded["input_ids"], np.int32), [a for a, _ in encoded["offset_mapping"]]
        owner_T, trained_T = np.zeros(len(ids_T), np.int64), np.zeros(len(ids_T), bool)
        for index, message in enumerate(chat):
            begin, last = 0, 0
            if message.role == "assistant" and message.train != 0:
                begin, end, own = self._span(text, chat, index, tools)
                first, last, own = np.searchsorted(start_T, [begin, end, own]).tolist()
                last = self._with_end(ids_T, own, last)
                owner_T[first:], trained_T[first:last] = index, True
                owner_T[last:] = min(index + 1, len(chat) - 1)
        ids_T.flags.writeable = False
        return Rendered(ids_T, tuple(_segments(owner_T - shift, trained_T, len(messages))))

    def _span(self, text: str, chat: Sequence[Message], index: int, tools: Tools) -> tuple[int, int, int]:
        """Characters of `text` that the message at `index` wrote, the mark of its end perhaps among them, and
        where its last own word ends."""
        before = self.template.text(chat[:index], tools, True) if index else ""
        if not text.startswith(before):  # the generation prompt opens a thought that this turn has not
            before = _OPEN_THOUGHT.sub("", before)
        begin, end = len(before), _common(self.template.text(chat[: index + 1], tools), text)
        if text.startswith(before):
            # A block of thought that the template opens, and closes again empty, is nobody's.
            opened = text.rfind("<think>", 0, begin)
            at = opened if opened >= 0 and not text[opened + len("<think>") : begin].strip() else begin
            if empty := _EMPTY_THOUGHT.match(text, at):
                begin = empty.end()
            own = [chat[index].text.strip(), *(call.name for call in chat[index].tool_calls)]
            places = [(text.rfind(part, begin, end), len(part)) for part in own if part]
            if all(place >= 0 for place, _ in places):
                return begin, end, max((place + size for place, size in places), default=begin)
        raise RenderError(
            f"message {index}: its place in the chat template of {self.template.name} cannot be told: the "
            "template writes this turn in another way when it is the last one. Name the model's family "
            "(policy: renderer:)"
        )

    def _with_end(self, ids_T: np.ndarray, own: int, last: int) -> int:
        """Where training ends: behind the first mark of an end after the message's own words."""
        inside = np.flatnonzero(np.isin(ids_T[own:last], self.stop_ids))
        if len(inside):
            return own + int(inside[0]) + 1
        return last + 1 if last < len(ids_T) and ids_T[last] in self.stop_ids else last

    def extend(self, *_: Any, **__: Any) -> Rendered:
        raise RenderError("the renderer `template` writes examples; sampling needs chatml or a family")

    def parse(self, ids: np.ndarray) -> Message:
        raise RenderError("the renderer `template` writes examples; sampling needs chatml or a family")

    def decode(self, ids: np.ndarray) -> str:
        """Ids as text, special tokens shown."""
        return self.tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def _segments(owner_T: np.ndarray, trained_T: np.ndarray, messages: int) -> list[Segment]:
    """Runs of one message and one mask."""
    owner_T = np.clip(owner_T, 0, messages - 1)
    cuts = np.flatnonzero((np.diff(owner_T) != 0) | (np.diff(trained_T.astype(np.int8)) != 0)) + 1
    out = []
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(owner_T)], strict=True):
        out.append(Segment(start, stop, Origin.MESSAGE, int(owner_T[start]), bool(trained_T[start])))
    return out
