"""The shared cases of normalisation, and what holds for every row: one form, refusals only by cause, a fixed
point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.data.formats import FORMATS, detect
from trivet.data.normalise import normalise
from trivet.data.record import Record, RecordDropped
from trivet.types import Message


def as_case(record: Record) -> list[dict[str, Any]]:
    """The messages as the cases write them: `loss` is 1 for an assistant message that no flag masks."""
    out = []
    for message in record.messages:
        plain = message.to_dict()
        plain.pop("train", None)
        out.append({**plain, "loss": int(message.role == "assistant" and message.train != 0)})
    return out


def read(row: Any, **how: Any) -> Record | str:
    """The record, or the cause it is refused by."""
    try:
        return normalise(row, **how)
    except RecordDropped as error:
        return error.cause if str(error) else "a refusal that says nothing"


def test_the_shared_cases(shared_dir: Path) -> None:
    path = shared_dir / "cases" / "normalise.jsonl"
    if not path.is_file():
        pytest.skip(f"no cases at {path}")
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            continue
        case = json.loads(line)
        expect = case["expect"]
        record = read(case["input"], source="case", place=case["id"])
        if isinstance(record, str):
            assert record == expect["drop"], case["id"]
            continue
        assert expect["drop"] is None, case["id"]
        assert as_case(record) == expect["messages"], case["id"]
        assert record.done == expect["repairs"], case["id"]
        assert record.tools == expect.get("tools", []), case["id"]
        assert (record.source, record.place) == ("case", case["id"])


@pytest.mark.parametrize("folder", ["sft/llamafactory", "agent/agent_data_protocol", "preference/hh_rlhf"])
def test_real_files_load_and_what_is_dropped_has_a_cause(shared_dir: Path, folder: str) -> None:
    import gzip

    files = sorted(p for p in (shared_dir / "data" / folder).glob("*.json*") if p.name != "dataset_info.json")
    if not files:
        pytest.skip(f"no files under {folder}")
    for path in files:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        rows = json.loads(text) if text.startswith("[") else [json.loads(x) for x in text.split("\n") if x]
        name = detect(rows)
        assert name in FORMATS, path.name
        causes = set()
        for row in rows:
            record = read(row, format=name)
            if isinstance(record, str):
                causes.add(record)
            else:
                assert_fixed_point(record)
        assert causes <= {"non_text_content", "no_answer", "incomplete"}, (path.name, causes)


# -- any row at all ------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=20),
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "<tool_response>",
                "</tool_response>",
                "<tools>",
                "</tools>",
                '{"name": "f", "arguments": {"x": 1}}',
                "{'name': 'f', 'arguments': {'x': True}}",
                "<function=f>",
                "<parameter=x>",
                "</parameter>",
                "</function>",
                "f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>",
                "#### 3",
                "\n",
                " ",
                "The answer is 3.",
                "The answer is: 4",
                "\\boxed{3}",
                "<<1+2=3>>",
                "<<",
                "word",
                "`",
            ]
        ),
        max_size=9,
    ).map("".join),
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(
    ["system", "developer", "user", "human", "assistant", "gpt", "tool", "function", "observation", "ai"]
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", "b", "call_0", "", None]),
        "name": st.sampled_from(["f", "g"]),
        "arguments": st.sampled_from([{}, "{}", '{"x": 1}', "{'x': None}", '"{}"', None, "no", [1]]) | JUNK,
        "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": JUNK}),
    },
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "reasoning", "x"])},
    optional={"text": TEXTS, "value": TEXTS, "id": st.sampled_from(["a", "b"]), "name": st.just("f")},
)
CONTENT = st.one_of(TEXTS, TEXTS, TEXTS, TEXTS, st.none(), st.lists(PARTS, max_size=3), JUNK)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": ROLES, "content": CONTENT},
        optional={
            "reasoning_content": TEXTS,
            "tool_calls": st.lists(CALLS, max_size=3),
            "function_call": CALLS,
            "tool_call_id": st.sampled_from(["a", "b", "call_0"]),
            "name": st.sampled_from(["f", "g"]),
            "weight": st.sampled_from([0, 1, 0.5, None]),
            "finish_reason": st.sampled_from(["stop", "length"]),
        },
    ),
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "function_call"]), "value": CONTENT}),
)
LISTS = st.lists(MESSAGES | JUNK, max_size=6) | st.lists(MESSAGES, max_size=8)
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "class_": st.sampled_from(
                ["text_observation", "message_action", "api_action", "code_action", "web_observation"]
            )
        },
        optional={
            "content": CONTENT,
            "source": st.sampled_from(["user", "environment", None]),
            "function": st.just("f"),
            "kwargs": JUNK,
            "description": TEXTS,
            "language": st.sampled_from(["python", None]),
        },
    ),
    max_size=5,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "messages": LISTS,
        "conversations": LISTS,
        "content": STEPS | JUNK,
        "trajectory": st.lists(st.fixed_dictionaries({"role": ROLES, "text": JUNK}), max_size=4),
        "chosen": LISTS | TEXTS,
        "rejected": LISTS | TEXTS,
        "prompt": TEXTS | LISTS,
        "response": TEXTS | LISTS,
        "instruction": JUNK,
        "output": TEXTS,
        "history": JUNK,
        "system": JUNK,
        "tools": JUNK
        | st.lists(st.fixed_dictionaries({"name": st.just("f"), "parameters": JUNK}), max_size=2),
        "label": st.booleans(),
        "images": JUNK,
        "id": JUNK,
    },
)


def assert_fixed_point(record: Record) -> None:
    """Normalising what came out changes nothing and repairs nothing."""
    again = normalise({"messages": [m.to_dict() for m in record.messages], "tools": record.tools})
    assert again.messages == record.messages
    assert again.tools == record.tools
    assert again.done == []


@settings(max_examples=400)
@given(row=ROWS | JUNK, text_only=st.booleans())
def test_a_row_is_read_or_refused_and_never_anything_else(row: Any, text_only: bool) -> None:
    record = read(row, text_only=text_only)
    if isinstance(record, str):
        assert record.isidentifier()
        return
    assert any(message.role == "assistant" for message in record.messages)
    json.dumps([m.to_dict() for m in record.messages], allow_nan=False).encode()
    assert all(Message.from_dict(m.to_dict()) == m for m in record.messages)
    record.key()
    if text_only:
        assert all(isinstance(message.content, str) for message in record.messages)
        assert_fixed_point(record)


@settings(max_examples=300)
@given(messages=st.lists(MESSAGES, min_size=1, max_size=8))
def test_conversations_reach_a_fixed_point_at_once(messages: list[Any]) -> None:
    record = read({"messages": [{"role": "user", "content": "Go on."}, *messages]})
    if not isinstance(record, str):
        assert_fixed_point(record)


@settings(max_examples=600)
@given(
    texts=st.lists(TEXTS, min_size=4, max_size=4),
    tools=st.sampled_from([[], [{"name": "f"}]]),
)
def test_texts_full_of_tags_reach_a_fixed_point_at_once(texts: list[str], tools: list[Any]) -> None:
    roles = ("system", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    record = read({"messages": messages, "tools": tools})
    if not isinstance(record, str):
        assert_fixed_point(record)


@settings(max_examples=100)
@given(
    row=ROWS, off=st.sets(st.sampled_from(["system_prompts", "reasoning_tags", "arguments", "call_turns"]))
)
def test_switched_off_passes_raise_nothing_either(row: Any, off: set[str]) -> None:
    assert read(row, repairs=dict.fromkeys(off, False))


def test_long_conversations_and_huge_texts_are_read() -> None:
    many = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(2_000)]
    assert len(normalise({"messages": many}).messages) == 2_000
    huge = "a <tag> " * 500_000
    record = normalise({"prompt": "?", "response": huge})
    assert record.messages[-1].content == huge


@pytest.mark.parametrize(
    "piece",
    [
        "<think>",
        "</think>",
        "<think></think>",
        "<tool_call>",
        "<tool_response>x</tool_response>",
        "<tools>",
        "<tools></tools>",
        "<function=f>",
        "<arg_key>a",
        "#### 3\n",
        "The answer is 3. ",
        "<<1=",
        "<<",
        "\\boxed{",
        " \n",
        "# Tools\n\nYou may call one or more functions ",
    ],
)
def test_repeated_marks_do_not_cost_the_square_of_their_number(piece: str) -> None:
    """A quarter of a million repetitions; the square of that would not end."""
    text = piece * 250_000
    for role in ("system", "user", "assistant"):
        row = {"messages": [{"role": "user", "content": "?"}, {"role": role, "content": text}]}
        row["messages"] += [{"role": "user", "content": "!"}, {"role": "assistant", "content": text + "end"}]
        assert read(row)
