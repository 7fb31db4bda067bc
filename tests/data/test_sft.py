"""Supervised examples as groups of one: nothing cut, nothing dropped without a count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.data.sft import ExampleDropped, conversation, sft_group, sft_groups
from trivet.recipe.schema import TinyModel
from trivet.render import Renderer, RenderError, get_renderer, load_tokenizer
from trivet.render.tiny import make_tiny
from trivet.types import IssueKey, Message, Rollout, SchemaError, Task, Termination, Unscored

USER = Message("user", "1+1=")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = make_tiny(TinyModel(), Path(tmp_path_factory.mktemp("m")) / "tiny")
    return get_renderer(load_tokenizer(directory))


def task(response: Any = "2", name: str = "t", **payload: Any) -> Task:
    return Task("math", (USER,), {"response": response, **payload}, id=name)


def test_a_group_of_one(renderer: Renderer) -> None:
    group = sft_group(task(), renderer, IssueKey("t", 3), group_id="sft/t@3.0")
    (rollout,) = group.rollouts
    assert (group.kind, group.issue, group.ready) == ("sft", IssueKey("t", 3, 0), True)
    assert (rollout.source, rollout.termination, rollout.group) == (
        "expert",
        Termination.FINISHED,
        "sft/t@3.0",
    )
    assert isinstance(rollout.reward, Unscored)
    assert rollout.messages == [USER, Message("assistant", "2")]
    (row,) = rollout.trace.rows()
    assert row.ids_T.tolist() == [4, 9, 18, 9, 22, 1, 5, 10, 1]
    assert row.train_T.tolist() == [0] * 7 + [1, 1]
    assert not row.sampled_T.any()
    assert rollout.counters == {"tokens": 9.0, "trained_tokens": 2.0}
    assert Rollout.from_bytes(rollout.to_bytes()).trace.rows()[0].train_T.tolist() == row.train_T.tolist()


def test_answers_come_from_the_response_or_the_messages(renderer: Renderer) -> None:
    answer = {"role": "assistant", "content": "2", "train": 0.5}
    half = sft_group(task(answer), renderer, IssueKey("t", 0), group_id="g").rollouts[0].trace
    assert half.column("train").max() == 0.5
    chat = (USER, Message("assistant", "2", train=0), USER, Message("assistant", "3"))
    long = sft_group(Task("chat", chat), renderer, IssueKey("t", 0), group_id="g").rollouts[0].trace
    assert long.column("id")[long.column("train") > 0].tolist() == [11, 1]


def test_a_records_weight_reaches_its_tokens(renderer: Renderer) -> None:
    records = [
        {"prompt": "1+1=", "response": "2", "weight": 0.25, "id": "a"},
        {"prompt": "1", "response": "2"},
    ]
    groups = list(sft_groups(records, renderer))
    assert [float(g.rollouts[0].trace.column("train").max()) for g in groups] == [0.25, 1.0]


def test_drops_have_causes(renderer: Renderer) -> None:
    def cause(given: Task, **kw: Any) -> str:
        with pytest.raises(ExampleDropped) as caught:
            sft_group(given, renderer, IssueKey("t", 0), group_id="g", **kw)
        return caught.value.cause

    assert cause(task("2"), max_length=8) == "too_long"
    assert cause(task("")) == "no_answer"
    assert cause(task({"content": "2"})) == "no_answer"
    assert cause(Task("chat", (USER, Message("assistant", "2", train=0)))) == "not_trained"
    assert cause(task("é")) == "not_renderable"
    assert cause(task({"role": "assistant", "tool_calls": [{"arguments": {}}]})) == "no_answer"
    for tools in ("not JSON", '{"name": "f"}', ["f"], 3):
        assert cause(Task("chat", (USER,), {"response": "2", "tools": tools})) == "not_renderable"
    assert len(sft_group(task("2"), renderer, IssueKey("t", 0), group_id="g", max_length=9).rollouts) == 1


def test_tools_may_be_given_as_json_text() -> None:
    """Columnar files often hold them so; a text must never be offered letter by letter."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools), "", None, []):
        _, found = conversation(Task("chat", (USER,), {"response": "2", "tools": given}))
        assert found == (tools if given else [])


def test_counting(renderer: Renderer) -> None:
    records = [
        {"prompt": "1+1=", "response": "2", "id": "a"},
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "22"}]},
        {"prompt": "1+1=", "response": "2" * 50},
        {"prompt": "1+1="},
        task("é"),
    ]
    groups = sft_groups(records, renderer, stage="warm", epoch=1, max_length=20)
    made = list(groups)
    assert made[0].id == "warm/a@1.0"
    assert made[1].issue.epoch == 1
    counts = groups.counts
    assert (counts.kept, counts.tokens, counts.trained, counts.longest) == (2, 9 + 7, 2 + 3, 9)
    assert counts.dropped == {"too_long": 1, "no_answer": 1, "not_renderable": 1}


def test_nothing_left_is_an_error(renderer: Renderer) -> None:
    groups = sft_groups([task("2" * 30)] * 3, renderer, max_length=10)
    with pytest.raises(
        RenderError, match=r"no supervised example is left .*3 too_long.* above max_length 10"
    ):
        list(groups)
    with pytest.raises(RenderError, match="there were none"):
        list(sft_groups([], renderer))


def test_a_record_that_is_none(renderer: Renderer) -> None:
    with pytest.raises(SchemaError, match="needs messages, or prompt and response"):
        list(sft_groups([{"question": "?"}], renderer))
