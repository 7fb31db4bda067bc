"""Our own renderer for ChatML templates: the tiny model, SmolLM2, Qwen2.5 and their kin.

A conversation is written turn by turn from glue that was read from the official template, and at construction
the ids are compared with the template's on probe conversations. Differences from encoding the template's text
in one piece are deliberate:

* an answer's tokens begin where the generation prompt ends, as they do when the policy writes them (official
  templates merge a leading line break of the answer into the header's);
* contents cannot open or end a turn: `<|im_end|>` inside a message is spelt out as text;
* reasoning, tool calls and tool descriptions that the template would drop are written into the content.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trivet.render.base import Rendered, RenderError, Segment
from trivet.render.glue import Glue, read_glue, system_with_tools
from trivet.render.template import ChatTemplate
from trivet.render.wire import read_answer, tools_text, write_answer
from trivet.types import Message, Origin, canonical_json

Tools = Sequence[Mapping[str, Any]]
_TOOLS_KEPT = 256  # system turns with tools, remembered


class _Writer:
    """Collects ids and the segments that tile them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.segments: list[Segment] = []

    def add(self, ids: Sequence[int], origin: Origin, message: int, trained: bool = False) -> None:
        if len(ids) == 0:
            return
        start = len(self.ids)
        self.ids.extend(ids)
        self.segments.append(Segment(start, len(self.ids), origin, message, trained))

    def done(self) -> Rendered:
        ids_T = np.asarray(self.ids, np.int32)
        ids_T.flags.writeable = False
        return Rendered(ids_T, tuple(self.segments))


class ChatML:
    """Renders `<|im_start|>role ... <|im_end|>` conversations. See `Renderer` for the methods' contracts.

    `system_prompt` is put before conversations that have no system message (None: what the template itself
    injects, if anything). Raises RenderError where the tokenizer or its template does not fit.
    """

    name = "chatml"

    def __init__(
        self,
        tokenizer: Any,
        template_args: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt: str | None = None
        self.template = ChatTemplate(tokenizer, template_args)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RenderError(f"the tokenizer of {self.template.name} has no fast (tokenizers) version")
        self.glue: Glue = read_glue(self.template)
        self._written = copy.deepcopy(backend)  # glue: special tokens are tokens
        self._content = copy.deepcopy(backend)  # contents: special tokens are text
        for encoder in (self._written, self._content):
            encoder.no_truncation()
            encoder.no_padding()
        self._content.encode_special_tokens = True
        self._tools_cache: dict[str, str] = {}
        self._unknown: int | None = None
        self._close = self._special(self.glue.close)
        self._after = self._encode(self.glue.after)
        self._heads = {role: self._split_header(text) for role, text in self.glue.header.items()}
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = (self._close,) if eos in (None, self._close) else (self._close, eos)
        self._verify()
        # From here on: probes hold characters that a small alphabet lacks and are compared all the same.
        self._unknown = tokenizer.unk_token_id
        self.system_prompt = system_prompt

    # -- ids -------------------------------------------------------------------------------------

    def _special(self, token: str) -> int:
        ids = self._encode(token)
        if len(ids) != 1:
            raise RenderError(
                f"{token} is {len(ids)} tokens for the tokenizer of {self.template.name}, not one"
            )
        return ids[0]

    def _encode(self, text: str) -> list[int]:
        return list(self._written.encode(text, add_special_tokens=False).ids) if text else []

    def _encode_content(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            ids = list(self._content.encode(text, add_special_tokens=False).ids)
        except TypeError:
            # Half of a surrogate pair, as JSON escapes can bring in: no text that UTF-8 can hold.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = list(self._content.encode(text, add_special_tokens=False).ids)
        if self._unknown is not None and self._unknown in ids:
            strange = [c for c in dict.fromkeys(text) if self._unknown in self._content.encode(c).ids]
            raise RenderError(
                f"the tokenizer of {self.template.name} does not know {' '.join(map(repr, strange[:10]))} in "
                f"{text[:60]!r}: add the characters to the model's alphabet, or use a model that knows them"
            )
        return ids

    def _split_header(self, header: str) -> tuple[list[int], str]:
        """(ids of the special tokens a header starts with, its remaining text)."""
        encoded = self._written.encode(header, add_special_tokens=False)
        special = set(self.tokenizer.added_tokens_decoder)
        count = next((i for i, t in enumerate(encoded.ids) if t not in special), len(encoded.ids))
        end = encoded.offsets[count - 1][1] if count else 0
        return list(encoded.ids[:count]), header[end:]

    # -- turns -----------------------------------------------------------------------------------

    def _turn(self, out: _Writer, role: str, content: str, message: int, origin: Origin) -> None:
        """A turn that the policy does not write: one segment."""
        head, rest = self._heads[role]
        if self.glue.strip.get(role):
            content = content.strip()
        out.add([*head, *self._encode_content(rest + content), self._close, *self._after], origin, message)

    def _answer_prompt(self, out: _Writer, message: int) -> None:
        head, rest = self._heads["assistant"]
        out.add([*head, *self._encode(rest)], Origin.GENERATION_PROMPT, message)

    def _answer(self, out: _Writer, message: Message, index: int) -> None:
        """Header as the generation prompt, then what is trained: content and the token that ends the turn."""
        for part, support in (("reasoning", self.glue.reasoning), ("tool_calls", self.glue.calls)):
            if support == "no" and getattr(message, part):
                raise RenderError(
                    f"message {index}: the chat template of {self.template.name} writes {part} in a way of "
                    "its own, which the chatml renderer does not know: name the model's family "
                    "(policy: renderer:)"
                )
        content = message.text.strip() if self.glue.strip["assistant"] else message.text
        self._answer_prompt(out, index)
        ids = self._encode_content(write_answer(message, content))
        out.add([*ids, self._close], Origin.MESSAGE, index, trained=True)
        out.add(self._after, Origin.INSERTED, index)

    def _tool_results(self, out: _Writer, messages: Sequence[Message], first: int) -> int:
        """Tool messages from `first` on; the index behind them."""
        if self.glue.grouped_tools is None:
            raise RenderError(
                f"message {first}: the chat template of {self.template.name} does not take tool messages as "
                "ChatML does: name the model's family (policy: renderer:)"
            )
        stop = first
        while stop < len(messages) and messages[stop].role == "tool":
            stop += 1
        if not self.glue.grouped_tools:
            for index in range(first, stop):
                self._turn(out, "tool", messages[index].text, index, Origin.MESSAGE)
            return stop
        head, rest = self._heads["tool"]
        text = "".join(f"\n<tool_response>\n{m.text}\n</tool_response>" for m in messages[first:stop])
        ids = [*head, *self._encode_content(rest + text), self._close, *self._after]
        out.add(ids, Origin.MESSAGE, first)
        return stop

    def _turns(self, out: _Writer, messages: Sequence[Message], first: int) -> None:
        index = first
        while index < len(messages):
            message = messages[index]
            if message.role == "tool":
                index = self._tool_results(out, messages, index)
                continue
            if message.role == "assistant":
                self._answer(out, message, index)
            elif message.role == "system" and not self.glue.late_system:
                raise RenderError(
                    f"message {index}: the chat template of {self.template.name} takes a system message at "
                    "the start only: move its text into a user message"
                )
            else:
                self._turn(out, message.role, message.text, index, Origin.MESSAGE)
            index += 1

    # -- the system turn -------------------------------------------------------------------------

    def _system_text(self, given: str | None, tools: Tools) -> str | None:
        """The content of the system turn; None where there is none."""
        system = given if given is not None else self.system_prompt
        if not tools:
            return system if system is not None else self.glue.default_system
        if self.glue.tools == "no":
            raise RenderError(
                f"the chat template of {self.template.name} offers tools in a way that the chatml renderer "
                "does not know: name the model's family (policy: renderer:)"
            )
        if self.glue.tools == "inline":
            base = system if system is not None else self.glue.default_system
            return f"{base}\n\n{tools_text(tools)}" if base else tools_text(tools)
        key = canonical_json([system, [dict(tool) for tool in tools]])
        text = self._tools_cache.get(key)
        if text is None:
            header = self.glue.header
            glue = (self.glue.start, header["system"], header["user"], self.glue.close + self.glue.after)
            text = system_with_tools(self.template, glue, tools, system)
            if text is None:
                raise RenderError(
                    f"the chat template of {self.template.name} offers these tools in an odd place"
                )
            if len(self._tools_cache) >= _TOOLS_KEPT:  # tasks with tools of their own come by the thousand
                self._tools_cache.clear()
            self._tools_cache[key] = text
        return text

    # -- the protocol ----------------------------------------------------------------------------

    def departs(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """The ids are meant to differ from the template's own: it would drop what is written into the content
        here, or a content spells a special token, which stays text here."""
        inline = {name for name in ("reasoning", "calls", "tools") if getattr(self.glue, name) == "inline"}
        special = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        return ("tools" in inline and bool(tools)) or any(
            ("reasoning" in inline and bool(m.reasoning))
            or ("calls" in inline and bool(m.tool_calls))
            or any(token in m.text for token in special)
            for m in messages
        )

    def render(self, messages: Sequence[Message], *, tools: Tools = (), generate: bool = False) -> Rendered:
        if not messages:
            raise RenderError("a conversation without messages cannot be rendered")
        out = _Writer()
        out.add(self._encode(self.glue.start), Origin.INSERTED, -1)
        given = messages[0].text if messages[0].role == "system" else None
        system = self._system_text(given, tools)
        if system is not None:
            origin, index = (Origin.INSERTED, -1) if given is None else (Origin.MESSAGE, 0)
            self._turn(out, "system", system, index, origin)
        self._turns(out, messages, 0 if given is None else 1)
        if generate:
            self._answer_prompt(out, len(messages))
        return out.done()

    def extend(
        self,
        messages: Sequence[Message],
        answer: int,
        answer_ids: np.ndarray,
        *,
        tools: Tools = (),
        generate: bool = True,
    ) -> Rendered:
        """`tools` were offered at the start of the conversation; they change nothing here."""
        if not 0 <= answer < len(messages) or messages[answer].role != "assistant":
            raise RenderError(f"message {answer} of {len(messages)} is not an answer: nothing can follow it")
        out = _Writer()
        ended = len(answer_ids) > 0 and int(answer_ids[-1]) == self._close
        glue = self._after if ended else [self._close, *self._after]  # a cut answer's turn is closed here
        out.add(glue, Origin.INSERTED, answer)
        self._turns(out, messages, answer + 1)
        if generate:
            self._answer_prompt(out, len(messages))
        return out.done()

    def parse(self, ids: np.ndarray) -> Message:
        ids = np.asarray(ids)
        if len(ids) and int(ids[-1]) in self.stop_ids:
            ids = ids[:-1]
        return read_answer(self.decode(ids))

    def decode(self, ids: np.ndarray) -> str:
        return self._written.decode([int(i) for i in ids], skip_special_tokens=False)

    # -- the check -------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Compare with the official ids on probe conversations. Raises RenderError where they differ."""
        system = Message("system", "Be brief.\n\nAnswer in French.")
        user, again = Message("user", "What is 12 + 7?\n  a) 19\tb) 91"), Message("user", " Größe? 東京 ")
        answer, last = Message("assistant", "It is 19."), Message("assistant", "Yes.\n\nIt is.\n")
        chats = [[user], [system, user], [user, answer], [system, user, answer, again, last]]
        chats += [[user, answer, again], [system, user, answer, again, last, user, answer]]
        for chat in chats:
            for generate in (False, True):
                ours = self.render(chat, generate=generate).ids_T.tolist()
                self._compare(ours, self.template.ids(chat, generate=generate))

    def _compare(self, ours: list[int], official: list[int]) -> None:
        if ours == official:
            return
        pairs = enumerate(zip(ours, official, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(official)))
        near = slice(max(0, at - 4), at + 6)
        raise RenderError(
            f"the chat template of {self.template.name} differs from ChatML as trivet renders it, first at "
            f"token {at}: the template has {self.decode(np.asarray(official[near]))!r} {official[near]}, "
            f"trivet {self.decode(np.asarray(ours[near]))!r} {ours[near]}. Name the model's family "
            "(policy: renderer:)"
        )
