"""Validation: each cause by an example that has nothing else wrong, and warnings that drop nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.data.record import Record, RecordDropped
from trivet.data.validate import CAUSES, WARNINGS, _plainly_fits, declared_schemas, validate
from trivet.types import Message, Part, ToolCall

USER = Message("user", "How warm is it?")
ANSWER = Message("assistant", "Mild.")


def call(*ids: str, name: str = "weather", **arguments: object) -> Message:
    return Message("assistant", "", tool_calls=tuple(ToolCall(name, arguments, id) for id in ids))


def result(id: str | None = None, name: str | None = None) -> Message:
    return Message("tool", "12 degrees", tool_call_id=id, name=name)


def says(text: str, reasoning: str | None = None, train: float | None = None) -> Message:
    return Message("assistant", text, reasoning=reasoning, train=train)


SOUND = {
    "plain": [USER, ANSWER],
    "system": [Message("system", "Be short."), USER, ANSWER],
    "greeting": [ANSWER, USER, ANSWER],
    "two requests": [USER, USER, ANSWER],
    "tools": [USER, call("a", "b"), result("a"), result("b"), ANSWER],
    "results without ids": [USER, call("a", "b"), result(), result(), ANSWER],
    "calls without ids": [USER, call("", ""), result(), result(), ANSWER],
    "ends with a call": [USER, call("a", "b")],
    "ends with a result": [USER, call("a"), result("a")],
    "wrapped result": [USER, call("a"), Message("user", "<tool_response>12</tool_response>"), ANSWER],
    "tags that pair": [USER, says("The tag <think>so</think> is read.")],
    "masked and empty": [USER, says("", train=0.0), USER, ANSWER],
    "result quoted by the user": [Message("user", "<tool_response>"), ANSWER],
    "an image": [USER, Message("assistant", (Part("image", attachment="0f"),))],
    "empty reasoning": [USER, says("Mild.", "")],
}

BROKEN = [
    ("empty_conversation", []),
    ("not_trained", [USER]),
    ("not_trained", [USER, says("Mild.", train=0.0)]),
    ("empty_answer", [USER, says(" \n")]),
    ("empty_answer", [USER, says("", "I should answer")]),
    ("empty_answer", [USER, Message("assistant", (Part("text", ""),))]),
    ("unbalanced_reasoning", [USER, says("<think>so. Mild.")]),
    ("unbalanced_reasoning", [USER, says("so</think>Mild.")]),
    ("unbalanced_reasoning", [USER, says("<think><think>so</think></think>Mild.")]),
    ("unbalanced_reasoning", [USER, says("</think>Mild.<think>")]),
    ("unbalanced_reasoning", [USER, says("Mild.", "so</think>")]),
    ("unbalanced_reasoning", [USER, says("so</thinking>", train=0.0), USER, ANSWER]),
    ("result_in_answer", [USER, says("<tool_response>12</tool_response>Mild.")]),
    ("system_not_first", [USER, Message("system", "Be short."), ANSWER]),
    ("result_without_call", [USER, result("a"), ANSWER]),
    ("result_without_call", [USER, ANSWER, result(), ANSWER]),
    ("result_without_call", [USER, call("a"), result("a"), ANSWER, result("a"), ANSWER]),
    ("result_of_no_call", [USER, call("a"), result("z"), ANSWER]),
    ("result_of_no_call", [USER, call("a"), result(), result(), ANSWER]),
    ("call_answered_twice", [USER, call("a"), result("a"), result("a"), ANSWER]),
    ("results_out_of_order", [USER, call("a", "b"), result("b"), result("a"), ANSWER]),
    ("call_not_answered", [USER, call("a"), ANSWER]),
    ("call_not_answered", [USER, call("a", "b"), result("a"), USER, ANSWER]),
    ("call_not_answered", [USER, call("a", "b"), result("a"), ANSWER]),
    ("call_not_answered", [USER, call("a", "b"), result("a")]),
    ("call_id_repeated", [USER, call("a", "a"), result("a"), result("a"), ANSWER]),
    ("call_id_repeated", [USER, call("a"), result("a"), call("a"), result("a"), ANSWER]),
]


@pytest.mark.parametrize("name", SOUND)
def test_sound_conversations_pass_unchanged(name: str) -> None:
    record = Record(list(SOUND[name]))
    out, caveats = validate(record)
    assert out is record and record.messages == SOUND[name]
    assert caveats == []


@pytest.mark.parametrize(("cause", "messages"), BROKEN)
def test_broken_conversations_are_refused_by_name(cause: str, messages: list[Message]) -> None:
    with pytest.raises(RecordDropped) as caught:
        validate(Record(messages, place="chats.jsonl:7"))
    assert caught.value.cause == cause
    assert str(caught.value).startswith("chats.jsonl:7: ")


def test_the_table_names_every_cause() -> None:
    assert {cause for cause, _ in BROKEN} == set(CAUSES)
    assert all(CAUSES.values()) and all(WARNINGS.values())


def test_a_rejected_answer_must_be_sound() -> None:
    pair = Record([USER, ANSWER], rejected=[says("Cold.")])
    assert validate(pair) == (pair, [])
    for cause, rejected in [
        ("unbalanced_reasoning", [says("Cold.</think>")]),
        ("empty_answer", [says("")]),
        ("not_trained", []),
    ]:
        with pytest.raises(RecordDropped) as caught:
            validate(replace(pair, rejected=rejected))
        assert caught.value.cause == cause


# -- warnings --------------------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


def declared(schema: object, name: str = "weather") -> list[dict]:
    return [{"type": "function", "function": {"name": name, "parameters": schema}}]


def caveats_of(tools: list[dict], message: Message, **options: bool) -> list[str]:
    record = Record([USER, message, result(), ANSWER], tools=tools)
    out, caveats = validate(record, **options)
    assert out is record
    assert {c.cause for c in caveats} <= set(WARNINGS)
    return [c.cause for c in caveats]


def test_arguments_are_compared_with_the_declared_schema() -> None:
    tools = declared(WEATHER)
    assert caveats_of(tools, call("a", city="Oslo", days=2)) == []
    for arguments in ({}, {"city": 3}, {"city": "Oslo", "days": 0}, {"city": "Oslo", "where": 1}):
        assert caveats_of(tools, call("a", **arguments)) == ["arguments_invalid"]
        assert caveats_of(tools, call("a", **arguments), check_arguments=False) == []
    _, (caveat,) = validate(Record([USER, call("a", city=3)], place="f:1", tools=tools))
    assert caveat.text == "f:1: message 1: weather: $.city: 3 is not of type 'string'"


def test_undeclared_tools_are_warned_of_where_tools_are_declared() -> None:
    assert caveats_of(declared(WEATHER, "forecast"), call("a")) == ["tool_undeclared"]
    assert caveats_of([], call("a")) == []


def test_a_result_that_names_another_tool() -> None:
    _, caveats = validate(
        Record([USER, call("a"), result("a", "weather"), call("b"), result("b", "clock"), ANSWER])
    )
    assert [c.cause for c in caveats] == ["result_misnamed"]


def test_a_call_that_ends_its_response_is_kept() -> None:
    messages = [USER, call("a", "b"), USER, ANSWER]
    record, (caveat,) = validate(Record(messages))
    assert record.messages == messages and caveat.cause == "call_without_result"


@pytest.mark.parametrize(
    "schema",
    [
        "an object",
        [1],
        {"type": "dict"},
        {"type": "object", "properties": {"city": {"type": "float"}}},
        {"properties": 3},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"$schema": 7, "type": "object"},
        {"$schema": "http://["},
        {"$id": "http://[", "properties": {"city": {"$ref": "x"}}},
    ],
)
def test_a_schema_of_no_use_is_a_warning_and_stays_offline(schema: object) -> None:
    assert caveats_of(declared(schema), call("a", city="Oslo")) in (["schema_invalid"], [])
    if schema not in ({"$schema": "http://["}, {"$schema": 7, "type": "object"}):
        assert caveats_of(declared(schema), call("a", city="Oslo")) == ["schema_invalid"]


def test_no_schema_allows_everything() -> None:
    assert caveats_of([{"name": "weather"}], call("a", city=1)) == []
    assert caveats_of(declared(None), call("a", city=1)) == []


def test_a_schemas_regular_expressions_are_not_run() -> None:
    slow = {"type": "string", "pattern": "^(a+)+$"}
    schema = {
        "properties": {"city": slow},
        "patternProperties": {"^(a+)+$": {"type": "integer"}},
        "additionalProperties": False,
        "allOf": [{"patternProperties": {"^(b+)+$": {}}}],
        "unevaluatedProperties": False,
    }
    text = "a" * 40 + "!"
    begin = time.monotonic()
    assert caveats_of(declared(schema), call("a", city=text, **{text: 1, "b" * 40 + "!": 2})) == []
    assert time.monotonic() - begin < 60  # run, they would take hours
    # The keyword is no tool parameter of that name:
    grep = {
        "properties": {"pattern": {"type": "string"}},
        "required": ["pattern"],
        "additionalProperties": False,
    }
    assert caveats_of(declared(grep), call("a", pattern="(")) == []
    assert caveats_of(declared(grep), call("a")) == ["arguments_invalid"]


def test_the_three_ways_to_declare_a_tool() -> None:
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"x": 1}}},
        {"name": "b", "parameters": {"x": 2}},
        {"name": "c", "input_schema": {"x": 3}},
        {"name": "d", "parameters": None},
        {"kind": "unknown"},
    ]
    assert declared_schemas(tools) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}, "d": {}}


# -- properties ------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab[(*", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "$ref", "anyOf", "enum", "required", "pattern", "a"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(_JSON, st.dictionaries(st.sampled_from("ab"), _JSON, max_size=2))
def test_no_schema_and_no_arguments_break_the_check(schema: object, arguments: dict) -> None:
    caveats_of(declared(schema), call("x", **arguments))


_PLAIN = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "object"])})
    | st.fixed_dictionaries({"enum": st.just(["a", "b"])})
    | st.just({"description": "anything"}),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array"), "items": inner})
        | st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            },
            optional={
                "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
                "additionalProperties": st.booleans() | inner,
            },
        )
    ),
    max_leaves=6,
)
_VALUE = st.recursive(
    st.sampled_from([None, True, 0, 1, 2.0, "a", "z"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=500)
@given(_PLAIN, _VALUE)
def test_the_short_way_accepts_only_what_the_library_accepts(schema: dict, value: object) -> None:
    if _plainly_fits(value, schema):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


def test_the_short_way_is_taken() -> None:
    assert _plainly_fits({"city": "Oslo"}, {**WEATHER, "properties": {"city": {"type": "string"}}})
    assert not _plainly_fits({"days": True}, {"properties": {"days": {"type": "integer"}}})


_MESSAGE = st.one_of(
    st.just(USER),
    st.builds(
        says, st.sampled_from(["x", "", "<think>", "<think>y</think>"]), train=st.sampled_from([None, 0.0])
    ),
    st.builds(call, st.sampled_from(["a", "b", ""])),
    st.builds(result, st.sampled_from(["a", "b", None])),
    st.just(Message("system", "s")),
)


@given(st.lists(_MESSAGE, max_size=7))
def test_what_passes_is_sound(messages: list[Message]) -> None:
    try:
        validate(Record(messages))
    except RecordDropped:
        return
    assert any(m.role == "assistant" and m.train != 0 for m in messages)
    assert all(m.role != "system" for m in messages[1:])
    for before, message in zip([None, *messages], messages, strict=False):
        if message.role == "tool":
            assert before is not None and (before.tool_calls or before.role == "tool")
        elif before is not None and before.tool_calls:
            assert message.role == "user"  # a call that ended its response
    made = [c.id for m in messages for c in m.tool_calls if c.id]
    assert len(made) == len(set(made))
