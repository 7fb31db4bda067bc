"""The cases of the rules, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.data.screen.characters import CharacterIndex
from trivet.data.screen.documents import Document
from trivet.data.screen.exact import CharacterOptions, CharacterPass, PrefixPass
from trivet.data.screen.items import Guards, Item, prepare_items
from trivet.data.screen.ngrams import NgramOptions, NgramPass, exhaustive_8gram, sampled_8gram
from trivet.data.screen.oracle import prefix_hash, shared_windows, substring_hits, words_hits
from trivet.data.screen.phrases import PhraseIndex
from trivet.data.screen.verdicts import Hit
from trivet.data.screen.words import normalise, phrases, split_words


@pytest.fixture(scope="module")
def cases(shared_dir: Path) -> list[dict[str, Any]]:
    path = shared_dir / "cases" / "decontamination.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(case: dict[str, Any]) -> tuple[str, ...]:
    return tuple(message["content"] for message in case["messages"])


def document(case: dict[str, Any]) -> Document:
    return Document(texts(case), tuple(message["role"] for message in case["messages"]))


def bare(case: dict[str, Any], **guards: Any):  # type: ignore[no-untyped-def]
    items = [Item("case", str(i), (text,)) for i, text in enumerate(case["items"])]
    return prepare_items(items, Guards(**guards) if guards else Guards.off())


def by_item(hits: list[Hit]) -> dict[int, Hit]:
    return {int(hit.item.item.id): hit for hit in hits}


def phrase_hits(wanted: list[str], case: dict[str, Any], match: Any) -> int:
    return len(PhraseIndex.build(wanted, match=match).scan([texts(case)])[1])


def test_phrase_numbers(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        for item, expect in zip(case["items"], case["expect"]["per_item"], strict=True):
            sampled = phrases([split_words(item)])
            every = phrases([split_words(item)], samples=None)
            got = {
                "sampled_hits": phrase_hits(sampled, case, "words"),
                "sampled_of": len(sampled),
                "substring_hits": phrase_hits(sampled, case, "substring"),
                "exhaustive_hits": phrase_hits(every, case, "words"),
                "exhaustive_of": len(every),
                "exhaustive_any": phrase_hits(every, case, "words") > 0,
            }
            assert got == {key: expect[key] for key in got}, case["id"]
            assert got["sampled_hits"] == len(words_hits(sampled, texts(case)))
            assert got["substring_hits"] == len(substring_hits(sampled, texts(case)))


def test_verdicts(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        prepared = bare(case)
        one = NgramPass(prepared, NgramOptions(whole=False))
        every = NgramPass(prepared, NgramOptions(samples=None, whole=False))
        sampled, exhaustive = (by_item(some.check([document(case)])[0]) for some in (one, every))
        dropped = {i for i, hit in sampled.items() if hit.verdict == "drop"}
        assert bool(dropped) == case["expect"]["drop_by_sampled_8gram"], case["id"]
        for i, expect in enumerate(case["expect"]["per_item"]):
            assert (i in dropped) == expect["sampled_drop"], case["id"]
            dropped_by_all = i in exhaustive and exhaustive[i].verdict == "drop"
            assert dropped_by_all == expect["exhaustive_drop"], case["id"]


def test_characters(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        (shared,) = CharacterIndex.build([[normalise(item)] for item in case["items"]]).scan([texts(case)])
        for i, expect in enumerate(case["expect"]["per_item"]):
            assert (i in shared) == expect["char60"], case["id"]
            assert set(shared.get(i, [])) == shared_windows(case["items"][i], texts(case)), case["id"]


def test_prefixes(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        found = by_item(PrefixPass(bare(case)).check([document(case)])[0])
        first = next(message["content"] for message in case["messages"] if message["role"] == "user")
        for i, expect in enumerate(case["expect"]["per_item"]):
            assert (i in found) == expect["prefix400"], case["id"]
            assert expect["prefix400"] == (prefix_hash(case["items"][i]) == prefix_hash(first)), case["id"]


def test_boilerplate_case_is_kept_once_it_is_stripped(cases: list[dict[str, Any]]) -> None:
    (case,) = [case for case in cases if "right_answer_after_boilerplate_strip" in case["expect"]]
    boilerplate = case["items"][0].partition("?")[2]
    prepared = bare(case, instructions=(boilerplate,))
    for one in (sampled_8gram(prepared), exhaustive_8gram(prepared), CharacterPass(prepared)):
        assert one.check([document(case)]) == [[]]
    # And the item itself is still found, with the instruction and without.
    asked = [Document((case["items"][0],)), Document((case["items"][0].partition("?")[0],))]
    assert [[hit.verdict for hit in hits] for hits in sampled_8gram(prepared).check(asked)] == [["drop"]] * 2


def test_short_item_is_found_whole(cases: list[dict[str, Any]]) -> None:
    (case,) = [case for case in cases if "right_answer_by_whole_match" in case["expect"]]
    (hits,) = sampled_8gram(bare(case)).check([document(case)])
    assert [hit.verdict for hit in hits] == ["drop"]


def test_five_windows_and_a_share_of_the_item(cases: list[dict[str, Any]]) -> None:
    """What the default guard makes of each: the one case of a shared instruction is the only loud one."""
    got = {}
    for case in cases:
        options = CharacterOptions()
        (hits,) = CharacterPass(bare(case), options).check([document(case)])
        got[case["id"].split("_")[0]] = sorted(hit.verdict for hit in hits)
    assert got["c01"] == got["c02"] == got["c12"] == ["drop"]
    assert got["c03"] == got["c10"] == []
