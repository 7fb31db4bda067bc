"""Agents' trajectories, tool text, and preference pairs."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.data.normalise import normalise
from trivet.data.record import Record, RecordDropped
from trivet.types import Message, ToolCall

TIDE = {"name": "tide", "parameters": {"type": "object", "properties": {"port": {"type": "string"}}}}
ASK = {"role": "user", "content": "Tide?"}


def refused(row: Any, **how: Any) -> str:
    with pytest.raises(RecordDropped) as error:
        normalise(row, **how)
    return error.value.cause


def say(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(text: str, tools: list[Any] | None = None) -> Message:
    return normalise({"messages": [ASK, say(text)], "tools": tools or []}).messages[1]


# -- tool text -----------------------------------------------------------------------------------


def test_qwen_calls_take_their_types_from_the_tool() -> None:
    text = (
        "I look.\n<tool_call>\n<function=tide>\n<parameter=port>\n42\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n<parameter=note>\ntwo\nlines\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    message = called(text, [TIDE])
    assert message.content == "I look."
    assert message.tool_calls == (
        ToolCall("tide", {"port": "42", "days": [1, 2], "note": "two\nlines"}, "call_0"),
    )


def test_glm_calls_with_and_without_arguments() -> None:
    text = (
        "<think>Look.</think>\n<tool_call>tide\n<arg_key>port</arg_key>\n<arg_value>7</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n<tool_call>tide\n</tool_call>"
    )
    message = called(text, [TIDE])
    assert (message.reasoning, message.content) == ("Look.", "")
    assert [c.arguments for c in message.tool_calls] == [{"port": "7", "n": 7}, {}]


def test_hermes_calls_among_words() -> None:
    first = '<tool_call>{"name": "tide", "arguments": {"port": "A"}}</tool_call>'
    text = f'A\n{first}\nB\n<tool_call>{{"name": "f"}}</tool_call>'
    message = called(text)
    assert message.content == "A\nB"
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("tide", {"port": "A"}), ("f", {})]


def test_words_about_the_tags_stay_words_and_broken_calls_are_refused() -> None:
    words = "Write <tool_call>, then the call, then </tool_call>."
    assert called(words).content == words
    assert (
        refused({"messages": [ASK, say("<tool_call>{oops</tool_call>")], "tools": [TIDE]}) == "bad_tool_call"
    )


def test_a_call_whose_end_is_missing_is_read_or_cut() -> None:
    record = normalise({"messages": [ASK, say('<tool_call>\n{"name": "tide", "arguments": {}}')]})
    assert record.messages[1].tool_calls == (ToolCall("tide", {}, "call_0"),)
    assert record.done == ["tool_call_close_missing"]
    assert refused({"messages": [ASK, say('<tool_call>\n{"name": "ti')]}) == "incomplete"


def test_several_responses_in_one_user_message_are_tool_messages() -> None:
    calls = '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    for tail, roles in (("", ["tool", "tool"]), ("\nAnd now?", ["tool", "tool", "user"])):
        messages = [ASK, say(calls), {"role": "user", "content": results + tail}, say("3")]
        record = normalise({"messages": messages})
        assert [m.role for m in record.messages[2:-1]] == roles
        assert [m.tool_call_id for m in record.messages[2:4]] == ["call_0", "call_1"]


TEMPLATES = {
    "qwen": (
        "You sail.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        "<tools>\n%s\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    "hermes": (
        "You sail. You are provided with function signatures within <tools></tools> XML tags. You may call "
        "one or more functions to assist with the user query. Don't make assumptions about what values to "
        "plug into functions. Here are the available tools: <tools> [%s] </tools> For each function "
        "call return a json object with function name and arguments within <tool_call></tool_call> XML tags "
        "as follows:\n"
        "<tool_call>\n{tool_call}\n</tool_call>"
    ),
    "kimi": "You sail.<|im_system|>tool_declare<|im_middle|>[%s]<|im_end|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_leave_the_system_prompt_with_what_is_said_around_them(name: str) -> None:
    import json

    text = TEMPLATES[name] % json.dumps({"type": "function", "function": TIDE})
    record = normalise({"messages": [{"role": "system", "content": text}, ASK, say("06:12.")]})
    assert record.tools == [TIDE]
    assert record.messages[0] == Message("system", "You sail.")
    assert record.done == ["tools_from_system"]
    bare = text.replace("You sail.", "").strip()
    record = normalise({"messages": [{"role": "system", "content": bare}, ASK, say("06:12.")]})
    assert [m.role for m in record.messages] == ["user", "assistant"]
    assert record.done == ["tools_from_system"]


def _rendered(template: str, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What a real template makes of a conversation, cut at its role marks."""
    import json
    import re

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.add_extension("jinja2.ext.loopcontrols")
    env.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    text = env.from_string(template).render(messages=messages, tools=[{"type": "function", "function": TIDE}])
    if "<|im_start|>" in text:
        found = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL)
    else:
        role = r"<\|(system|user|assistant|observation)\|>"
        found = re.findall(rf"{role}\n?(.*?)(?={role}|\Z)", text, re.DOTALL)
    return [{"role": one[0], "content": one[1]} for one in found]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe"])
def test_what_real_templates_write_is_read_back(name: str) -> None:
    import importlib.util
    from pathlib import Path

    trl = importlib.util.find_spec("trl")
    path = Path(trl.origin).parent / "chat_templates" / f"{name}.jinja" if trl and trl.origin else None
    if path is None or not path.is_file():
        pytest.skip("trl, which carries the template as data, is not installed")
    calls = [{"type": "function", "function": {"name": "tide", "arguments": {"port": port}}} for port in "AB"]
    messages = [
        {"role": "system", "content": "You sail."},
        ASK,
        say("I look.", tool_calls=calls),
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        say("1 and 2."),
    ]
    record = normalise({"messages": _rendered(path.read_text(), messages)})
    assert record.tools == [TIDE]
    assert [(m.role, m.text) for m in record.messages] == [(m["role"], m["content"]) for m in messages]
    assert record.messages[2].tool_calls == (
        ToolCall("tide", {"port": "A"}, "call_0"),
        ToolCall("tide", {"port": "B"}, "call_1"),
    )
    assert [m.tool_call_id for m in record.messages[3:5]] == ["call_0", "call_1"]
    assert record.done == ["tools_from_system"]


def test_a_system_prompt_that_only_names_the_tags_keeps_its_words() -> None:
    text = "Put tools between <tools> and </tools>."
    record = normalise({"messages": [{"role": "system", "content": text}, ASK, say("06:12.")]})
    assert (record.messages[0].content, record.tools) == (text, [])


# -- SWE-agent and the agent-data-protocol ---------------------------------------------------------


def test_swe_agent_masks_are_loss() -> None:
    steps = [
        {"role": "system", "system_prompt": "You code.", "text": None, "mask": False},
        {"role": "user", "system_prompt": None, "text": "Fix it.", "mask": False},
        {"role": "ai", "system_prompt": None, "text": "ls", "mask": False},
        {"role": "user", "system_prompt": None, "text": "a.py", "mask": False},
        {"role": "ai", "system_prompt": None, "text": "Done.", "mask": True},
    ]
    record = normalise({"trajectory": steps, "instance_id": "repo-1"})
    assert [(m.role, m.content, m.train) for m in record.messages] == [
        ("system", "You code.", None),
        ("user", "Fix it.", None),
        ("assistant", "ls", 0.0),
        ("user", "a.py", None),
        ("assistant", "Done.", None),
    ]
    assert record.id == "repo-1"


def step(kind: str, **more: Any) -> dict[str, Any]:
    return {"class_": kind, **more}


def adp(*steps: dict[str, Any], **details: Any) -> Record:
    return normalise({"content": list(steps), "details": details})


SEEN = {"source": "environment", "content": "a.py"}
TASK = step("text_observation", source="user", content="Fix it.")
END = step("message_action", content="<finish> Fixed. </finish>", description="All tests pass.")


def test_actions_the_environment_answers_are_calls() -> None:
    record = adp(
        TASK,
        step("code_action", language="bash", content="ls", description="I look."),
        step("text_observation", **SEEN),
        step("api_action", function="view", kwargs={"path": "a.py"}, description=None),
        step("web_observation", source="environment", html="<p>x</p>", axtree=None),
        END,
        tools='[{"name": "view"}]',
    )
    assert [m.role for m in record.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert record.messages[1] == Message(
        "assistant", "I look.", tool_calls=(ToolCall("bash", {"code": "ls"}, "call_0"),)
    )
    assert record.messages[3].tool_calls == (ToolCall("view", {"path": "a.py"}, "call_1"),)
    assert record.messages[4].tool_call_id == "call_1"
    assert record.messages[5].content == "All tests pass.\n\nFixed."
    assert record.tools == [{"name": "view"}]


def test_code_a_person_answers_is_part_of_the_words() -> None:
    more = step("text_observation", source="user", content="Shorter, please.")
    record = adp(TASK, step("code_action", language="python", content="x = 1", description="So:"), more, END)
    assert record.messages[1] == Message("assistant", "So:\n\n```python\nx = 1\n```")
    assert record.messages[2].role == "user"


def test_where_the_user_plays_the_environment_its_words_are_results() -> None:
    record = adp(
        TASK,
        step("api_action", function="go", kwargs={"to": '"shelf 1"'}, description="There."),
        step("text_observation", source="user", content="You see a cup."),
        step("code_action", language="bash", content="ls", description=""),
        step("text_observation", source="user", content="a.py"),
        END,
    )
    assert [m.role for m in record.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert record.messages[1].tool_calls[0].arguments == {"to": "shelf 1"}
    assert record.done == ["quoted_arguments_unwrapped"]


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (step("image_observation"), "non_text_content"),
        (step("dream"), "bad_message"),
        (step("api_action", function=None), "bad_tool_call"),
        (step("text_observation", source="user"), "bad_content"),
        ({"content": "no class"}, "bad_message"),
    ],
)
def test_bad_steps_are_refused(bad: dict[str, Any], cause: str) -> None:
    assert refused({"content": [TASK, bad, END]}) == cause


# -- preference ----------------------------------------------------------------------------------


def both(chosen: Any, rejected: Any, **more: Any) -> Record:
    return normalise({"chosen": chosen, "rejected": rejected, **more})


def texts(messages: list[Message] | None) -> list[str]:
    return [m.text for m in messages or ()]


def test_a_pair_of_texts_of_messages_and_of_whole_conversations() -> None:
    whole = [[ASK, say("06:12.")], [ASK, say("No.")]]
    for record in (
        both("06:12.", "No.", prompt="Tide?"),
        both(say("06:12."), say("No."), messages=[ASK]),
        both([say("06:12.")], [say("No.")], prompt=[ASK]),
        both(*whole),
        both(*whole, prompt="Tide?"),
        normalise({"chosen_messages": whole[0], "rejected_messages": whole[1]}),
        both("\n\nHuman: Tide?\n\nAssistant: 06:12.", "\n\nHuman: Tide?\n\nAssistant: No."),
    ):
        assert texts(record.messages) == ["Tide?", "06:12."]
        assert texts(record.rejected) == ["No."]


def test_pairs_that_cannot_be_compared_are_refused() -> None:
    same = {"prompt": "?", "chosen": "a", "rejected": "a"}
    assert refused(same) == "same_answers"
    assert refused({**same, "rejected": "<think>it breaks"}) == "incomplete"
    assert refused({**same, "rejected": ""}) == "no_answer"


def test_two_results_in_the_rejected_answer_are_no_reason_to_drop_the_pair() -> None:
    record = both("1\n#### 4", "\\boxed{3}. The answer is: 4", prompt="2+2?")
    assert texts(record.messages)[-1] == "1\n\nThe answer is \\boxed{4}."
    assert texts(record.rejected) == ["\\boxed{3}. The answer is: 4"]
    assert texts(both("\\boxed{4}", "1\n#### 5", prompt="2+2?").rejected) == [
        "1\n\nThe answer is \\boxed{5}."
    ]


def test_the_two_sides_share_no_message_that_is_changed() -> None:
    opening = [
        ASK,
        say("", tool_calls=[{"name": "tide", "arguments": "{}"}]),
        {"role": "tool", "content": "1"},
    ]
    record = both([say("1.")], [say("2.")], messages=opening)
    assert record.messages[1].tool_calls == (ToolCall("tide", {}, "call_0"),)
    assert record.messages[2].tool_call_id == "call_0"
    assert texts(record.rejected) == ["2."]


def test_labels_say_whether_an_answer_is_one_to_imitate() -> None:
    assert len(normalise({"messages": [ASK, say("06:12.")], "label": True}).messages) == 2
    assert refused({"messages": [ASK, say("06:12.")], "label": False}) == "labelled_bad"
