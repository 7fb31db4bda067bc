"""Passes in a row, borderline documents, decisions, and counts that add up."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from trivet.data.record import Drop, Record
from trivet.data.screen.allow import Allow
from trivet.data.screen.chain import Screen, document_batches, screen_records
from trivet.data.screen.documents import Document, document_of, document_of_record
from trivet.data.screen.exact import CharacterPass, PrefixPass
from trivet.data.screen.items import Item, PreparedItems, prepare_items
from trivet.data.screen.ngrams import NgramOptions, NgramPass, sampled_8gram
from trivet.data.screen.report import ScreenReport
from trivet.data.screen.verdicts import Borderline, Hit, Outcome, load_decisions
from trivet.types import Message, Part, ToolCall

WORDS = [f"w{i}" for i in range(27)]
FULL, HALF = " ".join(WORDS), " ".join(WORDS[:16])


def items() -> PreparedItems:
    return prepare_items(
        [
            Item("one", "a", (FULL,)),
            Item("one", "b", ("who " + FULL + " then",)),
            Item("two", "a", (" ".join(f"v{i}" for i in range(27)),)),
            Item("two", "a", (" ".join(f"x{i}" for i in range(27)),), "answer"),
        ]
    )


def docs() -> list[Document]:
    return [
        Document((FULL,), source="s", place="s:0"),
        Document((HALF,), source="s", place="s:1"),
        Document(("nothing of the sort",), source="s", place="s:2"),
        Document((FULL,), source="t", place="t:0"),
        Document((" ".join(f"{x}{i}" for x in "vx" for i in range(27)),), source="t", place="t:1"),
    ]


def run(
    screen: Screen, documents: list[Document], review: Path | None = None
) -> tuple[list[Outcome], ScreenReport]:
    report = ScreenReport()
    return list(screen.run(iter(documents), report, review)), report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_one_pass_drops_the_next_does_not_see() -> None:
    prepared = items()
    screen = Screen([PrefixPass(prepared), sampled_8gram(prepared)])
    outcomes, report = run(screen, docs())
    assert [outcome.fate for outcome in outcomes] == ["drop", "keep", "keep", "drop", "drop"]
    assert [outcome.taken_by for outcome in outcomes] == [
        "prefix_hash",
        None,
        None,
        "prefix_hash",
        "sampled_8gram",
    ]
    assert [len(outcome.passes) for outcome in outcomes] == [1, 2, 2, 1, 2]
    seen = {name: sum(one.fates.values()) for name, one in report.passes.items()}
    assert seen == {"prefix_hash": 5, "sampled_8gram": 3}
    back = Screen(screen.passes[::-1])
    assert [outcome.taken_by for outcome in back.check(docs())][:1] == ["sampled_8gram"]


def test_pairs_and_unique_samples() -> None:
    _, report = run(Screen([sampled_8gram(items())]), docs())
    rows = {(row["benchmark"], row["source"]): row for row in report.rows()}
    # One document repeats two items of a benchmark: two pairs, one sample.
    assert (rows["one", "t"]["dropped pairs"], rows["one", "t"]["dropped samples"]) == (2, 1)
    # Question and answer of an item are one pair.
    assert (rows["two", "t"]["dropped pairs"], rows["two", "t"]["dropped samples"]) == (1, 1)
    assert (rows["one", "s"]["borderline pairs"], rows["one", "s"]["borderline samples"]) == (2, 1)
    assert report.total("drop") == 3 and report.total("keep") == 2
    (table,) = report.passes.values()
    assert table.item_rows(1) == [{"item": "one/a", "dropped": 2, "borderline": 1, "kept by decision": 0}]
    text = report.text()
    assert "5 documents: 2 kept, 3 dropped, 0 held" in text
    assert "| sampled_8gram | one | t | 2 | 1 | 0 | 0 |" in text


@pytest.mark.parametrize(("borderline", "fate"), [("keep", "keep"), ("drop", "drop"), ("review", "held")])
def test_borderline_documents(tmp_path: Path, borderline: Borderline, fate: str) -> None:
    screen = Screen([NgramPass(items(), NgramOptions(borderline=borderline))])
    outcomes, report = run(screen, docs()[1:2], tmp_path / "review.jsonl")
    assert [outcome.fate for outcome in outcomes] == [fate]
    assert report.total(fate) == 1
    rows = lines(tmp_path / "review.jsonl")
    assert [(row["item"], row["hits"], row["of"]) for row in rows] == [("one/a", 9, 20), ("one/b", 8, 20)]
    assert {row["decision"] for row in rows} == {None}
    assert rows[0]["place"] == "s:1" and rows[0]["prompt"] == HALF and rows[0]["item_text"] == FULL
    assert rows[0]["matched"][0] == " ".join(WORDS[:8])


def decide(path: Path, decisions: dict[str, str]) -> None:
    rows = [{**row, "decision": decisions.get(row["item"])} for row in lines(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("decisions", "fate"),
    [
        ({"one/a": "keep", "one/b": "keep"}, "keep"),
        ({"one/a": "keep"}, "held"),  # the other is still open
        ({"one/a": "keep", "one/b": "drop"}, "drop"),
    ],
)
def test_a_review_file_with_decisions_is_read_back(
    tmp_path: Path, decisions: dict[str, str], fate: str
) -> None:
    review = tmp_path / "review.jsonl"
    passes = [NgramPass(items(), NgramOptions(borderline="review"))]
    run(Screen(passes), docs()[1:2], review)
    decide(review, decisions)
    screen = Screen(passes, decisions=load_decisions(review))
    (outcome,) = screen.check([Document((HALF.upper(),), source="other", place="elsewhere")])
    assert outcome.fate == fate


def test_a_decision_saves_a_document_from_the_rule() -> None:
    document = docs()[0]
    decisions = {(document.key(), name): "keep" for name in ("one/a", "one/b")}
    screen = Screen([sampled_8gram(items())], decisions=decisions)  # type: ignore[arg-type]
    outcomes, report = run(screen, [document])
    assert [outcome.fate for outcome in outcomes] == ["keep"]
    assert report.passes["sampled_8gram"].item_rows()[0]["kept by decision"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"document": "x", "item": "y"}', "not a line"),
        ("oops", "not a line"),
        ('{"document": "x", "item": "y", "decision": "maybe"}', 'not "drop"'),
        ('{"document": "d", "item": "i", "decision": "keep"}', "decided otherwise"),
    ],
)
def test_a_wrong_review_file_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "review.jsonl"
    path.write_text('{"document": "d", "item": "i", "decision": "drop"}\n' + line)
    with pytest.raises(ValueError, match=message) as error:
        load_decisions(path)
    assert ":2:" in str(error.value)


def judge(hit: Hit, document: Document) -> Any:
    return {"one/a": "drop", "one/b": "keep"}.get(hit.item.item.name) if document.source == "s" else None


def test_a_judge_decides_borderline_hits_only(tmp_path: Path) -> None:
    screen = Screen([NgramPass(items(), NgramOptions(borderline="review"))], judge=judge)
    documents = [docs()[1], Document((HALF,), source="t"), docs()[0]]
    outcomes, _ = run(screen, documents, tmp_path / "review.jsonl")
    assert [outcome.fate for outcome in outcomes] == ["drop", "held", "drop"]
    assert outcomes[2].passes[0].decisions == (None, None)
    assert [row["decision"] for row in lines(tmp_path / "review.jsonl")] == ["drop", "keep", None, None]


def test_allowed_documents_pass_unseen_and_are_counted() -> None:
    allow = Allow(documents={"s:0": "a citation", docs()[4].key(): "ours"})
    outcomes, report = run(Screen([sampled_8gram(items())], allow), docs())
    assert [outcome.fate for outcome in outcomes] == ["keep", "keep", "keep", "drop", "keep"]
    assert outcomes[0].allowed == "a citation" and outcomes[0].passes == ()
    assert report.allowed == {"a citation": 1, "ours": 1}
    assert "1 documents allowed: ours" in report.text()


def test_reports_of_workers_add_up_and_survive_json() -> None:
    prepared = items()
    screen = Screen([sampled_8gram(prepared), CharacterPass(prepared)], Allow(documents={"s:0": "ours"}))
    _, whole = run(screen, docs())
    merged = ScreenReport()
    for part in (docs()[:2], docs()[2:]):
        copy = pickle.loads(pickle.dumps(screen))
        _, report = run(copy, part)
        merged.merge(ScreenReport.from_dict(json.loads(json.dumps(report.to_dict()))))
    assert merged == whole
    assert merged.text() == whole.text()


def test_batches_change_nothing() -> None:
    screen = Screen([sampled_8gram(items())])
    documents = docs() * 50
    singly = [screen.check([document])[0] for document in documents]
    assert screen.check(documents) == singly
    assert [document for batch in document_batches(documents) for document in batch] == documents


def test_records_become_drops_with_a_cause() -> None:
    def record(text: str, place: str) -> Record:
        return Record([Message("user", "hello"), Message("assistant", text)], "src", place)

    records = [record(FULL, "f:1"), Drop("broken_json", "f:2"), record("fine", "f:3"), record(HALF, "f:4")]
    screen = Screen([NgramPass(items(), NgramOptions(borderline="review"))])
    report = ScreenReport()
    out = list(screen_records(iter(records), screen, report))
    assert [one.cause if isinstance(one, Drop) else "kept" for one in out] == [
        "contaminated",
        "broken_json",
        "kept",
        "contamination_review",
    ]
    assert out[2] is records[2]
    assert isinstance(out[0], Drop) and out[0].place == "f:1" and out[0].source == "src"
    assert "sampled_8gram: one/a (20/20, 1.00)" in out[0].text


def test_what_of_a_conversation_is_screened() -> None:
    call = ToolCall("run", {"code": "def f():\n    pass", "n": [1, {"x": None}]}, "c0")
    messages = [
        Message("system", "be brief"),
        Message("user", (Part("text", "look"), Part("text", "here"))),
        Message("assistant", "", "let me think", (call,)),
        Message("tool", "found", tool_call_id="c0"),
        Message("assistant", "done"),
    ]
    document = document_of(messages, "s", "p")
    assert document.texts == (
        "be brief",
        "look\nhere",
        "let me think",
        "def f():\n    pass\n1",
        "found",
        "done",
    )
    assert document.roles == ("system", "user", "assistant", "assistant", "tool", "assistant")
    assert document.prompts == ("look\nhere",)
    pair = Record(messages, rejected=[Message("assistant", "worse")])
    assert document_of_record(pair).texts[-1] == "worse"
    with pytest.raises(ValueError, match="2 roles for 1 texts"):
        Document(("a",), ("user", "user"))


def test_frequent_phrases_of_a_chain() -> None:
    screen = Screen([sampled_8gram(items()), PrefixPass(items())])
    document = Document((FULL,))
    assert screen.check([document])[0].fate == "drop"
    frequent = screen.find_frequent([document] * 20)
    assert set(frequent) == {"sampled_8gram"} and frequent["sampled_8gram"][" ".join(WORDS[:8])] == 20
    outcome = pickle.loads(pickle.dumps(screen)).check([document])[0]
    assert outcome.passes[0].hits[0].why == "frequent phrases"
    assert outcome.taken_by == "prefix_hash"


def test_names_of_passes_must_differ() -> None:
    with pytest.raises(ValueError, match="two passes are called sampled_8gram"):
        Screen([sampled_8gram(items()), sampled_8gram(items())])
