"""The agent-data-protocol's standard form: `content` is a list of observations and actions.

An API action is a tool call, its description the words before it. A code action is a tool call named after
its language when the environment answers it, and words with a code block when a user does: in some of its
sets the user plays the environment, in others it is a person who asks for changes. (Its raw and SFT forms
are other formats: messages, ShareGPT, SWE-agent.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from trivet.data.formats.chat import Call, Chat, Draft, plain_text
from trivet.data.formats.literal import NotReadable, read_json
from trivet.data.formats.tools import read_tools
from trivet.data.record import RecordDropped

_FINISH = re.compile(r"\s*<finish>(.*)</finish>\s*", re.DOTALL)
_ACTIONS = ("api_action", "code_action")


def is_adp(row: Mapping[str, Any]) -> bool:
    steps = row.get("content")
    return isinstance(steps, list) and bool(steps) and isinstance(steps[0], dict) and "class_" in steps[0]


def read_adp(row: Mapping[str, Any], text_only: bool) -> Chat:
    """Raises RecordDropped."""
    steps = row["content"]
    for step in steps:
        if not isinstance(step, dict) or not isinstance(step.get("class_"), str):
            raise RecordDropped("bad_message", "a step has no class_")
    details = row.get("details")
    tools = details.get("tools") if isinstance(details, dict) else None
    chat = Chat([], read_tools(tools))
    user_answers = _user_answers(steps)
    answered = False  # the step before was a call that awaits its result
    for index, step in enumerate(steps):
        kind, source = step["class_"], step.get("source")
        if kind in _ACTIONS:
            following = steps[index + 1] if index + 1 < len(steps) else {}
            by_environment = following.get("source") == "environment"
            answered = by_environment or (user_answers and _is_observation(following))
            chat.drafts.append(_action(step, as_call=answered or kind == "api_action"))
            continue
        if kind == "message_action":
            chat.drafts.append(Draft("assistant", _message(step)))
        elif kind in ("text_observation", "web_observation"):
            role = "tool" if answered else "user"
            if source == "environment" and step.get("name") == "system":
                role = "system"
            chat.drafts.append(Draft(role, _observed(step, text_only)))
        elif kind == "image_observation":
            raise RecordDropped("non_text_content", "an image observation")
        else:
            raise RecordDropped("bad_message", f"a step of the unknown class {kind[:40]!r}")
        answered = False
    if _unquote(chat.drafts):
        chat.mark("quoted_arguments_unwrapped")
    return chat


def _user_answers(steps: list[Any]) -> bool:
    """In this set the user plays the environment: API calls are answered by it, and nothing else answers."""
    after = [b for a, b in pairwise(steps) if a["class_"] == "api_action"]
    sources = [step.get("source") for step in after if _is_observation(step)]
    return bool(sources) and all(source == "user" for source in sources)


def _is_observation(step: Mapping[str, Any]) -> bool:
    return step.get("class_") in ("text_observation", "web_observation")


def _action(step: Mapping[str, Any], as_call: bool) -> Draft:
    words = _described(step)
    if step["class_"] == "api_action":
        name = step.get("function")
        if not isinstance(name, str) or not name:
            raise RecordDropped("bad_tool_call", "an API action names no function")
        return Draft("assistant", words, calls=[Call(name, step.get("kwargs"))])
    language = step.get("language")
    language = language if isinstance(language, str) and language else "code"
    code = plain_text(step.get("content"), "code")
    if as_call:
        return Draft("assistant", words, calls=[Call(language, {"code": code})])
    block = f"```{language}\n{code}\n```"
    return Draft("assistant", f"{words}\n\n{block}" if words.strip() else block)


def _message(step: Mapping[str, Any]) -> str:
    content = plain_text(step.get("content"), "content")
    if found := _FINISH.fullmatch(content):  # the protocol's own mark, not the agent's words
        content = found[1].strip()
    words = _described(step).strip()
    return "\n\n".join(piece for piece in (words, content) if piece)


def _described(step: Mapping[str, Any]) -> str:
    words = step.get("description")
    return "" if words is None else plain_text(words, "description").rstrip()


def _observed(step: Mapping[str, Any], text_only: bool) -> str:
    if text_only and step.get("image_observation"):
        raise RecordDropped("non_text_content", "a page's picture in a text-only run")
    for key in ("content", "axtree", "html"):
        if isinstance(step.get(key), str):
            return step[key]
    raise RecordDropped("bad_content", f"an observation without text; it has {sorted(map(str, step))[:10]}")


def _unquote(drafts: list[Draft]) -> bool:
    """Arguments written as Python source ('"shelf 1"') lose their quotes, where all of a call's texts have
    them."""
    changed = False
    for draft in drafts:
        for call in draft.calls or ():
            if not isinstance(call.arguments, dict):
                continue
            texts = {k: v for k, v in call.arguments.items() if isinstance(v, str)}
            bare = {k: _bare(v) for k, v in texts.items()}
            if texts and None not in bare.values():
                call.arguments = {**call.arguments, **bare}
                changed = True
    return changed


def _bare(text: str) -> str | None:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return None
    try:
        value = read_json(text)
    except NotReadable:
        return None
    return value if isinstance(value, str) else None
