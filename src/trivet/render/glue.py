"""What a ChatML template puts around messages, read from its behaviour.

The template is shown conversations whose contents are marks (`QUSERQ` ...); what stands between the marks is
the glue. Nothing is assumed about its source text, and what does not fit the ChatML shape is an error that
says what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trivet.render.base import RenderError
from trivet.render.template import ChatTemplate
from trivet.render.wire import write_answer
from trivet.types import Message, ToolCall

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
Support = Literal["template", "inline", "no"]
"""template: the template writes it as we do; inline: it ignores it, so it goes into the content; no: it
writes it in a way of its own, so conversations that need it are refused."""

_SYSTEM, _USER, _ANSWER, _TOOL = "QSYSTEMQ", "QUSERQ", "QANSWERQ", "QTOOLQ"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


@dataclass(frozen=True, slots=True)
class Glue:
    """`start` opens the conversation, `header[role]` a turn, `close` + `after` end it.

    `strip[role]`: the template strips blanks around the content. `default_system`: the content of the system
    turn it injects where there is none. `grouped_tools`: consecutive tool results share one user turn.
    """

    start: str
    header: dict[str, str]
    close: str
    after: str
    strip: dict[str, bool]
    default_system: str | None
    late_system: bool
    grouped_tools: bool | None
    tools: Support
    calls: Support
    reasoning: Support


def _shape(template: ChatTemplate, found: str, what: str) -> RenderError:
    return RenderError(
        f"the chat template of {template.name} is not plain ChatML: {what}; it gave {found[:200]!r}. Name "
        "the model's family instead (policy: renderer: qwen3, ...)"
    )


def _between(template: ChatTemplate, text: str, left: str, right: str) -> tuple[str, str]:
    """(end of the left turn, header of the right one) from the text between two marks."""
    start, stop = text.find(left), text.find(right)
    glue = text[start + len(left) : stop]
    end, found, header = glue.partition(OPEN)
    if min(start, stop) < 0 or not found or not end.startswith(CLOSE):
        raise _shape(template, text, f"{CLOSE} ... {OPEN} expected between {left} and {right}")
    return end, found + header


def _turns(template: ChatTemplate) -> tuple[str, dict[str, str], str]:
    """(start, header by role, end of a turn)."""
    chat = [
        *(Message("system", _SYSTEM), Message("user", _USER), Message("assistant", _ANSWER)),
        *(Message("user", "QAGAINQ"), Message("assistant", "QLASTQ")),
    ]
    text = template.text(chat)
    start, found, system = text.partition(_SYSTEM)[0].partition(OPEN)
    if not found:
        raise _shape(template, text, f"the first turn does not begin with {OPEN}")
    header = {"system": found + system}
    ends = []
    pairs = [(_SYSTEM, _USER, "user"), (_USER, _ANSWER, "assistant"), (_ANSWER, "QAGAINQ", "user")]
    for left, right, role in [*pairs, ("QAGAINQ", "QLASTQ", "assistant")]:
        end, head = _between(template, text, left, right)
        ends.append(end)
        if header.setdefault(role, head) != head:
            raise _shape(template, text, f"{role} turns begin in two ways, {header[role]!r} and {head!r}")
    ends.append(text.partition("QLASTQ")[2])
    if len(set(ends)) != 1:
        raise _shape(template, text, f"turns end in different ways: {sorted(set(ends))}")
    prompt = template.text([Message("user", _USER)], generate=True)
    plain = template.text([Message("user", _USER)])
    if prompt != plain + header["assistant"]:
        raise _shape(template, prompt, "the generation prompt is not the header of an assistant turn")
    return start, header, ends[0]


def _tool_turns(
    template: ChatTemplate, header: dict[str, str], end: str
) -> tuple[dict[str, str], bool | None]:
    """(header with the tool role where it has one, grouped or not; None: tool messages do not fit)."""
    call = ToolCall("probe", {"x": 1})
    asked = Message("assistant", _ANSWER, tool_calls=(call, call))
    chat = [Message("user", _USER), asked, Message("tool", "QFIRSTQ"), Message("tool", _TOOL)]
    try:
        text = template.text([*chat, Message("user", "QLASTQ")])
    except RenderError:
        return header, None
    first = text.rfind(OPEN, 0, text.find("QFIRSTQ")) if "QFIRSTQ" in text else -1
    own = text[first : text.find("QFIRSTQ")] if first >= 0 else ""
    tail = f"{header['user']}QLASTQ{end}"
    if own and text.endswith(f"{own}QFIRSTQ{end}{own}{_TOOL}{end}{tail}"):
        return {**header, "tool": own}, False
    user = header["user"].rstrip("\n")
    group = "".join(f"\n<tool_response>\n{c}\n</tool_response>" for c in ("QFIRSTQ", _TOOL))
    if text.endswith(f"{user}{group}{end}{tail}"):
        return {**header, "tool": user}, True
    return header, None


def _support(template: ChatTemplate, last: Message, header: str, end: str) -> Support:
    """How the template treats what `last` carries besides its content, in the last turn and in history."""
    bare = Message("assistant", last.content)
    question, again = Message("user", _USER), Message("user", "QAGAINQ")
    try:
        for chat in ([question, last], [question, last, again, last]):
            plain = [bare if m is last else m for m in chat]
            got, ignored = template.text(chat), template.text(plain)
            written = header + write_answer(last, last.text) + end
            wanted = ignored.replace(header + bare.text + end, written)
            if got == wanted:
                support: Support = "template"
            elif got == ignored:
                support = "inline"
            else:
                return "no"
            if chat[-2] is question:
                first = support
    except RenderError:
        return "no"
    return support if support == first else "no"


def _strips(template: ChatTemplate, role: str) -> bool:
    """Whether blanks around this role's content are stripped."""
    chat = [Message("user", _USER), Message("assistant", _ANSWER), Message("user", "QLASTQ")]
    blank = "\n  QBLANKQ \n"
    probe = {"system": [Message("system", blank), *chat], "user": [Message("user", blank), *chat[1:]]}
    probe["assistant"] = [chat[0], Message("assistant", blank), chat[2]]
    text = template.text(probe[role])
    if blank in text:
        return False
    if f"{OPEN}{role}" in text and "QBLANKQ" in text and f"QBLANKQ{CLOSE}" in text:
        return True
    raise _shape(template, text, f"blanks around {role} content are neither kept nor stripped on both sides")


def _default_system(template: ChatTemplate, start: str, header: dict[str, str], end: str) -> str | None:
    text = template.text([Message("user", _USER)])
    before, found, _ = text.partition(header["user"] + _USER)
    head = start + header["system"]
    if found and before == start:
        return None
    if not found or not before.startswith(head) or not before.endswith(end):
        raise _shape(template, text, "what stands before the first user turn is not a system turn")
    return before[len(head) : -len(end)]


def _late_system(template: ChatTemplate, header: dict[str, str], end: str) -> bool:
    chat = [*(Message("user", _USER), Message("assistant", _ANSWER)), Message("system", _SYSTEM)]
    try:
        text = template.text([*chat, Message("user", "QLASTQ")])
    except RenderError:
        return False
    return text.endswith(f"{header['system']}{_SYSTEM}{end}{header['user']}QLASTQ{end}")


def system_with_tools(
    template: ChatTemplate, glue: tuple[str, str, str, str], tools: Any, system: str | None
) -> str | None:
    """The system turn's content as the template writes it when it offers tools; None where it does not fit.

    `glue`: start, system header, user header, end of a turn.
    """
    start, system_header, user_header, end = glue
    chat = [Message("user", _USER)]
    if system is not None:
        chat.insert(0, Message("system", system))
    text = template.text(chat, tools)
    head, tail = start + system_header, f"{end}{user_header}{_USER}{end}"
    if not text.startswith(head) or not text.endswith(tail) or len(text) < len(head) + len(tail):
        return None
    return text[len(head) : -len(tail)]


def _tools(template: ChatTemplate, header: Mapping[str, str], start: str, end: str) -> Support:
    chat = [Message("system", _SYSTEM), Message("user", _USER)]
    try:
        with_tools = template.text(chat, [PROBE_TOOL])
    except RenderError:
        return "no"
    if with_tools == template.text(chat):
        return "inline"
    glue = (start, header["system"], header["user"], end)
    return "no" if system_with_tools(template, glue, [PROBE_TOOL], _SYSTEM) is None else "template"


def read_glue(template: ChatTemplate) -> Glue:
    """Raises RenderError where the template does not have the ChatML shape."""
    if OPEN not in template.source or CLOSE not in template.source:
        raise _shape(template, template.source[:200], f"it does not use {OPEN} and {CLOSE}")
    start, header, end = _turns(template)
    header, grouped = _tool_turns(template, header, end)
    call = ToolCall("probe", {"x": 1, "text": 'é "quoted" <b>'})
    head = header["assistant"]
    calls = _support(template, Message("assistant", _ANSWER, tool_calls=(call, call)), head, end)
    if calls == "template":  # also without content
        calls = _support(template, Message("assistant", "", tool_calls=(call,)), head, end)
    strip = {role: _strips(template, role) for role in ("system", "user", "assistant")}
    return Glue(
        start=start,
        header=header,
        close=CLOSE,
        after=end.removeprefix(CLOSE),
        strip=strip,
        default_system=_default_system(template, start, header, end),
        late_system=_late_system(template, header, end),
        grouped_tools=grouped,
        tools=_tools(template, header, start, end),
        calls=calls,
        reasoning=_support(template, Message("assistant", _ANSWER, reasoning="QTHINKQ"), head, end),
    )
