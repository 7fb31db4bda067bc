"""Interleaved thinking: one trajectory as one example for each completed response.

At inference a chat template drops the reasoning of rounds before the last user request, so a later round
must be trained on a context without it, and an earlier round on its own. A round starts at a user message
that is no wrapped tool result and follows no user message; an example is everything up to the end of its
round, with the rounds before it stripped of reasoning and masked. Inside a round every assistant message
keeps its reasoning: those whose calls a tool result answers are intermediate, any other ends a response.
Responses that follow each other with no user message between them share their round's example, of which each
shorter one is a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from trivet.data.record import Record, RecordDropped
from trivet.types import Message

Supervise = Literal["all", "reasoning"]


def is_wrapped_result(message: Message) -> bool:
    """Whether a user message is a tool result that its source wrote as text, in the tags templates know."""
    if message.role != "user":
        return False
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    text = text.strip()
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")


def is_trained(message: Message) -> bool:
    return message.role == "assistant" and message.train != 0


def round_starts(messages: Sequence[Message]) -> list[int]:
    """Indices of the messages at which a round starts: real user requests, the first of several in a row."""
    return [
        i
        for i, message in enumerate(messages)
        if message.role == "user"
        and not is_wrapped_result(message)
        and not (i and messages[i - 1].role == "user" and not is_wrapped_result(messages[i - 1]))
    ]


def cut_tail(messages: Sequence[Message]) -> list[Message]:
    """The messages up to the last assistant message, which may be a call; none where there is no such one."""
    end = len(messages)
    while end and messages[end - 1].role != "assistant":
        end -= 1
    return list(messages[:end])


def _as_context(message: Message) -> Message:
    return replace(message, reasoning=None, train=0.0) if message.role == "assistant" else message


def _supervised(message: Message, supervise: Supervise) -> Message:
    if supervise == "reasoning" and is_trained(message) and not (message.reasoning or "").strip():
        return replace(message, train=0.0)
    return message


def split_rounds(record: Record, *, supervise: Supervise = "all") -> list[Record]:
    """One record for each round that trains something; every trained message is trained in exactly one.

    `supervise`: all trains every assistant message of the round that is not masked already, reasoning only
    those that carry reasoning. An unfinished tail (tool results or requests that nothing answers) is cut
    first. `part` numbers the records. A preference pair stays whole: its answers are compared, not split.
    Raises RecordDropped (not_trained) when no round trains anything.
    """
    if supervise not in ("all", "reasoning"):
        raise ValueError(f"supervise is {supervise!r}; it must be all or reasoning")
    if record.rejected is not None:
        return [record]
    messages = cut_tail(record.messages)
    done = record.done + ["cut_tail"] * (len(messages) < len(record.messages))
    starts = round_starts(messages)
    if not starts or starts[0]:
        starts.insert(0, 0)  # what stands before the first request
    own = [_supervised(message, supervise) for message in messages]
    context = [_as_context(message) for message in messages]
    out: list[Record] = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        if any(map(is_trained, own[start:end])):
            sample = context[:start] + own[start:end]
            split = [] if sample == messages else ["split_round"]
            out.append(replace(record, messages=sample, part=len(out), done=done + split))
    if not out:
        what = "no assistant message" if not messages else "no assistant message that is trained"
        if supervise == "reasoning":
            what += " and carries reasoning"
        raise RecordDropped("not_trained", f"{record.place or 'record'}: it has {what}")
    return out


def _unmasked(message: Message) -> Message:
    return replace(message, train=None) if message.train is not None else message


def _extends(longer: Record, shorter: Record) -> bool:
    """Whether `longer`, of the same row, shows each message that `shorter` trains in the same context."""
    rows = [(r.source, r.place, r.id, r.tools, r.rejected) for r in (longer, shorter)]
    trained = [i for i, message in enumerate(shorter.messages) if is_trained(message)]
    if rows[0] != rows[1] or longer.rejected is not None or not trained:
        return False
    end = trained[-1] + 1
    pairs = zip(shorter.messages[:end], longer.messages[:end], strict=False)
    return len(longer.messages) >= end and all(
        _unmasked(a) == _unmasked(b) and not (is_trained(a) and is_trained(b)) for a, b in pairs
    )


def merge_prefixes(records: Sequence[Record], *, adds_empty_think: bool) -> list[Record]:
    """Examples of one row that begin the next one, merged with it: each message is still trained once.

    Two neighbours merge when everything up to the shorter's last trained message stands unchanged in the
    longer, thus where nothing was stripped. `adds_empty_think`: whether the template puts an empty thinking
    block before a last answer without reasoning (`probe_empty_think` finds out); then the same message is
    written in two ways and nothing merges.
    """
    if adds_empty_think:
        return list(records)
    out: list[Record] = []
    for record in records:
        last = out[-1] if out else None
        if last is None or not _extends(record, last):
            out.append(record)
        else:
            trained = dict(enumerate(last.messages))
            messages = [
                trained[i] if i in trained and is_trained(trained[i]) else message
                for i, message in enumerate(record.messages)
            ]
            done = record.done if "merge_prefix" in record.done else [*record.done, "merge_prefix"]
            out[-1] = replace(record, messages=messages, part=last.part, done=done)
    return out


def probe_empty_think(render: Callable[[Sequence[Message]], Sequence[Any] | str]) -> bool:
    """Whether a template writes an answer without reasoning differently once a further round follows it.

    `render` gives the text or the ids of a whole conversation.
    """
    first = [Message("user", "One."), Message("assistant", "Two.")]
    short, long = render(first), render([*first, Message("user", "Three."), Message("assistant", "Four.")])
    return list(long[: len(short)]) != list(short)
