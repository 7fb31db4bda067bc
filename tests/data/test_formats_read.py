"""What is read from each form."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.data.formats.tools import read_tools
from trivet.data.normalise import normalise
from trivet.data.record import Record, RecordDropped
from trivet.types import Message, Part, ToolCall

ASK = {"role": "user", "content": "Tide?"}
TIDE = {"name": "tide", "parameters": {"type": "object", "properties": {"port": {"type": "string"}}}}


def refused(row: Any, **how: Any) -> str:
    with pytest.raises(RecordDropped) as error:
        normalise(row, **how)
    return error.value.cause


def chat(*messages: dict[str, Any], **more: Any) -> Record:
    return normalise({"messages": list(messages), **more})


def answer(*messages: dict[str, Any], **more: Any) -> Message:
    return chat(ASK, *messages, **more).messages[1]


def say(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


# -- OpenAI --------------------------------------------------------------------------------------


def test_tool_calls_null_content_and_ids_that_name_their_results() -> None:
    calls = [
        {"id": "x", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}},
        {"id": "y", "type": "function", "function": {"name": "tide", "arguments": ""}},
    ]
    record = chat(
        ASK,
        say(None, tool_calls=calls),
        {"role": "tool", "tool_call_id": "y", "content": "two"},
        {"role": "tool", "tool_call_id": "x", "content": "one"},
        say("So."),
        tools=[{"type": "function", "function": TIDE}],
    )
    assert record.messages[1] == Message(
        "assistant", tool_calls=(ToolCall("tide", {"port": "Brest"}, "x"), ToolCall("tide", {}, "y"))
    )
    assert [(m.content, m.tool_call_id) for m in record.messages[2:4]] == [("two", "y"), ("one", "x")]
    assert record.tools == [TIDE]
    assert record.done == []


def test_the_older_function_call_and_its_function_role() -> None:
    call = say(None, function_call={"name": "tide", "arguments": "{}"})
    record = chat(ASK, call, {"role": "function", "name": "tide", "content": "06:12"}, say("06:12."))
    assert record.messages[1].tool_calls == (ToolCall("tide", {}, "call_0"),)
    assert record.messages[2] == Message("tool", "06:12", tool_call_id="call_0")
    assert record.done == []


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_beside_the_content(key: str) -> None:
    assert answer(say("06:12.", **{key: "\nLook.\n"})).reasoning == "Look."
    assert answer(say("06:12.", **{key: ""})).reasoning == ""
    assert answer(say("06:12.", **{key: None})).reasoning is None


@pytest.mark.parametrize(
    ("flag", "train"),
    [
        ({"weight": 0}, 0.0),
        ({"weight": 1}, None),
        ({"train": False}, 0.0),
        ({"train": True}, None),
        ({"loss": False}, 0.0),
        ({"loss_weight": 0.5}, 0.5),
        ({"loss_weight": 1.0, "train": False}, 0.0),
        ({"weight": None}, None),
    ],
)
def test_loss_flags(flag: dict[str, Any], train: float | None) -> None:
    assert answer(say("06:12.", **flag)).train == train


@pytest.mark.parametrize("flag", ["yes", -1, float("nan"), [1]])
def test_flags_that_say_nothing_are_refused(flag: Any) -> None:
    assert refused({"messages": [ASK, say("06:12.", weight=flag)]}) == "bad_loss_flag"


def test_flags_of_others_than_assistants_say_nothing() -> None:
    assert chat({**ASK, "loss_weight": 1.0}, say("06:12.")).messages[0].train is None


def test_part_lists_are_joined_by_newlines() -> None:
    assert answer(say([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).content == "a\nb"
    assert answer(say(["a", {"type": "output_text", "text": "b"}])).content == "a\nb"


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video"])
def test_media_in_a_text_run_are_refused_and_else_kept(kind: str) -> None:
    part = {"type": kind, kind: {"url": "pier.png"}, "path": "pier.png"}
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}, say("A pier.")]}
    assert refused(row) == "non_text_content"
    content = normalise(row, text_only=False).messages[0].content
    assert isinstance(content, tuple)
    assert content[1].attachment == "pier.png"


def test_media_in_columns_stand_where_the_text_marks_them() -> None:
    row = {
        "messages": [{"role": "user", "content": "<image>What is it?"}, say("A pier.")],
        "images": ["p.png"],
    }
    assert refused(row) == "non_text_content"
    content = normalise(row, text_only=False).messages[0].content
    assert content == (Part("image", attachment="p.png"), Part("text", "What is it?"))
    assert refused({**row, "images": ["p.png", "q.png"]}, text_only=False) == "bad_media"
    assert normalise({**row, "images": []}).messages[0].content == "<image>What is it?"


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"messages": []}, "empty_conversation"),
        ({"messages": [ASK, {"role": "narrator", "content": "x"}]}, "unknown_role"),
        ({"messages": [ASK, {"content": "x"}]}, "bad_message"),
        ({"messages": [ASK, 5]}, "bad_message"),
        ({"messages": [ASK, say(5)]}, "bad_content"),
        ({"messages": [ASK, say([{"type": "hologram"}])]}, "unknown_part"),
        ({"messages": [ASK, say("x", tool_calls=[{"id": "a"}])]}, "bad_tool_call"),
        ({"messages": [ASK, say("x", tool_calls=5)]}, "bad_tool_call"),
        ({"messages": [ASK, say("x", tool_calls=[{"name": "f", "arguments": "{oops"}])]}, "bad_arguments"),
        ({"messages": [ASK, say("x", tool_calls=[{"name": "f", "arguments": "[1]"}])]}, "bad_arguments"),
        (
            {"messages": [ASK, say("x", tool_calls=[{"name": "f", "arguments": {"a": float("nan")}}])]},
            "bad_number",
        ),
        ({"messages": [ASK, say("half \ud83d")]}, "broken_unicode"),
        ({"messages": [ASK, say("x")], "tools": [{"description": "no name"}]}, "bad_tools"),
        ({"messages": [ASK, say("x")], "tools": "{oops"}, "bad_tools"),
        ({"messages": [ASK]}, "no_answer"),
    ],
)
def test_bad_rows_are_refused_by_cause(row: dict[str, Any], cause: str) -> None:
    assert refused(row) == cause


def test_values_nested_too_deep_are_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert (
        refused({"messages": [ASK, say("x", tool_calls=[{"name": "f", "arguments": {"a": deep}}])]})
        == "too_deep"
    )


def test_messages_as_json_text_and_the_rows_own_id() -> None:
    text = '[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]'
    record = normalise({"messages": text, "id": 7, "category": "sea"})
    assert ([m.content for m in record.messages], record.id, record.category) == (["?", "!"], "7", "sea")
    assert refused({"messages": '[{"role": '}) == "bad_message"


def test_words_then_calls_in_messages_of_their_own_are_one_turn() -> None:
    call = say("", tool_calls=[{"id": "a", "name": "tide", "arguments": {}}])
    more = say("", tool_calls=[{"id": "b", "name": "tide", "arguments": {}}])
    record = chat(ASK, say("Let me look."), call, more, say("Done."))
    assert len(record.messages) == 3
    assert record.messages[1].content == "Let me look."
    assert [c.id for c in record.messages[1].tool_calls] == ["a", "b"]
    assert record.done == ["call_turns_joined"]


# -- tools ---------------------------------------------------------------------------------------


def test_tools_of_every_writing_are_bare_functions() -> None:
    wrapped = {"type": "function", "function": TIDE}
    schema = {"name": "tide", "input_schema": TIDE["parameters"]}
    text = str(TIDE)  # a Python literal
    for given in ([TIDE], [wrapped], [schema], TIDE, text, [text]):
        assert read_tools(given) == [TIDE]
    assert read_tools(None) == read_tools("") == read_tools([]) == []


def test_nulls_that_columnar_files_fill_in_go_and_meant_ones_stay() -> None:
    given = {
        "name": "f",
        "strict": None,
        "parameters": {"properties": {"a": {"type": "string", "enum": None, "default": None}, "b": None}},
    }
    assert read_tools([given]) == [
        {"name": "f", "parameters": {"properties": {"a": {"type": "string", "default": None}}}}
    ]


# -- ShareGPT, Alpaca, pairs ---------------------------------------------------------------------


def gpt(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def test_sharegpt_calls_side_by_side_are_one_message() -> None:
    turns = [
        gpt("human", "Tides?"),
        gpt("function_call", '{"name": "tide", "arguments": {"port": "A"}}'),
        gpt("function_call", '[{"name": "tide", "arguments": {"port": "B"}}]'),
        gpt("observation", "1"),
        gpt("observation", "2"),
        gpt("gpt", "1 and 2."),
    ]
    record = normalise({"conversations": turns, "system": "Be brief."})
    assert [m.role for m in record.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [c.id for c in record.messages[2].tool_calls] == ["call_0", "call_1"]
    assert [m.tool_call_id for m in record.messages[3:5]] == ["call_0", "call_1"]


def test_a_call_in_the_text_form_of_its_prompt_stays_text() -> None:
    call = "<function=run>\n<parameter=code>\nls\n</parameter>\n</function>"
    turns = [gpt("human", "List."), gpt("gpt", "I look."), gpt("function_call", call), gpt("human", "a b")]
    record = normalise({"conversations": [*turns, gpt("gpt", "a and b.")]})
    assert record.messages[1] == Message("assistant", f"I look.\n\n{call}")


def test_a_function_call_that_is_none_is_refused() -> None:
    turns = [
        gpt("human", "?"),
        gpt("function_call", "tide of Brest"),
        gpt("observation", "1"),
        gpt("gpt", "1"),
    ]
    assert refused({"conversations": turns}) == "bad_tool_call"


def test_alpaca_without_input_and_with_bad_history() -> None:
    record = normalise({"instruction": "Name a knot.", "input": "", "output": "Bowline."})
    assert [m.content for m in record.messages] == ["Name a knot.", "Bowline."]
    assert refused({"instruction": "a", "output": "b", "history": ["c"]}) == "bad_message"
    assert refused({"instruction": "a", "output": ""}) == "no_answer"


def test_pairs_of_text_and_messages_with_reasoning_beside_them() -> None:
    record = normalise({"problem": "2+2?", "solution": "It is 4.", "answer": "4", "reasoning": "Add."})
    assert record.messages[1] == Message("assistant", "It is 4.", reasoning="Add.")
    record = normalise(
        {"prompt": [{"role": "system", "content": "Brief."}, ASK], "completion": [say("06:12.")]}
    )
    assert [m.role for m in record.messages] == ["system", "user", "assistant"]
    assert refused({"prompt": "?", "response": "cut", "finish_reason": "length"}) == "incomplete"


# -- Anthropic, LLaMA-Factory ----------------------------------------------------------------------


def test_anthropic_tools_errors_and_redacted_thoughts() -> None:
    row = {
        "system": "Be brief.",
        "tools": [{"name": "tide", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Tide?"},
            say(
                [{"type": "redacted_thinking", "data": "xx"}, {"type": "tool_use", "id": "t", "name": "tide"}]
            ),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "06:12"}]},
            say("06:12."),
        ],
    }
    record = normalise(row)
    assert [m.role for m in record.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert record.messages[2].reasoning == ""
    assert record.messages[3] == Message("tool", "06:12", tool_call_id="t")
    assert record.tools == [{"name": "tide", "parameters": {"type": "object"}}]


def test_llamafactory_parts_of_reasoning_and_calls() -> None:
    parts = [
        {"type": "reasoning", "value": "Two ports."},
        {"type": "tool_call", "value": '{"name": "tide", "arguments": {"port": "A"}}'},
        {"type": "tool_call", "value": '{"name": "tide", "arguments": {"port": "B"}}'},
    ]
    results = [{"role": "tool", "content": [{"type": "text", "value": text}]} for text in "12"]
    record = chat(ASK, say(parts, loss_weight=1.0), *results, say([{"type": "text", "value": "1, 2."}]))
    assert record.messages[1].reasoning == "Two ports."
    assert [c.arguments for c in record.messages[1].tool_calls] == [{"port": "A"}, {"port": "B"}]
    assert [m.tool_call_id for m in record.messages[2:4]] == ["call_0", "call_1"]
