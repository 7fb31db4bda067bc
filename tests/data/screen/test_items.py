"""What is looked for in an item, what is cut from it, and what is said of items that cannot be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from trivet.data.screen.allow import Allow, load_allow
from trivet.data.screen.items import INSTRUCTIONS, Guards, Item, PreparedItem, prepare_items

LONG = "seven red foxes crossed the frozen river before the old mill bell rang at dawn today"


def item(text: str, id: str = "0", part: str = "question") -> Item:
    return Item("toy", id, (text,), part)  # type: ignore[arg-type]


def prepare(*texts: str, guards: Guards | None = None, allow: Allow | None = None) -> list[PreparedItem]:
    return prepare_items([item(text, str(i)) for i, text in enumerate(texts)], guards, allow).items


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (LONG, "phrases"),
        ("one two three four five six seven eight", "phrases"),
        ("one two three four five six seven", "whole"),
        ("What is it?", "whole"),
        ("Why not?", "short"),
        ("42", "short"),
        ("...", "empty"),
        ("", "empty"),
    ],
)
def test_status_of_questions(text: str, status: str) -> None:
    (prepared,) = prepare(text)
    assert prepared.status == status
    assert prepared.usable == (status in ("phrases", "whole"))
    assert bool(prepared.why) == (status != "phrases")


def test_answers_must_be_long() -> None:
    out = prepare_items([item("return sorted(list(set(values)), key=len, reverse=True)", part="answer")])
    assert [prepared.status for prepared in out] == ["short_answer"]
    assert out.statuses() == {"toy": {"short_answer": 1}}
    assert [prepared.item.label for prepared in out.unusable()] == ["toy/0:answer"]


def test_a_repeated_item_is_looked_for_once_and_named() -> None:
    first, second = prepare(LONG, f"**{LONG.upper()}**")
    assert (first.status, second.status) == ("phrases", "duplicate")
    assert "toy/0" in second.why


def test_two_benchmarks_may_hold_the_same_item() -> None:
    out = prepare_items([Item("a", "0", (LONG,)), Item("b", "0", (LONG,))])
    assert [prepared.status for prepared in out] == ["phrases", "phrases"]


def test_instructions_of_harnesses_are_cut() -> None:
    (prepared,) = prepare(f"{LONG}\n{INSTRUCTIONS[0]}")
    assert prepared.segments == (tuple(LONG.split()),)
    assert prepared.cut == 12
    (whole,) = prepare(f"What is 12 plus 30? {INSTRUCTIONS[0]}")
    assert whole.status == "whole" and "12 of boilerplate" in whole.why
    assert set(whole.whole_texts()) == {
        "what is 12 plus 30",
        "what is 12 plus 30 please reason step by step and put your final answer within boxed",
    }


def test_what_many_items_share_is_boilerplate() -> None:
    shared = "read the following story with care and then choose the one best ending from the list"
    texts = [f"item{i}a item{i}b {shared} " + " ".join(f"w{i}x{j}" for j in range(10)) for i in range(5)]
    out = prepare_items([item(text, str(i)) for i, text in enumerate(texts)])
    assert [prepared.segments[0] for prepared in out] == [(f"item{i}a", f"item{i}b") for i in range(5)]
    assert [len(prepared.segments[1]) for prepared in out] == [10] * 5
    assert out.boilerplate == {("toy", shared): 5}
    assert all(prepared.cut == 0 for prepared in prepare(*texts[:4]))  # four are no custom
    assert all(prepared.cut == 0 for prepared in prepare(*texts, guards=Guards.off()))
    # The same item five times over is one item.
    assert [prepared.cut for prepared in prepare(*[texts[0]] * 5)] == [0] * 5


def test_in_a_large_benchmark_a_share_is_needed() -> None:
    shared = " ".join(f"s{i}" for i in range(12))
    others = [" ".join(f"o{i}x{j}" for j in range(10)) for i in range(114)]
    texts = [f"{shared} only {i}" for i in range(6)]
    assert all(prepared.cut == 0 for prepared in prepare(*others, *texts, "one more"))  # 6 of 121
    assert prepare(*texts, *others)[0].cut == 13  # 6 of 120


def test_messages_of_an_item_stay_apart() -> None:
    out = prepare_items([Item("toy", "0", ("one two three four five", "six seven eight nine"))])
    assert out.items[0].segments == (
        ("one", "two", "three", "four", "five"),
        ("six", "seven", "eight", "nine"),
    )
    assert out.items[0].status == "whole"


def test_allowed_items(tmp_path: Path) -> None:
    path = tmp_path / "allow.jsonl"
    path.write_text(
        '{"item": "toy/0", "reason": "a proverb"}\n\n'
        '{"phrase": "The quick, brown fox!", "reason": "everybody types it"}\n'
        '{"document": "a.jsonl:3", "reason": "seen by hand"}\n'
    )
    allow = load_allow(path)
    assert len(allow) == 3
    assert allow.phrases == {"the quick brown fox": "everybody types it"}
    assert allow.documents == {"a.jsonl:3": "seen by hand"}
    (prepared,) = prepare(LONG, allow=allow)
    assert (prepared.status, prepared.why) == ("allowed", "a proverb")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"item": "toy/0"}', "no reason"),
        ('{"item": "toy/0", "reason": " "}', "no reason"),
        ('{"item": "", "reason": "x"}', "must be text"),
        ('{"reason": "x"}', "exactly one of"),
        ('{"item": "a", "phrase": "b", "reason": "x"}', "exactly one of"),
        ('{"items": "a", "reason": "x"}', "exactly one of"),
        ("[]", "exactly one of"),
        ("{", "not JSON"),
    ],
)
def test_a_wrong_allow_list_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "allow.jsonl"
    path.write_text('{"item": "x/1", "reason": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        load_allow(path)
    assert "allow.jsonl:2" in str(error.value)
