"""A conversation as a supervised example: which tokens are trained, and with what weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trivet.render.base import Rendered, Renderer, RenderError
from trivet.types import Message, ToolCall, Trace, TraceError


def _weight(message: Message, weight: float) -> float:
    return weight if message.train is None else weight * message.train


def _check_kept(renderer: Renderer, rendered: Rendered, messages: Sequence[Message]) -> None:
    """Everything that shall be trained must be among the trained tokens of its message."""
    for index, message in enumerate(messages):
        if message.role != "assistant" or message.train == 0:
            continue
        spans = [s for s in rendered.segments if s.message == index and s.trained]
        text = "".join(renderer.decode(rendered.ids_T[s.start : s.stop]) for s in spans)
        parts = [("content", message.text), ("reasoning", message.reasoning or "")]
        parts += [("tool call", call.name) for call in message.tool_calls]
        for what, part in parts:
            if part.strip() and part.strip() not in text:
                raise RenderError(
                    f"message {index}: its {what} ({part.strip()[:60]!r}) is not among the trained tokens: "
                    "the chat template drops or rewrites it (many drop the reasoning of earlier turns). "
                    "Train one example per turn, set train=0 on this message, or use a template that keeps it"
                )


def _ending(renderer: Renderer, last: Message) -> int | None:
    """The mark of the next turn, where that is what ends one (GLM's <|user|>, <|observation|>)."""
    call = (ToolCall("add", {}, "call_0"),) if last.tool_calls else ()
    follows = Message("tool", "3", tool_call_id="call_0") if call else Message("user", "Three.")
    probe = [Message("user", "One."), Message("assistant", "Two.", tool_calls=call), follows]
    ids_T = renderer.render(probe, tools=(), generate=False).ids_T
    return next((i for i in reversed(ids_T.tolist()) if i in renderer.stop_ids), None)


def _closed(renderer: Renderer, rendered: Rendered, messages: Sequence[Message]) -> Rendered:
    """With the token that ends the last answer, where the template leaves it to the next turn: an answer that
    never ends would teach the policy to go on for ever."""
    last, ends = messages[-1], rendered.segments[-1]
    if last.role != "assistant" or last.train == 0 or not ends.trained:
        return rendered
    if int(rendered.ids_T[-1]) in renderer.stop_ids:
        return rendered
    end = _ending(renderer, last)
    if end is None:
        return rendered
    ids_T = np.append(rendered.ids_T, np.int32(end))
    size = len(ids_T)
    return Rendered(ids_T, (*rendered.segments, replace(ends, start=size - 1, stop=size)))


def _nothing_trained(messages: Sequence[Message], weight: float) -> RenderError:
    roles = [m.role for m in messages]
    return RenderError(
        f"nothing in this conversation would be trained (roles {roles}, weight {weight}): it needs an "
        "assistant message whose train is not 0"
    )


def supervised_tokens(
    renderer: Renderer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    weight: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 (_T,), train float32 (_T,)): what `supervised_trace` holds, without a trace around it.

    Raises RenderError.
    """
    rendered = _closed(renderer, renderer.render(messages, tools=tools, generate=False), messages)
    train_T = np.zeros(len(rendered.ids_T), np.float32)
    for segment in rendered.segments:
        if segment.trained:
            train_T[segment.start : segment.stop] = _weight(messages[segment.message], weight)
    if not train_T.any():
        raise _nothing_trained(messages, weight)
    _check_kept(renderer, rendered, messages)
    return rendered.ids_T, train_T


def supervised_trace(
    renderer: Renderer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    weight: float = 1.0,
) -> Trace:
    """A trace of one row, a node per segment, with train = renderer's mask * message's flag * weight.

    Assistant messages are trained unless their `train` says otherwise: their own tokens and the token that
    ends the turn, never what the template puts around them. Raises RenderError where nothing would be trained
    and where something that should be trained does not appear in the rendered conversation.
    """
    rendered = _closed(renderer, renderer.render(messages, tools=tools, generate=False), messages)
    trace, node = Trace(), -1
    for segment in rendered.segments:
        train = _weight(messages[segment.message], weight) if segment.trained else 0.0
        ids = rendered.ids_T[segment.start : segment.stop]
        try:
            node = trace.add(node, ids, segment.origin, message=segment.message, train=train)
        except TraceError as error:
            raise RenderError(f"message {segment.message}: weight {train}: {error}") from error
    if not trace.column("train").any():
        raise _nothing_trained(messages, weight)
    _check_kept(renderer, rendered, messages)
    return trace
