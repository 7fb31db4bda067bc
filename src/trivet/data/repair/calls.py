"""Tool calls: their arguments, their ids, and turns that were torn apart."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from trivet.data.formats.chat import Call, Chat, Draft
from trivet.data.formats.literal import NotReadable, read_value
from trivet.data.formats.tooltext import LITERAL
from trivet.data.record import RecordDropped
from trivet.data.repair.turns import finished


def arguments(chat: Chat) -> None:
    """Arguments that are Python literals or JSON of JSON become objects (`tool_call_literal_repaired`,
    `arguments_encoded_twice`)."""
    read_arguments(chat, literals=True)


def read_arguments(chat: Chat, literals: bool) -> None:
    """JSON text becomes an object, once; null and "" are no arguments. Raises RecordDropped
    (bad_arguments)."""
    for draft in chat.drafts:
        for call in draft.calls or ():
            if not isinstance(call.arguments, dict):
                call.arguments = _object(call, chat, literals)


def _object(call: Call, chat: Chat, literals: bool) -> dict[str, Any]:
    value, rounds = call.arguments, 0
    while isinstance(value, str) and value.strip() and rounds < 2:
        try:
            value, literal = read_value(value, literals)
        except NotReadable as error:
            raise RecordDropped("bad_arguments", f"arguments of {call.name[:60]!r}: {error}") from None
        if literal:
            chat.mark(LITERAL)
        rounds += 1
        if not literals:
            break
    if rounds == 2:
        chat.mark("arguments_encoded_twice")
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise RecordDropped("bad_arguments", f"arguments of {call.name[:60]!r} are a {kind}, not an object")
    return value


def call_turns(chat: Chat) -> None:
    """Calls in messages of their own, right behind the assistant's words or other calls, join that message
    (`call_turns_joined`)."""
    drafts = chat.drafts
    if not any(a.role == b.role == "assistant" and b.calls for a, b in pairwise(drafts)):
        return
    kept: list[Draft] = []
    for draft in drafts:
        kept.append(draft)
        while len(kept) > 1 and _continues(kept[-2], kept[-1]):
            more = kept.pop()
            if not finished(kept[-1]):  # it says nothing of its own: the calls' flag counts
                kept[-1].train = more.train
            kept[-1].calls = [*(kept[-1].calls or ()), *(more.calls or ())]
            kept[-1].cut = more.cut
            chat.mark("call_turns_joined")
    chat.drafts = kept


def _continues(last: Draft, draft: Draft) -> bool:
    return (
        last.role == draft.role == "assistant"
        and bool(draft.calls)
        and not draft.content
        and draft.reasoning is None
        and not last.cut
        and (last.train == draft.train or not finished(last))
    )


def call_ids(chat: Chat) -> None:
    """Calls without id get call_0, call_1, ... over the conversation, results the id of the call they answer.

    Results without id answer the calls before them, by name where they name one, else in order. Counted is a
    missing id where the format has ids (`call_ids_added`), and a second call of the same id, which gets one
    of its own with its result (`call_ids_doubled`).
    """
    drafts = chat.drafts
    if not any(draft.calls or draft.role == "tool" for draft in drafts):
        return
    given = {call.id for draft in drafts for call in draft.calls or () if call.id}
    given |= {draft.call_id for draft in drafts if draft.call_id}
    seen: set[str] = set()
    number = 0
    older: list[tuple[str | None, Call]] = []
    latest: list[tuple[str | None, Call]] = []
    for draft in drafts:
        if draft.calls:
            older, latest = latest, []
            for call in draft.calls:
                old = call.id
                if not old or old in seen:
                    while (new := f"call_{number}") in given:
                        number += 1
                    number += 1
                    if old is None:
                        chat.mark("call_ids_added")
                    elif old:
                        chat.mark("call_ids_doubled")
                    call.id = new
                seen.add(call.id or "")
                latest.append((old, call))
        elif draft.role == "tool":
            _answer(draft, latest, older)


def _answer(
    draft: Draft, latest: list[tuple[str | None, Call]], older: list[tuple[str | None, Call]]
) -> None:
    """Gives the result the id of the call it answers, which is then answered; leaves one that answers
    none."""
    if draft.call_id:
        found = next(
            ((row, pair) for row in (latest, older) for pair in row if pair[0] == draft.call_id), None
        )
    else:
        pair = next((p for p in latest if draft.name and p[1].name == draft.name), None)
        pair = pair or (latest[0] if latest else None)
        found = (latest, pair) if pair else None
    if found is None:
        return
    row, pair = found
    row.remove(pair)
    draft.call_id, draft.name = pair[1].id, None
