"""One trajectory as one example a round: what is trained once, what is stripped, what merges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.interleave import (
    cut_tail,
    is_trained,
    merge_prefixes,
    probe_empty_think,
    round_starts,
    split_rounds,
)
from trivet.data.record import Record, RecordDropped
from trivet.types import Message, ToolCall


def user(text: str) -> Message:
    return Message("user", text)


def says(text: str, reasoning: str | None = None, train: float | None = None) -> Message:
    return Message("assistant", text, reasoning=reasoning, train=train)


def calls(id: str, reasoning: str | None = None) -> Message:
    return Message("assistant", "", reasoning=reasoning, tool_calls=(ToolCall("look", {"at": id}, id),))


def result(id: str) -> Message:
    return Message("tool", f"seen {id}", tool_call_id=id)


def split(*messages: Message, **options: str) -> list[list[Message]]:
    return [r.messages for r in split_rounds(Record(list(messages)), **options)]  # type: ignore[arg-type]


def context(message: Message) -> Message:
    return replace(message, reasoning=None, train=0.0)


def test_the_shared_cases(shared_dir: Path) -> None:
    path = shared_dir / "cases" / "interleaved.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")

    def message(row: dict) -> Message:
        loss = row.pop("loss")
        return Message.from_dict(
            {**row, **({"train": 0.0} if row["role"] == "assistant" and not loss else {})}
        )

    def messages(rows: list[dict]) -> list[Message]:
        return [message(row) for row in rows]

    for line in path.read_text().splitlines():
        case = json.loads(line)
        expect = case["expect"]
        parts = split_rounds(Record(messages(case["input"]["messages"])))
        assert [p.messages for p in parts] == [messages(s) for s in expect["samples"]], case["id"]
        assert [sum(map(is_trained, p.messages)) for p in parts] == expect["trained_turns"], case["id"]
        merged = merge_prefixes(parts, adds_empty_think=False)
        wanted = expect["samples_after_merge"]
        if wanted is None:
            assert merged == parts, case["id"]
        else:
            assert [m.messages for m in merged] == [messages(s) for s in wanted], case["id"]


def test_a_call_with_its_result_leads_on_and_an_answer_ends() -> None:
    first = [user("a?"), calls("1", "look"), result("1"), says("A", "so A")]
    second = [user("b?"), says("B", "so B")]
    assert split(*first, *second) == [
        first,
        [user("a?"), context(calls("1")), result("1"), context(says("A")), *second],
    ]


def test_a_wrapped_result_starts_no_round_and_a_request_without_an_answer_none_that_is_written() -> None:
    wrapped = user(" <tool_response>\nseen\n</tool_response>\n")
    messages = [user("a?"), says("look(1)", "look"), wrapped, says("A", "so A")]
    assert round_starts(messages) == [0]
    assert split(*messages) == [messages]
    interrupted = [user("a?"), Message("system", "note"), user("b?"), says("B", "so")]
    assert split(*interrupted) == [interrupted]


def test_interrupted_calls_are_trained_in_their_own_round() -> None:
    messages = [user("a?"), calls("1", "look"), result("1"), user("stop"), says("Stopped.", "ok")]
    parts = split(*messages)
    assert parts == [messages[:3], [messages[0], context(messages[1]), *messages[2:]]]


def test_a_greeting_before_the_first_request_is_an_example_of_its_own() -> None:
    messages = [Message("system", "s"), says("Hello.", "greet"), user("a?"), says("A")]
    assert split(*messages) == [messages[:2], [messages[0], context(messages[1]), *messages[2:]]]


def test_answers_in_a_row_share_their_round() -> None:
    messages = [user("a?"), says("first", "r1"), says("second", "r2")]
    assert split(*messages) == [messages]


def test_the_tail_is_cut_and_said() -> None:
    record = Record([user("a?"), calls("1", "r"), result("1"), user("more?")], done=["arguments"])
    (part,) = split_rounds(record)
    assert part.messages == record.messages[:2]
    assert part.done == ["arguments", "cut_tail"]
    assert record.done == ["arguments"] and len(record.messages) == 4
    assert cut_tail([user("a?")]) == []


def test_only_reasoning_is_supervised_where_asked() -> None:
    messages = [user("a?"), calls("1", "look"), result("1"), says("A"), user("b?"), says("B", " ")]
    (part,) = split(*messages, supervise="reasoning")
    assert part == [*messages[:3], says("A", train=0.0)]
    with pytest.raises(RecordDropped, match="reasoning") as caught:
        split(user("a?"), says("A"), supervise="reasoning")
    assert caught.value.cause == "not_trained"
    with pytest.raises(ValueError, match="all or reasoning"):
        split(user("a?"), says("A"), supervise="none")


@pytest.mark.parametrize("messages", [[], [user("a?")], [user("a?"), says("A", train=0.0)]])
def test_nothing_trained_is_dropped(messages: list[Message]) -> None:
    with pytest.raises(RecordDropped) as caught:
        split(*messages)
    assert caught.value.cause == "not_trained"


def test_parts_are_numbered_and_keep_where_they_are_from() -> None:
    record = Record(
        [user("a"), says("A", "x"), user("b"), says("B")], "chats", "c.jsonl:3", [{"name": "t"}], "id7"
    )
    parts = split_rounds(record)
    assert [p.part for p in parts] == [0, 1]
    assert {(p.source, p.place, p.id) for p in parts} == {("chats", "c.jsonl:3", "id7")}
    assert [p.done for p in parts] == [["split_round"], ["split_round"]]
    assert split_rounds(Record([Message("system", "s"), user("a"), says("A")]))[0].done == []


def test_a_pair_stays_whole() -> None:
    record = Record([user("a"), says("A", "x"), user("b"), says("B")], rejected=[says("C")])
    assert split_rounds(record) == [record]
    assert merge_prefixes([record, record], adds_empty_think=False) == [record, record]


def test_weights_survive_a_merge() -> None:
    parts = split_rounds(Record([user("a"), says("A", train=0.5), user("b"), says("B", train=2.0)]))
    (merged,) = merge_prefixes(parts, adds_empty_think=False)
    assert [m.train for m in merged.messages] == [None, 0.5, None, 2.0]
    assert merged.done == ["split_round", "merge_prefix"]
    assert merge_prefixes(parts, adds_empty_think=True) == parts


def test_masked_reasoning_that_later_rounds_miss_forbids_the_merge() -> None:
    before = [user("a"), says("look", "r", train=0.0), says("A")]
    parts = split_rounds(Record([*before, user("b"), says("B")]))
    assert merge_prefixes(parts, adds_empty_think=False) == parts
    # An empty block is written as one, and is gone from the context: not the same either.
    parts = split_rounds(Record([user("a"), says("A", ""), user("b"), says("B")]))
    assert merge_prefixes(parts, adds_empty_think=False) == parts


def test_examples_of_different_rows_never_merge() -> None:
    one = Record([user("a"), says("A")], place="f:1")
    two = Record([user("a"), says("A", train=0.0), user("b"), says("B")], place="f:2")
    assert merge_prefixes([one, two], adds_empty_think=False) == [one, two]


def test_the_probe_sees_an_empty_block_before_the_last_answer_only() -> None:
    def plain(messages: list[Message]) -> str:
        return "".join(f"[{m.role}]{m.text}" for m in messages)

    def adding(messages: list[Message]) -> str:
        return plain(messages[:-1]) + "[assistant]<think></think>" + messages[-1].text

    assert not probe_empty_think(plain)  # type: ignore[arg-type]
    assert probe_empty_think(adding)  # type: ignore[arg-type]


# -- properties ------------------------------------------------------------------------------------

_REASONING = st.sampled_from([None, None, "", "r", "because"])
_WEIGHT = st.sampled_from([None, None, 0.0, 0.5])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Any order of messages, valid or not: every text is its message's own."""
    kinds = draw(st.lists(st.sampled_from("uuaactws"), max_size=14))
    messages = []
    for i, kind in enumerate(kinds):
        if kind == "u":
            messages.append(user(f"u{i}"))
        elif kind == "w":
            messages.append(user(f"<tool_response>w{i}</tool_response>"))
        elif kind == "s":
            messages.append(Message("system", f"s{i}"))
        elif kind == "t":
            messages.append(result(str(i)))
        elif kind == "c":
            messages.append(replace(calls(str(i), draw(_REASONING)), content=f"c{i}", train=draw(_WEIGHT)))
        else:
            messages.append(says(f"a{i}", draw(_REASONING), draw(_WEIGHT)))
    return messages


def parts_of(messages: list[Message], **options: str) -> list[Record]:
    try:
        return split_rounds(Record(messages), **options)  # type: ignore[arg-type]
    except RecordDropped:
        return []


@given(conversations(), st.sampled_from(["all", "reasoning"]), st.booleans())
def test_every_trained_message_is_trained_once_with_its_weight(
    messages: list[Message], supervise: str, merge: bool
) -> None:
    parts = parts_of(messages, supervise=supervise)
    if merge:
        parts = merge_prefixes(parts, adds_empty_think=False)
    trained = [m for part in parts for m in part.messages if is_trained(m)]
    wanted = [
        m
        for m in messages
        if is_trained(m) and (supervise == "all" or (m.reasoning is not None and m.reasoning.strip()))
    ]
    assert trained == wanted  # texts are unique, so this is each once, in order, reasoning and all


@given(conversations())
def test_contexts_hold_no_reasoning_and_nothing_visible_changes(messages: list[Message]) -> None:
    for part in parts_of(messages):
        assert part.messages == [
            m if m == own else context(own)
            for m, own in zip(part.messages, messages[: len(part.messages)], strict=True)
        ]
        start = max((i for i in round_starts(part.messages)), default=0)
        assert all(m.reasoning is None and not is_trained(m) for m in part.messages[:start])
        assert part.messages[start:] == messages[start : len(part.messages)]
    if parts := parts_of(messages):
        end = max(i for i, m in enumerate(messages) if is_trained(m))
        assert len(parts[-1].messages) > end


@given(conversations())
def test_a_merge_leaves_what_each_trained_message_sees(messages: list[Message]) -> None:
    def views(records: list[Record]) -> list[list[tuple[str, str, str | None]]]:
        return [
            [(m.role, m.text, m.reasoning) for m in record.messages[: i + 1]]
            for record in records
            for i, message in enumerate(record.messages)
            if is_trained(message)
        ]

    parts = parts_of(messages)
    assert views(merge_prefixes(parts, adds_empty_think=False)) == views(parts)
