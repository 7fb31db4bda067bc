"""The forms chats come in, and which of them a row has.

A format is a name, a test on a row and a reader. Text that stands for calls and thoughts inside the messages
(Hermes, Qwen, GLM, DeepSeek) is read in every format; those names say what a file's messages hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trivet.data.formats import (
    adp,
    alpaca,
    anthropic,
    llamafactory,
    openai,
    pairs,
    preference,
    sharegpt,
    sweagent,
)
from trivet.data.formats.chat import Chat
from trivet.data.record import RecordDropped

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Format:
    """`matches(row)` is cheap and never raises; `read(row, text_only)` raises RecordDropped."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], bool], Chat]


def _in_text(mark: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: openai.is_openai(row) and any(mark in text for text in _texts(row))


def _texts(row: Mapping[str, Any]) -> Iterable[str]:
    key = openai.column_of(row)
    messages = row.get(key) if key else None
    for message in messages if isinstance(messages, list) else ():
        for field in ("content", "value"):
            text = message.get(field) if isinstance(message, dict) else None
            if isinstance(text, str):
                yield text


# In the order of the tests: the first that fits a row is its format.
SHAPES: tuple[Format, ...] = (
    Format("agent_data_protocol", adp.is_adp, adp.read_adp),
    Format("swe_agent", sweagent.is_sweagent, sweagent.read_sweagent),
    Format("preference", preference.is_preference, preference.read_preference),
    Format("sharegpt", sharegpt.is_sharegpt, sharegpt.read_chat),
    Format("anthropic", anthropic.is_anthropic, anthropic.read_chat),
    Format("llamafactory", llamafactory.is_llamafactory, llamafactory.read_chat),
    Format("openai", openai.is_openai, openai.read_chat),
    Format("alpaca", alpaca.is_alpaca, alpaca.read_alpaca),
    Format("prompt_response", pairs.is_pair, pairs.read_pair),
)
# Named for what the text of messages holds, in the order of the tests.
STYLES: tuple[Format, ...] = (
    Format("glm", _in_text("<arg_key>"), openai.read_chat),
    Format("qwen", _in_text("<tool_call>\n<function="), openai.read_chat),
    Format("hermes", _in_text("<tool_call>"), openai.read_chat),
    Format("deepseek", _in_text("</think>"), openai.read_chat),
)
FORMATS: dict[str, Format] = {form.name: form for form in (*SHAPES, *STYLES)}


def detect_row(row: Any) -> str:
    """The name of the row's form. Raises RecordDropped (not_an_object, unknown_format)."""
    return shape_of(row).name


def shape_of(row: Any) -> Format:
    if not isinstance(row, dict):
        raise RecordDropped("not_an_object", f"the row is a {type(row).__name__}, not an object")
    for form in SHAPES:
        if form.matches(row):
            return form
    keys = ", ".join(sorted(map(str, row))[:30])
    prompt = next((key for key in pairs.PROMPTS if isinstance(row.get(key), str | list)), None)
    if prompt is not None:
        raise RecordDropped(
            "no_answer",
            f"column {prompt!r} is a prompt, but none is its answer (columns: {keys}); name it with "
            "`mapping: {prompt: COLUMN, response: COLUMN}`",
        )
    raise RecordDropped(
        "unknown_format",
        f"no format fits a row with the columns {keys or '(none)'}; name them with `mapping:` "
        "(messages, or prompt and response)",
    )


def detect(rows: Iterable[Any], at_most: int = 32) -> str:
    """The format of a file by its first rows: the form most of them have, or what their text holds; "unknown"
    when no row fits any. It is what to say of the file: rows of another form are still read as what they are.
    """
    seen: Counter[str] = Counter()
    styles: Counter[str] = Counter()
    for row in islice(rows, at_most):
        try:
            form = shape_of(row)
        except RecordDropped:
            continue
        seen[form.name] += 1
        if form.name in ("openai", "sharegpt"):
            style = next((style.name for style in STYLES if style.matches(row)), None)
            styles[style or ""] += 1
    if not seen:
        return UNKNOWN
    name = seen.most_common(1)[0][0]
    said = [style.name for style in STYLES if styles[style.name]]
    return said[0] if said and name in ("openai", "sharegpt") else name


def read_row(row: Any, format: str | None, text_only: bool) -> Chat:
    """The row as a conversation; a row that is not of the named format is read as what it is.

    Raises RecordDropped; KeyError for a name that is no format.
    """
    if format is not None and format != UNKNOWN and isinstance(row, dict):
        form = FORMATS[format]
        test = openai.is_openai if form in STYLES else form.matches
        if test(row):
            return form.read(row, text_only)
    return shape_of(row).read(row, text_only)
