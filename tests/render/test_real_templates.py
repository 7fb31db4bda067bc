"""Templates of real families, as the trl package carries them, over bytes: ids and masks of conversations."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.render import RenderError, get_renderer, supervised_tokens
from trivet.render.template import ChatTemplate
from trivet.types import Message, ToolCall

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"
FAMILIES = {  # template -> (renderers, arguments, marks that end a turn, which thoughts and tools it writes)
    "qwen3": (("qwen3",), {}, ("<|im_end|>",), "both"),
    "qwen3_5_think": (("qwen3.5",), {}, ("<|im_end|>",), "both"),
    "glm4moe": (("glm-4.5", "template"), {}, ("<|user|>", "<|observation|>"), "both"),
    "llama3_1": (("llama-3", "template"), {"date_string": "26 Jul 2024"}, ("<|eot_id|>",), "tools"),
    "deepseekv3": (("template",), {}, ("<｜end▁of▁sentence｜>",), "one call"),
    "gptoss": (("template",), {"strftime_now": "2026-01-01"}, ("<|return|>", "<|end|>", "<|call|>"), "final"),
    "qwen2_5": (("chatml", "template"), {}, ("<|im_end|>",), "tools"),
    "nemotron_3_nano": (("nemotron-3",), {}, ("<|im_end|>",), "both"),
}
CASES = [(name, kind) for name, (kinds, *_) in FAMILIES.items() for kind in kinds]
WORDY = "think|tool_call|tool_response|arg_key|arg_value"
MARKS = re.compile(rf"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|\[gMASK\]|<sop>|</?(?:{WORDY})>")
MORE = (
    "<|endoftext|><|end_of_text|><|eom_id|><|python_tag|><|im_start|><|im_end|><|user|><|observation|>"
    "<|eot_id|><|begin_of_text|>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
]


@cache
def tokenizer(name: str) -> Any:
    """Bytes, and every mark that the template spells as one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    source = (FOLDER / f"{name}.jinja").read_text()
    found = {*MARKS.findall(source), *MARKS.findall(MORE), "<｜end▁of▁sentence｜>", "<think>", "</think>"}
    plain = sorted(mark for mark in found if re.fullmatch(rf"</?(?:{WORDY})>", mark))
    special = sorted(found - set(plain))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.add_tokens(plain)  # one token each, but not special: as these families have them
    marks = FAMILIES[name][2]
    made.eos_token = marks[0] if name not in ("glm4moe",) else "<|endoftext|>"
    made.bos_token = "<｜begin▁of▁sentence｜>" if name == "deepseekv3" else "<|begin_of_text|>"
    made.chat_template = source
    return made


@cache
def tools_of(name: str, kind: str) -> tuple[Any, Any, ChatTemplate]:
    args = FAMILIES[name][1]
    return tokenizer(name), get_renderer(tokenizer(name), kind, args), ChatTemplate(tokenizer(name), args)


WORDS = st.text("abz 0é9.?", min_size=1, max_size=8).map(str.strip).filter(bool)


@st.composite
def rounds(draw: st.DrawFn, writes: str) -> list[Message]:
    """A conversation whose last round is trained; earlier ones are context, as a build leaves them."""
    out = [Message("system", draw(WORDS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        out += [Message("user", draw(WORDS)), Message("assistant", draw(WORDS), train=0.0)]
    out.append(Message("user", draw(WORDS)))
    thinks = writes in ("both", "final") and draw(st.booleans())
    if writes != "final" or not thinks:
        for _ in range(draw(st.integers(0, 1 if writes == "one call" else 2))):
            call = ToolCall("add", {"n": draw(st.integers(0, 99))}, "call_0")
            thought = draw(WORDS) if thinks else None
            out.append(Message("assistant", "", reasoning=thought, tool_calls=(call,)))
            out.append(Message("tool", draw(WORDS), tool_call_id="call_0", name="add"))
    out.append(Message("assistant", draw(WORDS), reasoning=draw(WORDS) if thinks else None))
    return out


@pytest.mark.parametrize(("name", "kind"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_ids_are_the_templates_and_masks_the_assistants(name: str, kind: str, data: st.DataObject) -> None:
    tok, renderer, official = tools_of(name, kind)
    _, _, marks, writes = FAMILIES[name]
    messages = data.draw(rounds(writes))
    tools = TOOLS if any(m.tool_calls for m in messages) else []
    ids_T, train_T = supervised_tokens(renderer, messages, tools=tools)
    own = official.ids(messages, tools)
    closed = ids_T[len(own) :].tolist()
    assert ids_T[: len(own)].tolist() == own
    assert [tok.decode(i) for i in closed] in ([], [marks[0]])  # GLM leaves the last turn open

    runs = np.split(np.arange(len(ids_T)), np.flatnonzero(np.diff(train_T > 0)) + 1)
    trained = [tok.decode(ids_T[run]) for run in runs if train_T[run[0]] > 0]
    context = "".join(tok.decode(ids_T[run]) for run in runs if not train_T[run[0]])
    answers = [m for m in messages if m.role == "assistant" and m.train != 0]
    assert len(trained) == len(answers)
    for text, message in zip(trained, answers, strict=True):
        assert text.endswith(marks)
        body = text[: max(text.rfind(mark) for mark in marks if text.endswith(mark))]
        assert not body.endswith("\n") or message.text == ""
        for part in (message.text, message.reasoning or "", *(c.name for c in message.tool_calls)):
            assert part in body
        if message.reasoning is None:
            assert "<think>" not in text and "</think>" not in text  # the template's empty block is nobody's
        assert "<|start|>user" not in text and "tool_response" not in text
    for message in messages:
        if message.role != "assistant" or message.train == 0:
            assert message.text in context


def test_a_turn_that_is_written_otherwise_when_it_is_last_is_refused() -> None:
    """Qwen3 puts an empty thought before a last answer only: where the first answer stands cannot be told."""
    _, renderer, _ = tools_of("qwen3", "qwen3")
    plain = get_renderer(tokenizer("qwen3"), "template")
    messages = [
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
        Message("assistant", "d"),
    ]
    supervised_tokens(renderer, messages)
    with pytest.raises(RenderError, match="cannot be told"):
        supervised_tokens(plain, messages)


def test_the_date_can_be_pinned_where_the_template_has_no_argument_for_it() -> None:
    with pytest.raises(RenderError, match="strftime_now: 26 Jul 2024"):
        get_renderer(tokenizer("gptoss"), "template")
    renderer = tools_of("gptoss", "template")[1]
    assert "Current date: 2026-01-01" in renderer.decode(renderer.render([Message("user", "a")]).ids_T)


def test_what_an_answer_shares_with_the_opening_of_a_thought_is_its_own() -> None:
    """DeepSeek's generation prompt opens a thought; a call begins with "<" as the thought does."""
    tok, renderer, _ = tools_of("deepseekv3", "template")
    call = Message("assistant", "", tool_calls=(ToolCall("add", {}, "call_0"),))
    for answer, begins in ((call, "<｜tool▁calls▁begin｜>"), (Message("assistant", "<b>"), "<b>")):
        ids_T, train_T = supervised_tokens(renderer, [Message("user", "a"), answer])
        assert tok.decode(ids_T[train_T > 0]).startswith(begins)


def test_templates_that_take_arguments_as_text_are_given_text() -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("add", {"s": 'é "x"'}, "call_0"),))
    text = ChatTemplate(tokenizer("deepseekv3")).text([Message("user", "a"), call])
    assert '{"s": "é \\"x\\""}' in text
