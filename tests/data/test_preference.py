"""Preference pairs from records: what is the prompt, what is trained, what is dropped and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.data.preference import pair_messages, preference_group
from trivet.data.sft import ExampleDropped, sft_group
from trivet.recipe.schema import Tasks, TinyModel
from trivet.render import get_renderer, load_tokenizer
from trivet.render.tiny import make_tiny
from trivet.tasks import TasksetError, load_tasks
from trivet.types import IssueKey, Message, Task

KEY = IssueKey("t", 1)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny(TinyModel(hidden=16, layers=1, heads=2, kv_heads=1), tmp_path_factory.mktemp("m"))
    return get_renderer(load_tokenizer(folder), kind="auto", template_args={})


def task(*messages: Message, **payload: Any) -> Task:
    return Task("t", messages or (Message("user", "1+1"),), payload, id="t")


def texts(messages: list[Message]) -> list[str]:
    return [m.text for m in messages]


def test_both_answers_follow_the_prompt(renderer: Any) -> None:
    group = preference_group(task(chosen="2", rejected="three"), renderer, KEY, group_id="g")
    assert group.kind == "preference"
    assert [r.preference for r in group.rollouts] == ["chosen", "rejected"]
    assert [texts(r.messages) for r in group.rollouts] == [["1+1", "2"], ["1+1", "three"]]
    trained = [r.trace.column("id")[r.trace.column("train") > 0].tolist() for r in group.rollouts]
    assert [renderer.decode(ids[:-1]) for ids in trained] == ["2", "three"]
    assert trained[0][-1] == trained[1][-1]  # the token that ends the turn


def test_whole_conversations_share_an_untrained_beginning() -> None:
    """The assistant's earlier answer is in both: it is context, whatever its own flag says."""
    opening = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    whole = [m.to_dict() for m in opening]
    payload = {
        "chosen": [*whole, {"role": "assistant", "content": "d"}],
        "rejected": [*whole, {"role": "assistant", "content": "e"}],
    }
    chosen, rejected = pair_messages(task(opening[0], **payload))
    assert texts(chosen) == ["a", "b", "c", "d"]
    assert texts(rejected) == ["a", "b", "c", "e"]
    assert [m.train for m in chosen if m.role == "assistant"] == [0.0, None]
    one = {"role": "assistant", "content": "d"}
    assert texts(pair_messages(task(*opening, chosen=one, rejected="e"))[0]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        ({"chosen": "a"}, "no_answer"),
        ({"chosen": "", "rejected": "b"}, "no_answer"),
        ({"chosen": "a", "rejected": "a"}, "same_answers"),
        ({"chosen": "a", "rejected": 3}, "no_answer"),
        ({"chosen": "a", "rejected": [{"role": "user", "content": "b"}]}, "not_trained"),
        ({"chosen": "a", "rejected": [{"rol": "user"}]}, "no_answer"),
        ({"chosen": "a", "rejected": "b" * 100}, "too_long"),
    ],
)
def test_what_is_dropped(renderer: Any, payload: Any, cause: str) -> None:
    with pytest.raises(ExampleDropped) as dropped:
        preference_group(task(**payload), renderer, KEY, group_id="g", max_length=60)
    assert dropped.value.cause == cause
    assert "task t" in str(dropped.value)


def write(folder: Path, *rows: Any) -> Tasks:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Tasks(source=str(path))


def test_records_of_the_usual_shapes(tmp_path: Path) -> None:
    """prompt, chosen, rejected; or whole conversations, whose common beginning is the prompt."""
    taskset = load_tasks(write(tmp_path, {"prompt": "p", "chosen": "c", "rejected": "r"}), seed=0)
    assert [m.text for m in taskset.tasks[0].messages] == ["p"]
    assert taskset.tasks[0].payload == {"chosen": "c", "rejected": "r"}
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {side: [*opening, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    found = load_tasks(write(tmp_path, row), seed=0).tasks[0]
    assert [m.text for m in found.messages] == ["s", "u"]
    assert [texts(side) for side in pair_messages(found)] == [["s", "u", "chosen"], ["s", "u", "rejected"]]
    with pytest.raises(TasksetError, match="must begin with the same messages"):
        load_tasks(write(tmp_path, row | {"rejected": row["rejected"][1:]}), seed=0)


def test_an_example_may_have_a_weight(renderer: Any) -> None:
    """payload.weight times the message's own: 0.5 * 0.5 at its tokens."""
    messages = (Message("user", "1+1"), Message("assistant", "2", train=0.5))
    group = sft_group(task(*messages, weight=0.5), renderer, KEY, group_id="g")
    train = group.rollouts[0].trace.column("train")
    assert set(train.tolist()) == {0.0, 0.25}
    for weight in (0, -1.0, float("nan"), "1", True):
        with pytest.raises(ExampleDropped) as dropped:
            sft_group(task(*messages, weight=weight), renderer, KEY, group_id="g")
        assert dropped.value.cause == "bad_weight"


def test_a_pair_may_have_a_weight_and_a_margin(renderer: Any, tmp_path: Path) -> None:
    """From columns of the data to both rollouts: train weights, and the counter that objectives read."""
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "sure": 0.5, "better_by": 2}
    config = write(tmp_path, row, row | {"sure": 1.0, "better_by": None})
    config = config.model_copy(update={"fields": {"payload.weight": "sure", "payload.margin": "better_by"}})
    first, second = (
        preference_group(one, renderer, KEY, group_id="g").rollouts
        for one in load_tasks(config, seed=0).tasks
    )
    assert [set(r.trace.column("train").tolist()) for r in first] == [{0.0, 0.5}, {0.0, 0.5}]
    assert [r.counters["pair_margin"] for r in first] == [2.0, 2.0]
    assert all("pair_margin" not in r.counters for r in second)


@pytest.mark.parametrize(
    ("name", "values"), [("weight", (0, -1.0, "1", True)), ("margin", (-1, float("inf"), "1", True))]
)
def test_a_pairs_bad_number_drops_it(renderer: Any, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        given = task(chosen="a", rejected="b", **{name: value})
        with pytest.raises(ExampleDropped, match=f"task t: {name} is") as dropped:
            preference_group(given, renderer, KEY, group_id="g")
        assert dropped.value.cause == f"bad_{name}"


def test_texts_of_turns_are_whole_conversations(tmp_path: Path) -> None:
    """HH-RLHF's form; "Human:" inside a line is no turn."""
    begin = "\n\nHuman: a Human: b\n\nAssistant: c\n\nHuman: d\n\nAssistant:"
    rows = [{"chosen": f"{begin} e\n\nf", "rejected": f"{begin} g"}, {"chosen": begin, "rejected": begin}]
    taskset = load_tasks(write(tmp_path, *rows), seed=0)
    (found,) = taskset.tasks  # the second row's answers are the same
    assert texts(list(found.messages)) == ["a Human: b", "c", "d"]
    assert [texts(side)[3:] for side in pair_messages(found)] == [["e\n\nf"], ["g"]]
    bad = {"chosen": f"{begin} e", "rejected": "g"}
    read = load_tasks(write(tmp_path, *rows, bad), seed=0)
    assert len(read.tasks) == 1
    assert sum(read.dropped.values()) == 2  # counted, not read as something else
    with_prompt = {"prompt": "p", "chosen": "Human: q", "rejected": "r"}
    assert load_tasks(write(tmp_path, with_prompt), seed=0).tasks[0].payload["chosen"] == "Human: q"


def test_pairs_that_part_at_a_later_question(tmp_path: Path) -> None:
    """The assistant's first answer is in both: context, not trained; the opening ends before it."""
    row = {
        side: [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": side},
            {"role": "assistant", "content": "d"},
        ]
        for side in ("chosen", "rejected")
    }
    (found,) = load_tasks(write(tmp_path, row), seed=0).tasks
    assert texts(list(found.messages)) == ["a"]
    for side, messages in zip(("chosen", "rejected"), pair_messages(found), strict=True):
        assert texts(messages) == ["a", "b", side, "d"]
        assert [m.train for m in messages if m.role == "assistant"] == [0.0, None]


def test_messages_in_other_data_sets_words(tmp_path: Path) -> None:
    def parts(role: str, text: str, weight: float) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight}

    row = {side: [parts("user", "q", 0.0), parts("assistant", side, 0.5)] for side in ("chosen", "rejected")}
    (found,) = load_tasks(write(tmp_path, row), seed=0).tasks
    chosen, rejected = pair_messages(found)
    assert (texts(chosen), texts(rejected)) == (["q", "chosen"], ["q", "rejected"])
    assert [m.train for m in chosen] == [None, 0.5]
    wrong = row | {"chosen": [parts("user", "q", 1.0), parts("assistant", "a", 1.0)]}
    with pytest.raises(TasksetError, match="a user message cannot be trained"):
        load_tasks(write(tmp_path, wrong), seed=0)

    said = {"from": "gpt", "value": "x"}
    row = {
        "messages": [{"from": "human", "value": "q"}],
        "chosen": said,
        "rejected": said | {"value": "y"},
    }
    (found,) = load_tasks(write(tmp_path, row), seed=0).tasks
    assert [texts(side) for side in pair_messages(found)] == [["q", "x"], ["q", "y"]]


@pytest.mark.parametrize(
    ("file", "fields", "at_least"),
    [
        ("hh_rlhf/harmless_base_test.jsonl.gz", {}, 2300),
        ("llamafactory_dpo_kto/dpo_en_demo.json", {"messages": "conversations"}, 295),
        (
            "llamafactory_dpo_kto/v1_dpo_demo.jsonl",
            {"chosen": "chosen_messages", "rejected": "rejected_messages"},
            10,
        ),
    ],
)
def test_public_sets_are_read_whole(
    shared_dir: Path, file: str, fields: dict[str, str], at_least: int
) -> None:
    source = shared_dir / "data" / "preference" / file
    if not source.is_file():
        pytest.skip(f"no {source}")
    tasks = load_tasks(Tasks(source=str(source), fields=fields), seed=0).tasks
    pairs = [pair_messages(one) for one in tasks]
    assert len(pairs) >= at_least
    for chosen, rejected in pairs:
        assert chosen[-1].role == rejected[-1].role == "assistant"
        assert chosen != rejected
