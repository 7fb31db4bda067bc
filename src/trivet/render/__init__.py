"""Messages to token ids and back."""

from trivet.render.base import Rendered, Renderer, RenderError, Segment
from trivet.render.select import get_renderer, load_tokenizer
from trivet.render.supervised import supervised_tokens, supervised_trace
from trivet.render.wire import INVALID_CALL, call_error

__all__ = [
    "INVALID_CALL",
    "RenderError",
    "Rendered",
    "Renderer",
    "Segment",
    "call_error",
    "get_renderer",
    "load_tokenizer",
    "supervised_tokens",
    "supervised_trace",
]
