"""Each repair: what it changes, what it leaves, what it is counted as, and what happens without it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.formats.literal import NotReadable, read_value
from trivet.data.normalise import normalise
from trivet.data.record import Record, RecordDropped
from trivet.data.repair import REPAIRS, switched_off
from trivet.data.repair.answers import Conflict, last_box, same_answer, settle

ASK = {"role": "user", "content": "Tide?"}


def say(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat(*messages: dict[str, Any], off: str = "", **more: Any) -> Record:
    return normalise({"messages": list(messages), **more}, repairs={off: False} if off else None)


def refused(*messages: dict[str, Any], off: str = "") -> str:
    with pytest.raises(RecordDropped) as error:
        chat(*messages, off=off)
    return error.value.cause


def test_every_pass_has_a_name_a_text_and_a_switch() -> None:
    for name, run in REPAIRS.items():
        assert run.__doc__, name
        assert switched_off({name: False}) == {name}
        assert switched_off({name: True}) == frozenset()
    with pytest.raises(KeyError, match="did you mean 'final_turn'"):
        switched_off({"final_turns": False})


# -- system prompts ------------------------------------------------------------------------------


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def test_system_prompts_merge_and_empty_ones_go() -> None:
    record = chat(system(" A\n"), system(""), {"role": "developer", "content": "B"}, ASK, say("1"))
    assert [m.content for m in record.messages] == ["A\n\nB", "Tide?", "1"]
    assert record.done == ["system_empty_removed", "system_merged"]
    assert chat(system("A"), ASK, say("1"), system="A").messages[0].content == "A"
    assert chat(ASK, say("1"), system="").messages[0].role == "user"


def test_a_system_prompt_in_the_middle_stays_there() -> None:
    record = chat(ASK, say("1"), system("Now in metres."), ASK, say("2"))
    assert [m.role for m in record.messages][2] == "system"
    assert record.done == []


def test_without_the_pass_system_prompts_stay_as_they_are() -> None:
    record = chat(system("A "), system("B"), ASK, say("1"), off="system_prompts")
    assert [m.content for m in record.messages][:2] == ["A ", "B"]
    assert record.done == []


# -- reasoning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "done"),
    [
        ("<think>\nHm.\n</think>\n\nSix.", "Hm.", "Six.", []),
        ("\n<think>Hm.</think>Six.", "Hm.", "Six.", []),
        ("<think>\n\n</think>\n\nSix.", "", "Six.", []),
        ("Six.", None, "Six.", []),
        ("Hm.\n</think>\n\nSix.", "Hm.", "Six.", ["reasoning_open_missing"]),
        ("</think>Six.", "", "Six.", ["reasoning_open_missing"]),
        ("<think><think>Hm.</think></think>Six.", "Hm.", "Six.", ["reasoning_tags_folded"]),
        ("<think>\n<think>\nHm.</think>Six.", "Hm.", "Six.", ["reasoning_tags_folded"]),
        ("<think>Hm.</think></think>Six.", "Hm.", "Six.", ["reasoning_tags_folded"]),
        ("<think>a <think>b</think> c</think>Six.", "a b c", "Six.", ["reasoning_tags_folded"]),
        ("<think>a</think>\n<think>b</think>Six.", "a\nb", "Six.", ["reasoning_tags_folded"]),
        ("<think></think><think>b</think>Six.", "b", "Six.", ["reasoning_tags_folded"]),
        ("Write `</think>` last.", None, "Write `</think>` last.", []),
        ("Between <think> and </think>.", None, "Between <think> and </think>.", []),
    ],
)
def test_reasoning_tags(text: str, reasoning: str | None, content: str, done: list[str]) -> None:
    record = chat(ASK, say(text))
    message = record.messages[1]
    assert (message.reasoning, message.content, record.done) == (reasoning, content, done)


@pytest.mark.parametrize(
    ("given", "text", "reasoning"),
    [
        ("Hm.", "<think>Hm.</think>Six.", "Hm."),
        ("Hm.", "Hm.</think>Six.", "Hm."),
        ("", "<think>Hm.</think>Six.", "Hm."),
        ("Hm.", "<think></think>Six.", "Hm."),
        ("a", "<think>b</think>Six.", "a\nb"),
    ],
)
def test_reasoning_beside_and_inside_the_text_is_one(given: str, text: str, reasoning: str) -> None:
    message = chat(ASK, say(text, reasoning_content=given)).messages[1]
    assert (message.reasoning, message.content) == (reasoning, "Six.")


def test_an_unclosed_block_ends_at_a_call() -> None:
    record = chat(ASK, say('<think>Look.\n<tool_call>{"name": "f"}</tool_call>'))
    assert (record.messages[1].reasoning, record.messages[1].content) == ("Look.", "")
    assert record.messages[1].tool_calls[0].name == "f"
    assert record.done == ["reasoning_close_missing"]
    record = chat(ASK, say("<think>Look.", tool_calls=[{"id": "a", "name": "f"}]))
    assert (record.messages[1].reasoning, record.messages[1].content) == ("Look.", "")


def test_an_unclosed_block_in_the_middle_is_not_trained() -> None:
    record = chat(ASK, say("<think>Hm"), ASK, say("Six."))
    assert (record.messages[1].reasoning, record.messages[1].content) == ("Hm", "")
    assert [m.train for m in record.messages] == [None, 0.0, None, None]
    assert record.done == ["reasoning_close_missing"]


def test_thoughts_of_calls_are_no_calls() -> None:
    message = chat(ASK, say('<think>maybe <tool_call>{"name": "f"}</tool_call></think>Six.')).messages[1]
    assert message.tool_calls == ()


def test_without_the_pass_only_whole_blocks_are_read() -> None:
    assert chat(ASK, say("<think>Hm.</think>Six."), off="reasoning_tags").messages[1].reasoning == "Hm."
    for text in ("Hm.</think>Six.", "<think><think>Hm.</think>Six."):
        record = chat(ASK, say(text), off="reasoning_tags")
        assert (record.messages[1].content, record.done) == (text, [])


# -- the end -------------------------------------------------------------------------------------

CALL = say("", tool_calls=[{"id": "a", "name": "f", "arguments": {}}])
RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}


@pytest.mark.parametrize(
    "tail",
    [
        [ASK],
        [system("Go on.")],
        [ASK, say("")],
        [ASK, say(" \n")],
        [ASK, say("<think>Hm")],
        [ASK, say("<think>Hm</think>")],
        [ASK, say("Six and a", finish_reason="length")],
        [ASK, say("Six and a", stop_reason="max_tokens")],
    ],
)
def test_what_breaks_off_at_the_end_goes_with_its_question(tail: list[dict[str, Any]]) -> None:
    record = chat(ASK, say("Six."), *tail)
    assert [m.content for m in record.messages] == ["Tide?", "Six."]
    assert record.done == ["incomplete_final_turn_removed"]


def test_a_call_may_be_last_and_a_result_may_not() -> None:
    assert chat(ASK, CALL).done == []
    record = chat(ASK, CALL, RESULT)
    assert (len(record.messages), record.done) == (2, ["incomplete_final_turn_removed"])


def test_nothing_finished_is_a_reason() -> None:
    assert refused(ASK, say("<think>Hm")) == "incomplete"
    assert refused(ASK, say("")) == "no_answer"
    assert refused(ASK) == "no_answer"
    assert refused(ASK, off="final_turn") == "no_answer"


def test_turns_that_break_off_in_the_middle_are_not_trained() -> None:
    record = chat(ASK, say("Six and a", finish_reason="length"), ASK, say(""), ASK, say("Six."))
    assert [m.train for m in record.messages if m.role == "assistant"] == [0.0, 0.0, None]
    assert record.done == ["truncated_turn_masked", "empty_turn_masked"]


def test_without_the_pass_the_end_stays() -> None:
    assert len(chat(ASK, say("Six."), ASK, off="final_turn").messages) == 3


def test_a_finish_reason_of_the_row_is_its_last_messages() -> None:
    with pytest.raises(RecordDropped) as error:
        chat(ASK, say("Six and a"), finish_reason="length")
    assert error.value.cause == "incomplete"


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "read", "done"),
    [
        ({"a": 1}, {"a": 1}, []),
        ('{"a": 1}', {"a": 1}, []),
        (None, {}, []),
        ("", {}, []),
        (
            "{'a': True, 'b': None, 'c': (1, 2)}",
            {"a": True, "b": None, "c": [1, 2]},
            ["tool_call_literal_repaired"],
        ),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}, ["tool_call_literal_repaired"]),
        ('"{\\"a\\": 1}"', {"a": 1}, ["arguments_encoded_twice"]),
    ],
)
def test_arguments_are_objects(arguments: Any, read: Any, done: list[str]) -> None:
    record = chat(ASK, say("", tool_calls=[{"id": "a", "name": "f", "arguments": arguments}]))
    assert (record.messages[1].tool_calls[0].arguments, record.done) == (read, done)


@pytest.mark.parametrize(
    "arguments", ["{oops", "[1]", 5, [1], "{'a': {1}}", "{'a': b'x'}", "f()", '{"a": NaN}']
)
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    assert (
        refused(ASK, say("", tool_calls=[{"id": "a", "name": "f", "arguments": arguments}]))
        == "bad_arguments"
    )


def test_without_the_pass_literals_are_refused_and_text_is_read() -> None:
    for arguments in ("{'a': 1}", '"{}"'):
        call = {"id": "a", "name": "f", "arguments": arguments}
        assert refused(ASK, say("", tool_calls=[call]), off="arguments") == "bad_arguments"
    call = {"id": "a", "name": "f", "arguments": '{"a": 1}'}
    assert chat(ASK, say("", tool_calls=[call]), off="arguments").messages[1].tool_calls[0].arguments == {
        "a": 1
    }
    text = "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"
    assert chat(ASK, say(text), off="arguments").messages[1].content == text


def call(name: str, given: str | None = None) -> dict[str, Any]:
    return {"name": name, "arguments": {}} | ({"id": given} if given else {})


def result(text: str, given: str | None = None, name: str | None = None) -> dict[str, Any]:
    more = {"tool_call_id": given, "name": name}
    return {"role": "tool", "content": text} | {k: v for k, v in more.items() if v}


def test_missing_ids_are_counted_over_the_conversation() -> None:
    record = chat(
        ASK,
        say("", tool_calls=[call("f"), call("g", "call_0"), call("h")]),
        result("g's", "call_0"),
        result("h's", name="h"),
        result("f's"),
        say("", tool_calls=[call("f")]),
        result("again"),
        say("Six."),
    )
    calls = [c.id for m in record.messages for c in m.tool_calls]
    assert calls == ["call_1", "call_0", "call_2", "call_3"]  # call_0 is taken
    assert [m.tool_call_id for m in record.messages if m.role == "tool"] == [
        "call_0",
        "call_2",
        "call_1",
        "call_3",
    ]
    assert record.done == ["call_ids_added"]


def test_a_second_call_of_an_id_gets_its_own() -> None:
    once = [say("", tool_calls=[call("f", "x")]), result("1", "x")]
    record = chat(ASK, *once, *once, say("Six."))
    assert [m.tool_call_id for m in record.messages if m.role == "tool"] == ["x", "call_0"]
    assert record.done == ["call_ids_doubled"]


def test_results_that_answer_nothing_are_left() -> None:
    record = chat(ASK, result("1", "lost", "f"), result("2"), say("Six."))
    assert [(m.tool_call_id, m.name) for m in record.messages[1:3]] == [("lost", "f"), (None, None)]


def test_without_the_pass_ids_stay_missing() -> None:
    record = chat(ASK, say("", tool_calls=[call("f")]), result("1"), say("Six."), off="call_ids")
    assert (record.messages[1].tool_calls[0].id, record.messages[2].tool_call_id) == ("", None)


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("So 18.\n#### 18", "So 18.\n\nThe answer is \\boxed{18}."),
        ("#### 1,080", "The answer is \\boxed{1,080}."),
        ("x\n#### 18\nThe answer is: 18", "x\n\nThe answer is \\boxed{18}."),
        ("x\nThe answer is 3.\n#### 3", "x\n\nThe answer is \\boxed{3}."),
        ("so \\boxed{23}. The answer is: 23", "so \\boxed{23}."),
        ("so \\boxed{23}.\n#### 23.0", "so \\boxed{23}."),
        ("so $\\boxed{\\frac{1}{2}}$.\nThe answer is: 0.5", "so $\\boxed{\\frac{1}{2}}$."),
        ("so \\boxed{4}.\n\nThe answer is \\boxed{4}.", "so \\boxed{4}."),
        ("w\n\nThe answer is \\boxed{18}.\n#### 18", "w\n\nThe answer is \\boxed{18}."),
    ],
)
def test_one_statement_of_the_result_is_left(text: str, settled: str) -> None:
    assert settle(text)[0] == settled
    assert settle(settled) == (settled, "")


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        "The answer is \\boxed{4}.",
        "Two cases: \\boxed{1} and \\boxed{2}",
        "Notes\n#### References",
        "#### One\ntext\n#### Step 2",
        "#### {3",
        "#### a result in many words, which is no number at all",
        "\\boxed{x+1}. The answer is: 1+x",
        "We see that the answer is 4, and so \\boxed{4}",
        "a #### 3",
    ],
)
def test_what_is_no_second_statement_is_left(text: str) -> None:
    assert settle(text) == (text, "")


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{3}\n#### 4",
        "\\boxed{B}. The answer is: C",
        "#### 3\nThe answer is: 4",
        "\\boxed{yes}\n#### no",
    ],
)
def test_two_results_are_a_conflict(text: str) -> None:
    with pytest.raises(Conflict):
        settle(text)
    assert refused(ASK, say(text)) == "answer_conflict"
    assert chat(ASK, say(text), off="answer_suffixes").messages[1].content == text


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("6*3=<<6*3=18>>18", "6*3=18"),
        ("<<1=<<2+2=2>>1>>", ""),
        ("x <<y>> z", "x <<y>> z"),
        ("cout << 3 >> x", "cout << 3 >> x"),
    ],
)
def test_calculator_marks(text: str, bare: str) -> None:
    record = chat(ASK, say(f"a {text} b"))
    assert record.messages[1].content == f"a {bare} b"
    assert record.done == (["calculator_marks_removed"] if bare != text else [])
    assert chat(ASK, say(f"a {text} b"), off="calculator_marks").messages[1].content == f"a {text} b"


def test_marks_alone_are_not_emptied() -> None:
    assert chat(ASK, say("<<1+1=2>>")).messages[1].content == "<<1+1=2>>"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("3", "3.0", True),
        ("1,080", "1080", True),
        ("\\frac12", "0.5", True),
        ("\\dfrac{1}{2}", "1/2", True),
        ("x = 3", "3", True),
        ("3\\text{ cm}", "3", True),
        ("10\\%", "10", True),
        ("-3", "3", False),
        ("B", "(B)", True),
        ("B", "C", False),
        ("B", "3", None),
        ("a+b", "b+a", None),
        ("1/0", "2", None),
    ],
)
def test_same_answer(one: str, other: str, same: bool | None) -> None:
    assert same_answer(one, other) is same
    assert same_answer(other, one) is same


FRACTIONS = st.fractions(-(10**20), 10**20, max_denominator=1000)


@given(FRACTIONS, FRACTIONS)
def test_same_answer_of_fractions_is_their_equality(one: Any, other: Any) -> None:
    def tex(x: Any) -> str:
        sign = "-" if x < 0 else ""
        return f"{sign}\\frac{{{abs(x.numerator)}}}{{{x.denominator}}}"

    assert same_answer(tex(one), f"{other.numerator}/{other.denominator}") is (one == other)


def test_last_box() -> None:
    assert last_box("\\boxed{1} and \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert last_box("\\boxed{1") is last_box("no box") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_python_writing_is_read_as_what_it_stands_for(value: Any) -> None:
    assert read_value(repr(value))[0] == value


def test_code_is_not_run_and_long_or_deep_text_is_refused() -> None:
    for text in (
        "[print(1)]",
        "{'a': open('x')}",
        "(" * 5_000,
        "[" * 100_000,
        "{'a': '" + "x" * 300_000 + "'}",
    ):
        with pytest.raises(NotReadable):
            read_value(text)
