"""Which form a row has, by invented rows of every form."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.data.formats import FORMATS, detect, detect_row
from trivet.data.formats.mapping import MappingError, check_mapping
from trivet.data.normalise import normalise
from trivet.data.record import RecordDropped

ASK = {"role": "user", "content": "Depth at the quay?"}
SAY = {"role": "assistant", "content": "Four metres."}
ROWS: dict[str, dict[str, Any]] = {
    "openai": {"messages": [ASK, SAY]},
    "sharegpt": {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    "alpaca": {"instruction": "Name a knot.", "input": "", "output": "Bowline."},
    "anthropic": {
        "messages": [
            ASK,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]},
            SAY,
        ]
    },
    "llamafactory": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "?"}], "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "text", "value": "!"}], "loss_weight": 1.0},
        ]
    },
    "prompt_response": {"question": "Name a knot.", "answer": "Bowline."},
    "preference": {"prompt": "Name a knot.", "chosen": "Bowline.", "rejected": "No."},
    "swe_agent": {"trajectory": [{"role": "user", "text": "Fix it."}, {"role": "ai", "text": "ls"}]},
    "agent_data_protocol": {
        "content": [
            {"class_": "text_observation", "content": "Fix it.", "source": "user"},
            {"class_": "message_action", "content": "Done.", "description": None},
        ]
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_every_form_is_known_and_read(name: str) -> None:
    assert detect_row(ROWS[name]) == name
    assert detect([ROWS[name]] * 3) == name
    record = normalise(ROWS[name], source="s", place="p:1")
    assert record.messages[-1].role == "assistant"
    assert record.done == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "qwen"),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "glm"),
        ("<think>Hm.</think>Yes.", "deepseek"),
        ("Yes.", "openai"),
    ],
)
def test_what_the_text_holds_names_the_file(text: str, name: str) -> None:
    plain = {"messages": [ASK, SAY]}
    assert detect([plain, {"messages": [ASK, {"role": "assistant", "content": text}]}, plain]) == name
    assert name in FORMATS


def test_a_mixed_file_is_named_for_most_and_read_by_row() -> None:
    rows = [ROWS["sharegpt"], ROWS["sharegpt"], ROWS["alpaca"]]
    assert detect(rows) == "sharegpt"
    assert [len(normalise(row, format="sharegpt").messages) for row in rows] == [2, 2, 2]


def test_rows_of_no_form_are_refused_naming_their_keys() -> None:
    assert detect([{"a": 1}, 5]) == "unknown"
    with pytest.raises(RecordDropped, match="alpha, beta") as refused:
        detect_row({"alpha": 1, "beta": 2})
    assert refused.value.cause == "unknown_format"
    with pytest.raises(RecordDropped, match="'prompt' is a prompt") as refused:
        detect_row({"prompt": "Why?", "uid": 3})
    assert refused.value.cause == "no_answer"
    with pytest.raises(RecordDropped) as refused:
        detect_row([1])
    assert refused.value.cause == "not_an_object"


def test_an_unknown_name_is_the_callers_error() -> None:
    with pytest.raises(KeyError):
        normalise(ROWS["openai"], format="opnai")


def test_a_mapping_reads_other_columns_keys_and_words() -> None:
    row = {
        "log": {"turns": [{"who": "customer", "said": "Open?"}, {"who": "clerk", "said": "Till six."}]},
        "kind": "service",
        "prompt": "not this",
    }
    mapping = {
        "messages": "log.turns",
        "message.role": "who",
        "message.content": "said",
        "role.user": "customer",
        "role.assistant": "clerk",
        "category": "kind",
    }
    check_mapping(mapping)
    record = normalise(row, mapping=mapping)
    assert [(m.role, m.content) for m in record.messages] == [("user", "Open?"), ("assistant", "Till six.")]
    assert record.category == "service"


def test_a_mapping_of_prompt_and_response_reads_numbers_as_text() -> None:
    record = normalise({"Q": "2+2?", "A": 4}, mapping={"prompt": "Q", "response": "A"})
    assert [m.content for m in record.messages] == ["2+2?", "4"]
    record = normalise(
        {"Q": "2+2?", "A": 4, "text": "x"}, mapping={"prompt": "Q", "response": "A", "id": "A"}
    )
    assert record.id == "4"


def test_a_mapping_of_the_side_columns_leaves_the_rest_to_detection() -> None:
    record = normalise({**ROWS["openai"], "topic": "depth"}, mapping={"category": "topic"})
    assert (len(record.messages), record.category) == (2, "depth")


def test_a_missing_column_and_an_unknown_field_are_said() -> None:
    with pytest.raises(RecordDropped, match=r"log\.turns") as refused:
        normalise({"a": 1}, mapping={"messages": "log.turns"})
    assert refused.value.cause == "missing_column"
    with pytest.raises(MappingError, match="did you mean 'messages'"):
        check_mapping({"mesages": "x"})
    with pytest.raises(MappingError, match="named by text"):
        check_mapping({"messages": 3})  # type: ignore[dict-item]
