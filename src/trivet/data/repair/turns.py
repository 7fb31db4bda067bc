"""Turns that break off."""

from __future__ import annotations

from trivet.data.formats.chat import Chat, Draft
from trivet.data.record import RecordDropped

REMOVED = "incomplete_final_turn_removed"


def final_turn(chat: Chat) -> None:
    """Cuts the end back to the last finished assistant message (`incomplete_final_turn_removed`).

    Unfinished are: a last message of user, system or tool; an assistant message that is empty, whose
    reasoning is never closed, or that hit a length limit. A call may be last. One in
    the middle is no longer trained (`truncated_turn_masked`, `empty_turn_masked`). Raises RecordDropped:
    `no_answer` when there was no assistant message, `incomplete` when none is finished.
    """
    drafts = chat.drafts
    end = len(drafts)
    while end and not finished(drafts[end - 1]):
        end -= 1
    if not end:
        if any(draft.role == "assistant" and not _empty(draft) for draft in drafts):
            raise RecordDropped("incomplete", "no assistant message is finished")
        raise RecordDropped("no_answer", "no assistant message")
    if end < len(drafts):
        chat.drafts = drafts[:end]
        chat.mark(REMOVED)
    for draft in chat.drafts:
        if draft.role == "assistant" and draft.train != 0 and not finished(draft):
            draft.train = 0.0
            chat.mark("truncated_turn_masked" if draft.cut else "empty_turn_masked")


def finished(draft: Draft) -> bool:
    return draft.role == "assistant" and not draft.cut and not _empty(draft)


def _empty(draft: Draft) -> bool:
    content = draft.content
    return not draft.calls and not (content.strip() if isinstance(content, str) else content)
