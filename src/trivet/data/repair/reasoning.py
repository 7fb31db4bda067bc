"""Reasoning written as <think>...</think> in an assistant's text."""

from __future__ import annotations

import re

from trivet.data.formats.chat import Chat, Draft

OPEN, CLOSE = "<think>", "</think>"
_CALL = "<tool_call>"
_ROUNDS = 8
_TAG = re.compile(r"</?think>")
_CLOSING = re.compile(r"\s*(?:</think>\s*)*")
FOLDED, NO_OPEN, NO_CLOSE = "reasoning_tags_folded", "reasoning_open_missing", "reasoning_close_missing"


def reasoning_tags(chat: Chat) -> None:
    """Takes the block at the start of an assistant's text as its reasoning.

    A lone closing tag means that the opening one was in the prompt (`reasoning_open_missing`); doubled,
    nested and repeated blocks fold into one (`reasoning_tags_folded`); an empty block is reasoning "". A
    block that is never closed ends where a call begins; in the last turn it breaks off (see `final_turn`),
    elsewhere it is all reasoning and the message is no longer trained (`reasoning_close_missing`).
    """
    last = len(chat.drafts) - 1
    for index, draft in enumerate(chat.drafts):
        text = draft.content
        if draft.role == "assistant" and isinstance(text, str) and "think>" in text:
            _split(chat, draft, text, index == last)
            for _ in range(_ROUNDS):  # the same thought before one closing tag after another
                again = draft.content
                if again == text or not isinstance(again, str) or CLOSE not in again:
                    break
                text = again
                _split(chat, draft, text, index == last)


def well_formed_only(chat: Chat) -> None:
    """What is read with the repair switched off: one closed block at the start, without tags inside."""
    for draft in chat.drafts:
        text = draft.content
        if draft.role != "assistant" or not isinstance(text, str) or "think>" not in text:
            continue
        head = text.lstrip()
        end = head.find(CLOSE)
        if head.startswith(OPEN) and end >= 0 and draft.reasoning is None:
            block = head[len(OPEN) : end]
            if OPEN not in block:
                draft.reasoning, draft.content = block.strip(), head[end + len(CLOSE) :].lstrip()


def _split(chat: Chat, draft: Draft, text: str, is_last: bool) -> None:
    blocks: list[str] = []
    rest = text
    if not text.lstrip().startswith(OPEN):
        before, close, after = text.partition(CLOSE)
        if not close or OPEN in before or before.endswith(("`", '"', "'")):
            return
        said = before.strip()
        if draft.reasoning is not None and said not in ("", draft.reasoning):
            return  # a tag inside the answer
        if draft.reasoning is None:
            chat.mark(NO_OPEN)
        else:
            chat.mark(FOLDED)
        blocks.append(said)
        rest = after
    at = _behind_closing(chat, rest, 0)
    while rest.startswith(OPEN, at):
        end = _end_of_block(rest, at + len(OPEN))
        if end < 0:
            rest, at = _unclosed(chat, draft, rest[at:], blocks, is_last), 0
            break
        inside = rest[at + len(OPEN) : end]
        if blocks or "think>" in inside:
            chat.mark(FOLDED)
        blocks.append(_TAG.sub("", inside).strip())
        at = _behind_closing(chat, rest, end + len(CLOSE))
    if blocks:
        _join(chat, draft, blocks)
        draft.content = rest[at:]


def _behind_closing(chat: Chat, text: str, at: int) -> int:
    """The place behind blanks and closing tags that close nothing."""
    found = _CLOSING.match(text, at)
    end = found.end() if found else at
    if text.find(CLOSE, at, end) >= 0:
        chat.mark(FOLDED)
    return end


def _end_of_block(text: str, at: int) -> int:
    """Where the closing tag of the block that begins at `at` stands; -1: it is never closed.

    With more opening than closing tags the last closing one ends it.
    """
    depth, close = 1, -1
    for tag in _TAG.finditer(text, at):
        if tag[0] == OPEN:
            depth += 1
        else:
            depth, close = depth - 1, tag.start()
            if not depth:
                break
    return close


def _unclosed(chat: Chat, draft: Draft, rest: str, blocks: list[str], is_last: bool) -> str:
    call = rest.find(_CALL)
    if call >= 0 or draft.calls or draft.call_text:
        chat.mark(NO_CLOSE)
        cut = call if call >= 0 else len(rest)
    elif is_last:
        draft.cut = True
        return rest
    else:
        chat.mark(NO_CLOSE)
        draft.train = 0.0
        cut = len(rest)
    blocks.append(rest[len(OPEN) : cut].replace(OPEN, "").strip())
    return rest[cut:]


def _join(chat: Chat, draft: Draft, blocks: list[str]) -> None:
    """The blocks and what the source already had as reasoning, without repetition."""
    given = draft.reasoning
    pieces = list(dict.fromkeys(piece for piece in (given, *blocks) if piece))
    if given is not None and any(block for block in blocks):
        chat.mark(FOLDED)
    draft.reasoning = "\n".join(pieces)
