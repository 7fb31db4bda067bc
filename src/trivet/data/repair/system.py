"""System prompts: several at the start become one, empty ones go; none is ever invented."""

from __future__ import annotations

from trivet.data.formats.chat import Chat


def system_prompts(chat: Chat) -> None:
    """Leading system messages merge with a blank line between; equal ones count once. Marks `system_merged`,
    `system_empty_removed`."""
    drafts = chat.drafts
    if not any(draft.role == "system" for draft in drafts):
        return
    kept = []
    for draft in drafts:
        if draft.role == "system" and isinstance(draft.content, str):
            draft.content = draft.content.strip()
            if not draft.content:
                if "tools_from_system" not in chat.done:  # it held nothing else
                    chat.mark("system_empty_removed")
                continue
        kept.append(draft)
    lead = 0
    while lead < len(kept) and kept[lead].role == "system" and isinstance(kept[lead].content, str):
        lead += 1
    if lead > 1:
        kept[0].content = "\n\n".join(dict.fromkeys(str(draft.content) for draft in kept[:lead]))
        del kept[1:lead]
        chat.mark("system_merged")
    chat.drafts = kept
