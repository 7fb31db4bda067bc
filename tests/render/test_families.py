"""The renderers library behind our protocol, for a family whose template thinks in the last turn only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trivet.render import INVALID_CALL, RenderError, get_renderer, supervised_trace
from trivet.types import Message, ToolCall

pytest.importorskip("renderers")

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
USER, ANSWER = Message("user", "hi"), Message("assistant", "ok")
THOUGHT = Message("assistant", "ok", reasoning="hm")


@pytest.fixture(scope="module")
def tokenizer(fast: Callable[..., Any]) -> Any:
    return fast("thinking", more=(*TAGS, "<|endoftext|>"))


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Any:
    return get_renderer(tokenizer, "qwen3")


def shown(renderer: Any, rendered: Any) -> list[tuple[str, int, bool, str]]:
    return [
        (s.origin.name, s.message, s.trained, renderer.decode(rendered.ids_T[s.start : s.stop]))
        for s in rendered.segments
    ]


def test_segments(renderer: Any) -> None:
    rendered = renderer.render([USER, ANSWER, USER, THOUGHT, USER], generate=True)
    assert shown(renderer, rendered) == [
        ("MESSAGE", 0, False, "<|im_start|>user\nhi<|im_end|>\n"),
        ("GENERATION_PROMPT", 1, False, "<|im_start|>assistant\n"),
        ("MESSAGE", 1, True, "ok<|im_end|>"),
        ("INSERTED", 1, False, "\n"),
        ("MESSAGE", 2, False, "<|im_start|>user\nhi<|im_end|>\n"),
        ("GENERATION_PROMPT", 3, False, "<|im_start|>assistant\n"),
        ("MESSAGE", 3, True, "ok<|im_end|>"),  # its reasoning is history: dropped by the template
        ("INSERTED", 3, False, "\n"),
        ("MESSAGE", 4, False, "<|im_start|>user\nhi<|im_end|>\n"),
        ("GENERATION_PROMPT", 5, False, "<|im_start|>assistant\n"),
    ]


def test_the_empty_thought_the_template_adds_is_never_trained(renderer: Any, tokenizer: Any) -> None:
    block = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert shown(renderer, renderer.render([USER, ANSWER]))[1] == ("GENERATION_PROMPT", 1, False, block)
    quiet = get_renderer(tokenizer, "qwen3", {"enable_thinking": False})
    assert shown(quiet, quiet.render([USER, ANSWER]))[1] == ("GENERATION_PROMPT", 1, False, block)
    assert shown(quiet, quiet.render([USER], generate=True))[-1] == ("GENERATION_PROMPT", 1, False, block)
    # reasoning that is there is trained whole, also where the generation prompt would have closed it
    for one in (renderer, quiet):
        parts = shown(one, one.render([USER, THOUGHT]))
        assert parts[1] == ("GENERATION_PROMPT", 1, False, "<|im_start|>assistant\n")
        assert parts[2] == ("MESSAGE", 1, True, "<think>\nhm\n</think>\n\nok<|im_end|>")


def test_system_prompt(tokenizer: Any) -> None:
    renderer = get_renderer(tokenizer, "qwen3", system_prompt="Be kind.")
    parts = shown(renderer, renderer.render([USER, ANSWER]))
    assert parts[0] == ("INSERTED", -1, False, "<|im_start|>system\nBe kind.<|im_end|>\n")
    assert [p[1] for p in parts] == [-1, 0, 1, 1, 1]
    assert renderer.render([Message("system", "S"), USER]).segments[0].message == 0


def test_extend_keeps_what_was_sampled(renderer: Any, tokenizer: Any) -> None:
    ids = np.asarray(tokenizer.encode("<think>\nhm\n</think>\n\nok<|im_end|>"))
    chat = [USER, THOUGHT, Message("tool", "3"), USER]
    want = [
        ("INSERTED", 1, False, "\n"),
        ("MESSAGE", 2, False, "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"),
        ("MESSAGE", 3, False, "<|im_start|>user\nhi<|im_end|>\n"),
        ("GENERATION_PROMPT", 4, False, "<|im_start|>assistant\n"),
    ]
    assert shown(renderer, renderer.extend(chat, 1, ids)) == want
    assert shown(renderer, renderer.extend(chat, 1, ids, generate=False)) == want[:-1]
    cut = shown(renderer, renderer.extend(chat, 1, ids[:-1]))
    assert cut == [("INSERTED", 1, False, "<|im_end|>\n"), *want[1:]]
    with pytest.raises(RenderError, match="answers among them"):
        renderer.extend([USER, ANSWER, USER, ANSWER, USER], 1, ids)


def test_parse(renderer: Any, tokenizer: Any) -> None:
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nSee {good}\n<tool_call>\n{{bad\n</tool_call><|im_end|>"
    message = renderer.parse(np.asarray(tokenizer.encode(text)))
    assert message.reasoning == "hm"
    assert message.content.strip() == "See"
    assert message.tool_calls[0] == ToolCall("add", {"a": 1})
    assert message.tool_calls[1].name == INVALID_CALL
    assert "invalid_json" in message.tool_calls[1].arguments["error"]


def test_supervised_reasoning_that_is_dropped_is_refused(renderer: Any) -> None:
    chat = [USER, THOUGHT, USER, THOUGHT]
    with pytest.raises(
        RenderError, match=r"message 1: its reasoning \('hm'\) is not among the trained tokens"
    ):
        supervised_trace(renderer, chat)
    trace = supervised_trace(
        renderer, [USER, Message("assistant", "ok", reasoning="hm", train=0), USER, THOUGHT]
    )
    trained = trace.column("id")[trace.column("train") > 0]
    assert renderer.decode(trained) == "<think>\nhm\n</think>\n\nok<|im_end|>"


def test_what_does_not_fit(tokenizer: Any, fast: Callable[..., Any]) -> None:
    with pytest.raises(RenderError, match="renderer 'qwen' is not known"):
        get_renderer(tokenizer, "qwen")
    with pytest.raises(RenderError, match=r"Special token .* not found"):
        get_renderer(fast("thinking"), "qwen3")
    with pytest.raises(RenderError, match="does not fit the chat template"):
        get_renderer(fast("default", more=(*TAGS, "<|endoftext|>")), "qwen3")
    with pytest.raises(RenderError, match="enable_thinkin"):
        get_renderer(tokenizer, "qwen3", {"enable_thinkin": False})


def test_auto_goes_by_the_models_name(fast: Callable[..., Any]) -> None:
    tokenizer = fast("thinking", more=(*TAGS, "<|endoftext|>"))
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert get_renderer(tokenizer).name == "qwen3"


def test_the_library_is_imported_only_when_needed() -> None:
    code = (
        "import sys; import trivet.render, trivet.render.chatml, trivet.render.select; "
        "heavy = ('renderers', 'httpx', 'torch', 'transformers', 'tokenizers'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr
