"""What must hold for every conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.render.chatml import ChatML
from trivet.types import Message, ToolCall

TEXT = st.text(
    st.sampled_from("the cat said 12+7\n\t.:é東\"'{}\\ ")
    | st.characters(exclude_characters="<", exclude_categories=("Cs",)),
    max_size=30,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda s: st.lists(s, max_size=3) | st.dictionaries(TEXT, s),
    max_leaves=5,
)
CALLS = st.lists(
    st.builds(ToolCall, TEXT.filter(bool), st.dictionaries(TEXT, JSON, max_size=3)), max_size=2
).map(tuple)
ANSWERS = st.builds(
    lambda c, r, t: Message("assistant", c, reasoning=r, tool_calls=t), TEXT, st.none() | TEXT, CALLS
)


@st.composite
def chats(draw: st.DrawFn, answers: st.SearchStrategy[Message] | None = None) -> list[Message]:
    """Perhaps a system message, then turns that end with the user's."""
    answers = TEXT.map(lambda t: Message("assistant", t)) if answers is None else answers
    out = [Message("system", draw(TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        out += [Message("user", draw(TEXT)), draw(answers)]
    return [*out, Message("user", draw(TEXT))]


@pytest.fixture(scope="module", params=["chatml", "default", "hermes"])
def renderer(request: pytest.FixtureRequest, fast: Callable[..., Any]) -> ChatML:
    return ChatML(fast(request.param))


@settings(max_examples=60, deadline=None)
@given(chats(), st.booleans())
def test_ids_equal_the_templates(renderer: ChatML, chat: list[Message], generate: bool) -> None:
    ours = renderer.render(chat, generate=generate).ids_T
    official = renderer.template.ids(chat, generate=generate)
    if any(m.role == "assistant" and m.text[:1].isspace() for m in chat):
        assert renderer.decode(ours) == renderer.decode(np.asarray(official))
    else:
        assert ours.tolist() == official


@settings(max_examples=60, deadline=None)
@given(chats(ANSWERS), st.booleans())
def test_segments_tile_the_ids(renderer: ChatML, chat: list[Message], generate: bool) -> None:
    rendered = renderer.render(chat, generate=generate)
    assert [s.start for s in rendered.segments] == [0, *(s.stop for s in rendered.segments[:-1])]
    assert rendered.segments[-1].stop == len(rendered.ids_T)
    assert all(s.start < s.stop for s in rendered.segments)
    trained = [s for s in rendered.segments if s.trained]
    assert [s.message for s in trained] == [i for i, m in enumerate(chat) if m.role == "assistant"]
    assert all(rendered.ids_T[s.stop - 1] == renderer.stop_ids[0] for s in trained)


@settings(max_examples=100, deadline=None)
@given(ANSWERS)
def test_parse_inverts_render(renderer: ChatML, answer: Message) -> None:
    rendered = renderer.render([Message("user", "q"), answer])
    assert renderer.parse(rendered.ids_T[rendered.mask_T()]) == answer


@settings(max_examples=60, deadline=None)
@given(chats(ANSWERS), ANSWERS, st.lists(TEXT.map(lambda t: Message("tool", t)), max_size=2), TEXT)
def test_a_prompt_is_a_prefix_of_the_next(
    renderer: ChatML, chat: list[Message], answer: Message, results: list[Message], question: str
) -> None:
    """prompt + answer's ids + extend = the whole conversation rendered at once."""
    prompt = renderer.render(chat, generate=True).ids_T
    done = renderer.render([*chat, answer])
    written = done.ids_T[done.segments[-2].start : done.segments[-2].stop]
    after = [*chat, answer, *results, Message("user", question)]
    suffix = renderer.extend(after, len(chat), written).ids_T
    whole = renderer.render(after, generate=True).ids_T
    assert np.concatenate([prompt, written, suffix]).tolist() == whole.tolist()
