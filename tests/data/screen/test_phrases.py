"""The fast phrase scanner finds what the plain rule finds, and nothing else."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.screen.oracle import substring_hits, words_hits
from trivet.data.screen.phrases import Match, PhraseIndex, batches
from trivet.data.screen.words import BYTE_TABLE, fold, normalise, phrases, sampled_starts, split_words

# Few words, so that runs repeat; parts of one another, long ones equal in their first eight bytes, and
# letters outside ASCII, one of which has a lower case of two characters and one a lower case by position.
WORDS = [
    *("the", "he", "cat", "cats", "at", "a", "A", "is", "his", "7", "42", "extraordinarily", "extraordinary"),
    *("straße", "STRASSE", "Ünder", "ünder", "İstanbul", "ΟΔΟΣ", "οδός", "河流", "ab_cd", "x²", "naïve"),
]
GLUE = [" ", " ", " ", ", ", ".\n", "**", "_", "’", " — ", "\u00a0", "\u3000", "\0", "\x85", "-"]
ORACLE = {"words": words_hits, "substring": substring_hits}
MATCHES: list[Match] = ["words", "substring"]

text_of_words = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GLUE)), max_size=40).map(
    lambda pairs: "".join(word + glue for word, glue in pairs)
)


def found(index: PhraseIndex, documents: list[list[str]]) -> list[set[str]]:
    out: list[set[str]] = [set() for _ in documents]
    document_H, phrase_H = index.scan(documents)
    for document, phrase in zip(document_H.tolist(), phrase_H.tolist(), strict=True):
        out[document].add(index.phrase(phrase))
    return out


@given(st.text(max_size=200))
def test_folding_keeps_exactly_the_words(text: str) -> None:
    assert [word.decode() for word in fold(text).translate(BYTE_TABLE).split()] == split_words(text)


@pytest.mark.parametrize("text", ["ΟΔΟΣ ΣΑΣ", "İx", "a\ud800b", "ǅ ﬁ ẞ", "١٢٣", "e\u0301", "a\u200bb"])
def test_folding_of_odd_letters(text: str) -> None:
    assert [word.decode() for word in fold(text).translate(BYTE_TABLE).split()] == split_words(text)


def test_normal_form() -> None:
    assert normalise("**84** Über_alles,\n don't!") == "84 über alles don t"
    assert normalise("...") == ""


@given(st.integers(0, 400), st.integers(1, 30))
def test_sampled_starts(windows: int, samples: int) -> None:
    starts = sampled_starts(windows, samples)
    assert len(starts) == min(windows, samples)
    assert starts == sorted(set(starts))
    assert all(0 <= start < windows for start in starts)
    if windows and samples > 1:
        assert starts[0] == 0 and starts[-1] == windows - 1


def test_phrases_do_not_cross_segments_and_are_distinct() -> None:
    first, second = list("abcdefghi"), list("klmnopqr")
    assert phrases([first, second]) == ["a b c d e f g h", "b c d e f g h i", "k l m n o p q r"]
    assert phrases([["a"] * 30]) == ["a a a a a a a a"]
    assert phrases([first[:7]]) == []


def test_every_pair_hits_on_word_borders_only() -> None:
    item = split_words("he was sure that nobody would find the cat")
    index = {match: PhraseIndex.build(phrases([item]), match=match) for match in MATCHES}
    text = "she was sure that nobody would find the cats again"
    assert found(index["words"], [[text]]) == [set()]
    assert found(index["substring"], [[text]]) == [set(phrases([item]))]


def test_messages_are_apart_for_words_and_one_text_for_substring() -> None:
    item = split_words("one two three four five six seven eight")
    documents = [
        ["one two three four", "five six seven eight"],
        ["one two three", ""],
        ["four five six seven eight"],
    ]
    assert found(PhraseIndex.build(phrases([item])), documents) == [set(), set(), set()]
    index = PhraseIndex.build(phrases([item]), match="substring")
    assert found(index, documents) == [{" ".join(item)}, set(), set()]  # and never across documents


@pytest.mark.parametrize("match", MATCHES)
@given(st.data())
def test_equals_the_plain_rule(match: Match, data: st.DataObject) -> None:
    items = data.draw(st.lists(text_of_words, max_size=4))
    documents = data.draw(st.lists(st.lists(text_of_words, max_size=3), max_size=4))
    n = data.draw(st.integers(3, 9))
    wanted = list(dict.fromkeys(p for item in items for p in phrases([split_words(item)], n, None)))
    index = PhraseIndex.build(wanted, n, match)
    assert found(index, documents) == [ORACLE[match](wanted, document) for document in documents]


def random_pair(rng: random.Random) -> tuple[str, list[str]]:
    """An item, and a document that holds parts of it: cut, edited, glued to other words."""
    item = [rng.choice(WORDS) for _ in range(rng.randrange(6, 40))]
    document = []
    for _ in range(rng.randrange(1, 4)):
        words = [rng.choice(WORDS) for _ in range(rng.randrange(0, 20))]
        begin = rng.randrange(len(item))
        part = item[begin : begin + rng.randrange(1, 30)]
        if part and rng.random() < 0.3:
            part[rng.randrange(len(part))] = rng.choice(WORDS)
        at = rng.randrange(len(words) + 1)
        joined = [word + rng.choice(GLUE) for word in (*words[:at], *part, *words[at:])]
        document.append(("s" if rng.random() < 0.2 else "") + "".join(joined))
    return " ".join(item), document


def agree(pairs: int, seed: int) -> None:
    rng = random.Random(seed)
    hits = 0
    for _ in range(pairs // 50):
        batch = [random_pair(rng) for _ in range(50)]
        wanted = [phrases([split_words(item)]) for item, _ in batch]
        union = list(dict.fromkeys(phrase for some in wanted for phrase in some))
        for match in MATCHES:
            got = found(PhraseIndex.build(union, match=match), [document for _, document in batch])
            for mine, some, (_, document) in zip(got, wanted, batch, strict=True):
                truth = ORACLE[match](some, document)
                assert mine & set(some) == truth, (match, some, document)
                hits += len(truth)
    assert hits > pairs  # the pairs are not empty of hits


def test_random_pairs() -> None:
    agree(1_000, seed=1)


@pytest.mark.slow
def test_twenty_thousand_random_pairs() -> None:
    agree(20_000, seed=2)


def test_saved_and_pickled_indexes_find_the_same(tmp_path: Path) -> None:
    rng = random.Random(3)
    pairs = [random_pair(rng) for _ in range(40)]
    wanted = list(dict.fromkeys(p for item, _ in pairs for p in phrases([split_words(item)])))
    documents = [document for _, document in pairs]
    index = PhraseIndex.build(wanted)
    index.save(tmp_path / "index")
    assert any(found(index, documents))
    for other in (PhraseIndex.load(tmp_path / "index"), pickle.loads(pickle.dumps(index))):
        assert found(other, documents) == found(index, documents)
    assert index.nbytes < 64 * len(wanted) + sum(len(p.encode()) for p in wanted) + (1 << 13)


def test_an_empty_index_and_empty_documents() -> None:
    index = PhraseIndex.build([])
    assert len(index) == 0
    assert found(index, [["some text"], [], [""]]) == [set(), set(), set()]
    assert found(PhraseIndex.build(["a b c d e f g h"]), []) == []


def test_phrases_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 words"):
        PhraseIndex.build(["a b c"])
    with pytest.raises(ValueError, match="at least 3"):
        PhraseIndex.build([], n=2, match="substring")


def test_a_long_word_is_told_from_one_that_begins_and_measures_the_same() -> None:
    word, other = "abcdefgh12345", "abcdefgh54321"
    phrase = " ".join([word] * 8)
    index = PhraseIndex.build([phrase])
    assert found(index, [[" ".join([other] * 8)], [phrase]]) == [set(), {phrase}]


def test_phrases_of_equal_hashes_are_all_found_in_one_text() -> None:
    a, b, c = (" ".join([f"abcdefgh{k}"] * 8) for k in (111, 222, 333))
    index = PhraseIndex.build([b, c])
    assert len(set(index.hash_P.tolist())) == 1
    assert found(index, [[f"{a} x {b} x {a} x {c}"], [f"{a}. {a}"], [f"{c} x {a}"]]) == [{b, c}, set(), {c}]


def test_a_phrase_cut_by_a_border_is_still_found_behind_it() -> None:
    phrase = "one two three four five six seven eight"
    document = ["one two three four five", f"six seven eight. {phrase}", f"{phrase} " * 50]
    assert found(PhraseIndex.build([phrase]), [document, document[:1]]) == [{phrase}, set()]


def test_batches_hold_all_documents_in_order() -> None:
    documents = [["a" * size, "b"] for size in (5, 300, 1, 2, 700, 3)]
    parts = list(batches(iter(documents), 200))
    assert [document for part in parts for document in part] == documents
    assert len(parts) == 3
