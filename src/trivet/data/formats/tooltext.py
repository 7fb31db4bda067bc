"""Tools, calls and results that stand in the text of messages: Hermes, Qwen, GLM and Kimi.

system     <tools> JSON definitions </tools>, with or without the explanation the template puts around it
assistant  <tool_call> {"name": ..., "arguments": {...}} </tool_call>                    (Hermes, Qwen 2.5, 3)
           <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>  (Qwen 3.5)
           <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> </tool_call>         (GLM 4.5)
tool, user <tool_response> RESULT </tool_response>, one or several
"""

from __future__ import annotations

import json
import re
from typing import Any

from trivet.data.formats.chat import Call, Chat, Draft
from trivet.data.formats.literal import NotReadable, read_json, read_value
from trivet.data.formats.openai import one_call
from trivet.data.formats.tools import one_tool, parameter_types
from trivet.data.record import RecordDropped

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ANSWER, _ANSWERED = "<tool_response>", "</tool_response>"
LITERAL = "tool_call_literal_repaired"

_BLOCK = "<tools>", "</tools>"
_KIMI = "<|im_system|>tool_declare<|im_middle|>", "<|im_end|>"
_LONGEST_PROMPT = 200_000  # characters; in a longer one the explanation around the tools is left
# What the templates of Qwen and GLM, and the Hermes prompt, say around the definitions; Qwen's newer ones put
# it before the source's own prompt, which must stay. The template the
# conversation is rendered with says it again in its own words.
_AROUND = (
    re.compile(
        r"# Tools\s+You (?:may call one or more functions|have access to the following).*\Z",
        re.S,
    ),
    re.compile(r"You are provided with function signatures within\s+<tools>\s*</tools>\s*XML tags[.:]?\s*"),
    re.compile(
        r"You may call one or more functions to assist with the user query\.\s*"
        r"(?:Don't make assumptions about what values to plug into functions\.\s*)?"
    ),
    re.compile(r"Here are the available tools:\s*"),
    re.compile(
        r"Use the following pydantic model json schema for each tool call you will make:[^\n]*?\}\s*(?=For)"
    ),
    re.compile(
        r"For each function call,? return a json object with function name and arguments within\s+"
        r"<tool_call>\s*</tool_call>.*?</tool_call>",
        re.DOTALL,
    ),
    re.compile(
        r"For each function call, output the function name and arguments within.*?</tool_call>", re.DOTALL
    ),
    re.compile(
        r"If you choose to call a function ONLY reply in the following format.*?</IMPORTANT>", re.DOTALL
    ),
)


def tools_from_system(chat: Chat) -> None:
    """Takes the definitions out of system prompts (`tools_from_system`); what the row itself declares counts
    before them."""
    for draft in chat.drafts:
        text = draft.content
        if draft.role == "system" and isinstance(text, str) and ("<tools>" in text or "tool_declare" in text):
            _tools_from_system(draft, text, chat)


def tool_text(chat: Chat, literals: bool = True) -> None:
    """Turns tool text into calls and tool messages. Raises RecordDropped (bad_tool_call)."""
    split = False
    for draft in chat.drafts:
        text = draft.content
        if draft.call_text:
            _take_calls(draft, draft.call_text, chat, literals)
            draft.call_text = None
        if not isinstance(text, str) or "<" not in text:
            continue
        if draft.role == "assistant":
            if OPEN in text and not draft.calls and not draft.cut:
                _calls_from_text(draft, text, chat, literals)
        elif text.lstrip().startswith(_ANSWER):
            split = True
    if split:
        chat.drafts = [piece for draft in chat.drafts for piece in _results(draft)]


# -- system --------------------------------------------------------------------------------------


def _tools_from_system(draft: Draft, text: str, chat: Chat) -> None:
    found: list[dict[str, Any]] = []
    left = text
    for marks in (_BLOCK, _KIMI):
        head, tail, tools = _definition_blocks(left, marks)
        if not tools:
            continue
        found += tools
        if len(head) + len(tail) < _LONGEST_PROMPT:
            for around in _AROUND:  # the explanation ahead of the block ends at the block
                head, tail = around.sub("", head), around.sub("", tail)
        left = f"{head.rstrip()}\n{tail.lstrip()}"
    if not found:
        return
    draft.content = left.strip()
    chat.tools = chat.tools or found
    chat.mark("tools_from_system")


def _definition_blocks(text: str, marks: tuple[str, str]) -> tuple[str, str, list[dict[str, Any]]]:
    """(the text before the last block that holds definitions, the text behind it, what the blocks define).

    Blocks without definitions stay: explanations name the tags, too.
    """
    kept: list[str] = []
    tools: list[dict[str, Any]] = []
    head = ""
    at = 0
    while (start := text.find(marks[0], at)) >= 0:
        inside = start + len(marks[0])
        end = text.find(marks[1], inside)
        if end < 0:
            break
        found = _definitions(text[inside:end])
        kept.append(text[at : start if found else end + len(marks[1])])
        at = end + len(marks[1])
        if found:
            tools += found
            head = head + "".join(kept)
            kept = []
    return head, "".join(kept) + text[at:], tools


def _definitions(text: str) -> list[dict[str, Any]] | None:
    """A list of definitions, or definitions one after another; None when it is something else."""
    try:
        values = _json_run(text)
    except NotReadable:
        try:
            values = [read_value(text)[0]]
        except NotReadable:
            return None
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    try:
        return [one_tool(value) for value in values] or None
    except RecordDropped:
        return None


def _json_run(text: str) -> list[Any]:
    """JSON values one after another, with blanks or commas between. Raises NotReadable."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at == len(text):
            return values
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise NotReadable(str(error)[:80]) from None
        values.append(value)


# -- assistant -----------------------------------------------------------------------------------


def _calls_from_text(draft: Draft, text: str, chat: Chat, literals: bool) -> None:
    said: list[str] = []
    blocks: list[str] = []
    closed = True
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        said.append(text[at:start])
        end = text.find(CLOSE, start)
        closed = end >= 0
        blocks.append(text[start + len(OPEN) : end if closed else len(text)])
        at = end + len(CLOSE) if closed else len(text)
    said.append(text[at:])
    try:
        _take_calls(draft, blocks, chat, literals)
    except RecordDropped:
        draft.calls = None
        if not closed:
            draft.cut = blocks[-1].lstrip()[:1] in ("{", "[", "<")  # it breaks off inside a call
        elif chat.tools:
            raise
        return  # words about the tags
    if not closed:
        chat.mark("tool_call_close_missing")
    draft.content = "\n".join(piece for piece in (one.strip() for one in said) if piece)


def _take_calls(draft: Draft, texts: list[str], chat: Chat, literals: bool) -> None:
    calls = list(draft.calls or ())
    for text in texts:
        calls += read_call(text, chat, literals)
    draft.calls = calls


def read_call(text: str, chat: Chat, literals: bool = True) -> list[Call]:
    """The calls of one block. Raises RecordDropped (bad_tool_call)."""
    tagged = _tagged(text.strip())
    if tagged is not None:
        name, pairs = tagged
        return [Call(name, _typed(pairs, name, chat))]
    try:
        value, literal = read_value(text.strip(), literals)
    except NotReadable as error:
        name = text.strip()
        if re.fullmatch(r"[A-Za-z_][\w.-]*", name) and any(tool.get("name") == name for tool in chat.tools):
            return [Call(name, {})]  # GLM's call without arguments
        raise RecordDropped("bad_tool_call", f"a call cannot be read: {error}") from None
    calls = [one_call(one) for one in (value if isinstance(value, list) else [value])]
    for call in calls:
        call.id = call.id or ""  # in text no call has an id
    if literal:
        chat.mark(LITERAL)
    return calls


def _tagged(text: str) -> tuple[str, list[tuple[str, str]]] | None:
    """(name, (key, value) pairs) of Qwen's and GLM's calls; None for text that is none."""
    if text.startswith("<function="):
        name, mark, inside = text[len("<function=") :].partition(">")
        pairs = _pairs(inside, "<parameter=", ">", "</parameter>")
        return (name.strip(), pairs) if mark and name.strip() else None
    name, mark, inside = text.partition("<arg_key>")
    if not mark or not name.strip():
        return None
    return name.strip(), [
        (k.strip(), v) for k, v in _pairs(mark + inside, mark, "</arg_key>", "</arg_value>")
    ]


def _pairs(text: str, first: str, middle: str, last: str) -> list[tuple[str, str]]:
    """What stands between the marks, over and over; one line break on each side of a value is the form's."""
    out: list[tuple[str, str]] = []
    at = 0
    while (start := text.find(first, at)) >= 0:
        split = text.find(middle, start)
        end = text.find(last, split)
        if split < 0 or end < 0:
            break
        value = text[split + len(middle) : end]
        if last == "</arg_value>":
            value = value.partition("<arg_value>")[2]
        out.append((text[start + len(first) : split], value.removeprefix("\n").removesuffix("\n")))
        at = end + len(last)
    return out


def _typed(pairs: list[tuple[str, str]], name: str, chat: Chat) -> dict[str, Any]:
    """Values are JSON unless the tool declares text; what is no JSON is text."""
    types = parameter_types(chat.tools, name)
    out: dict[str, Any] = {}
    for key, text in pairs:
        value: Any = text
        if types.get(key) not in ("string", "str"):
            try:
                value = read_json(text)
            except NotReadable:
                value = text
        out[key] = value
    return out


# -- results -------------------------------------------------------------------------------------


def _results(draft: Draft) -> list[Draft]:
    """The tool messages of a message made of responses, then what a user says behind them."""
    text = draft.content
    if draft.role not in ("tool", "user") or not isinstance(text, str):
        return [draft]
    inner: list[str] = []
    text = text.strip()
    at = 0
    while text.startswith(_ANSWER, at) and (end := text.find(_ANSWERED, at)) >= 0:
        inner.append(text[at + len(_ANSWER) : end].strip())
        at = end + len(_ANSWERED)
        while at < len(text) and text[at].isspace():
            at += 1
    rest = text[at:]
    if not inner or (rest and draft.role == "tool"):
        return [draft]
    if len(inner) == 1:
        out = [Draft("tool", inner[0], call_id=draft.call_id, name=draft.name)]
    else:
        out = [Draft("tool", one) for one in inner]
    return [*out, Draft("user", rest, name=draft.name)] if rest else out
