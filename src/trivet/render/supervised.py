"""A conversation as a supervised example: which tokens are trained, and with what weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trivet.render.base import Rendered, Renderer, RenderError
from trivet.types import Message, Trace, TraceError


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
    rendered = renderer.render(messages, tools=tools, generate=False)
    trace, node = Trace(), -1
    for segment in rendered.segments:
        train = _weight(messages[segment.message], weight) if segment.trained else 0.0
        ids = rendered.ids_T[segment.start : segment.stop]
        try:
            node = trace.add(node, ids, segment.origin, message=segment.message, train=train)
        except TraceError as error:
            raise RenderError(f"message {segment.message}: weight {train}: {error}") from error
    if not trace.column("train").any():
        roles = [m.role for m in messages]
        raise RenderError(
            f"nothing in this conversation would be trained (roles {roles}, weight {weight}): it needs an "
            "assistant message whose train is not 0"
        )
    _check_kept(renderer, rendered, messages)
    return trace
