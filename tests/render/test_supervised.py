"""Supervised traces: what is trained, with what weight, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trivet.render import RenderError, supervised_trace
from trivet.render.chatml import ChatML
from trivet.types import Message, Origin

USER = Message("user", "hi")


@pytest.fixture(scope="module")
def renderer(fast: Callable[..., Any]) -> ChatML:
    return ChatML(fast("default"))


def trained(renderer: ChatML, trace: Any) -> list[tuple[str, float]]:
    out = []
    for node in trace.nodes:
        train = trace.column("train")[node.start : node.start + node.length]
        assert len(set(train.tolist())) == 1
        out.append(
            (renderer.decode(trace.column("id")[node.start : node.start + node.length]), float(train[0]))
        )
    return out


def test_weights(renderer: ChatML) -> None:
    chat = [USER, Message("assistant", "a", train=0), USER, Message("assistant", "b", train=0.5), USER]
    trace = supervised_trace(renderer, [*chat, Message("assistant", "c")], weight=2.0)
    weights = {text: weight for text, weight in trained(renderer, trace) if weight}
    assert weights == {"b<|im_end|>": 1.0, "c<|im_end|>": 2.0}


def test_one_row_of_nodes_with_their_origins(renderer: ChatML) -> None:
    trace = supervised_trace(renderer, [USER, Message("assistant", "ok")])
    assert [(n.origin, n.message) for n in trace.nodes] == [
        (Origin.INSERTED, -1),
        (Origin.MESSAGE, 0),
        (Origin.GENERATION_PROMPT, 1),
        (Origin.MESSAGE, 1),
        (Origin.INSERTED, 1),
    ]
    (row,) = trace.rows()
    assert row.ids_T.tolist() == renderer.render([USER, Message("assistant", "ok")]).ids_T.tolist()
    assert not row.sampled_T.any()
    assert row.train_T.sum() == 3  # "o" "k" and the token that ends the turn; not the line break after it
    assert row.ids_T[row.train_T > 0][-1] == renderer.stop_ids[0]


def test_refusals(renderer: ChatML) -> None:
    for chat in ([USER], [USER, Message("assistant", "a", train=0)]):
        with pytest.raises(RenderError, match="nothing in this conversation would be trained"):
            supervised_trace(renderer, chat)
    with pytest.raises(RenderError, match="nothing in this conversation"):
        supervised_trace(renderer, [USER, Message("assistant", "a")], weight=0)
    with pytest.raises(RenderError, match="finite and not negative"):
        supervised_trace(renderer, [USER, Message("assistant", "a")], weight=-1)


def test_an_empty_answer_trains_the_end_of_the_turn(renderer: ChatML) -> None:
    trace = supervised_trace(renderer, [USER, Message("assistant", "")])
    assert trace.column("id")[trace.column("train") > 0].tolist() == list(renderer.stop_ids)
