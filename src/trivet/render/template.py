"""The official chat template of a tokenizer: the measure that every renderer is compared with."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trivet.render.base import RenderError
from trivet.types import Message


def to_chat(message: Message) -> dict[str, Any]:
    """A message in the form chat templates read (OpenAI's, reasoning as `reasoning_content`)."""
    out: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            out[key] = getattr(message, key)
    return out


def _arguments_as_text(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = copy.deepcopy(chat)
    for message in out:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return out


def _on(day: str, source: str) -> str:
    """The template on a day that stands still."""
    source = re.sub(r"\bstrftime_now\b", "fixed_day", source)
    return f"{{%- macro fixed_day(format) -%}}{{{{- {json.dumps(day)} -}}}}{{%- endmacro -%}}{source}"


class ChatTemplate:
    """`tokenizer.apply_chat_template` with fixed arguments and errors for people.

    Raises RenderError for a tokenizer without a template, for arguments the template never reads, and for a
    template that writes today's date (the same conversation would have other ids tomorrow).
    """

    def __init__(self, tokenizer: Any, args: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.args = dict(args or {})
        day = self.args.pop("strftime_now", None)  # what templates call for today's date
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            raise RenderError(
                f"the tokenizer of {self.name} has no chat template: use an instruction-tuned model, or set "
                "tokenizer.chat_template (a ChatML template suits most base models) and save the tokenizer"
            )
        self.source: str = source if isinstance(source, str) else str(source.get("default", ""))
        self._arguments_as_text = False  # some templates (DeepSeek's) take a call's arguments as JSON text
        self._fixed = None if day is None else _on(str(day), self.source)
        self._check_args()
        self._check_date()

    def _check_args(self) -> None:
        words = set(re.findall(r"\w+", self.source))
        for key in self.args:
            if key not in words:
                near = difflib.get_close_matches(key, words, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise RenderError(
                    f"template_args: {key!r} is read nowhere in the chat template of {self.name}{hint}"
                )

    def _check_date(self) -> None:
        if "strftime_now" not in self.source or self._fixed is not None:
            return
        days = [
            self.text(
                [Message("user", "a")],
                chat_template=_on(day, self.source),
            )
            for day in ("one day", "another day")
        ]
        if days[0] != days[1]:
            raise RenderError(
                f"the chat template of {self.name} writes today's date, so the same conversation has other "
                "ids tomorrow: pin it, e.g. template_args: {date_string: 26 Jul 2024} where the template "
                "has such an argument, else {strftime_now: 26 Jul 2024}"
            )

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        generate: bool = False,
        **more: Any,
    ) -> str:
        """The conversation as text. Raises RenderError with the template's own complaint."""
        chat = [to_chat(m) for m in messages]
        fixed = {} if self._fixed is None else {"chat_template": self._fixed}
        calls = any(m.tool_calls for m in messages)
        failure: Exception | None = None
        for as_text in [self._arguments_as_text] if not calls or self._arguments_as_text else [False, True]:
            try:
                out = self.tokenizer.apply_chat_template(
                    _arguments_as_text(chat) if as_text else chat,
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **{**self.args, **fixed, **more},
                )
            except Exception as error:  # templates raise whatever their authors chose
                failure = failure or error
                continue
            self._arguments_as_text = as_text
            return str(out)
        raise RenderError(
            f"the chat template of {self.name} refuses this conversation: {failure}"
        ) from failure

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        generate: bool = False,
    ) -> list[int]:
        """The conversation's official ids."""
        text = self.text(messages, tools, generate)
        # As apply_chat_template(tokenize=True) does: the template has written all special tokens itself.
        # Not verbose: a probe longer than the model's context is never run through the model.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
