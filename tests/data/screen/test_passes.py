"""The rules of the passes: thresholds, guards, and what each calls borderline."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.screen.allow import Allow
from trivet.data.screen.documents import Document
from trivet.data.screen.exact import (
    CharacterOptions,
    CharacterPass,
    PrefixOptions,
    PrefixPass,
    normalised_prefix,
)
from trivet.data.screen.items import Guards, Item, prepare_items
from trivet.data.screen.ngrams import NgramOptions, NgramPass, exhaustive_8gram, sampled_8gram
from trivet.data.screen.passes import PASSES, make_pass
from trivet.data.screen.verdicts import Hit, Pass
from trivet.data.screen.words import normalise

# 27 words make exactly 20 phrases, and the first k words of them k - 7.
WORDS = [f"w{i}" for i in range(27)]


def items(*texts: str, allow: Allow | None = None, guards: Guards | None = None):  # type: ignore[no-untyped-def]
    return prepare_items([Item("toy", str(i), (text,)) for i, text in enumerate(texts)], guards, allow)


def check(one: Pass, *texts: str) -> list[Hit]:
    (hits,) = one.check([Document(texts)])
    return hits


@pytest.mark.parametrize(
    ("words", "verdict"),
    [(27, "drop"), (17, "drop"), (16, "borderline"), (12, "borderline"), (11, None), (7, None)],
)
def test_half_of_an_items_phrases(words: int, verdict: str | None) -> None:
    one = sampled_8gram(items(" ".join(WORDS)))
    hits = check(one, "before " + " ".join(WORDS[:words]) + " after")
    assert [hit.verdict for hit in hits] == ([verdict] if verdict else [])
    if hits:
        assert (hits[0].hits, hits[0].of, hits[0].score) == (words - 7, 20, (words - 7) / 20)
        assert hits[0].matched[0] == " ".join(WORDS[:8])


def test_hits_of_two_items_are_not_added_up() -> None:
    other = [f"v{i}" for i in range(27)]
    one = sampled_8gram(items(" ".join(WORDS), " ".join(other)))
    hits = check(one, " ".join(WORDS[:16] + other[:16]))
    assert [(hit.item.item.id, hit.hits, hit.verdict) for hit in hits] == [
        ("0", 9, "borderline"),
        ("1", 9, "borderline"),
    ]


def test_phrases_in_several_messages_count_once() -> None:
    one = sampled_8gram(items(" ".join(WORDS)))
    (hit,) = check(one, " ".join(WORDS[:16]), " ".join(WORDS[:14]), " ".join(WORDS[10:17]))
    assert hit.hits == 9


def test_all_phrases_or_a_sample() -> None:
    text = " ".join(f"w{i}" for i in range(107))
    prepared = items(text)
    assert check(sampled_8gram(prepared), text)[0].of == 20
    assert check(exhaustive_8gram(prepared), text)[0].of == 100


def test_short_items_may_need_every_phrase() -> None:
    text = "one two three four five six seven eight nine"
    one = NgramPass(items(text), NgramOptions(strict_below=4))
    assert check(one, text)[0].verdict == "drop"
    (hit,) = check(one, text.removesuffix(" nine"))
    assert (hit.verdict, hit.why, hit.hits, hit.of) == ("borderline", "few phrases", 1, 2)
    assert check(sampled_8gram(items(text)), text.removesuffix(" nine"))[0].verdict == "drop"


def test_items_too_short_for_phrases_are_compared_whole() -> None:
    one = sampled_8gram(items("Name three rivers in Wales today."))
    ask = Document(
        ("be kind", "name **three** rivers in Wales: today!", "no"), ("system", "user", "assistant")
    )
    said = Document(("hi", "Name three rivers in Wales today."), ("user", "assistant"))
    longer = Document(("Name three rivers in Wales today please",))
    hits = one.check([ask, said, longer])
    assert [[(hit.verdict, hit.why) for hit in some] for some in hits] == [[("drop", "whole")], [], []]
    off = NgramPass(one.items, NgramOptions(whole=False))
    assert off.check([ask]) == [[]]
    assert list(off.unusable()) == ["toy/0"] and one.unusable() == {}


def test_frequent_phrases_of_the_corpus_weigh_nothing() -> None:
    saying = "it was the best of times it was the worst of times it was the age"
    text = saying + " said the clerk of the northern harbour office on monday"
    one = sampled_8gram(items(text, guards=Guards(frequent_documents=5, frequent_share=0.1)))
    sample = [Document((f"{saying} number {i}",)) for i in range(10)] + [Document(("else",))] * 90
    assert check(one, saying)[0].why == "overlap"
    frequent = one.find_frequent(sample)
    assert set(frequent.values()) == {10} and len(frequent) == 9
    assert all(phrase in saying for phrase in frequent)
    assert check(one, text)[0].verdict == "drop"
    assert one.unusable() == {}
    # An item that is all saying can be borderline at most, and this is said.
    two = sampled_8gram(items(saying, guards=Guards(frequent_documents=5, frequent_share=0.1)))
    assert check(two, saying)[0].verdict == "drop"
    two.find_frequent(sample)
    (hit,) = check(two, saying)
    assert (hit.verdict, hit.why) == ("borderline", "frequent phrases")
    assert "frequent" in two.unusable()["toy/0"]


def test_allowed_phrases_are_not_looked_for() -> None:
    saying = "to be or not to be that is"
    allow = Allow(phrases={saying: "Shakespeare"})
    one = sampled_8gram(items(saying, allow=allow))
    assert check(one, saying) == []
    assert one.unusable() == {"toy/0": "all its phrases are allowed"}


def test_thresholds_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="borderline_from"):
        NgramOptions(threshold=0.2)


@given(st.text(max_size=300), st.integers(1, 60))
def test_prefix_of_a_cut_text_is_that_of_the_whole(text: str, characters: int) -> None:
    for whole in (text, text * 40):
        assert normalised_prefix(whole, characters) == normalise(whole)[:characters]


def test_prefix_pass() -> None:
    long = " ".join(f"word{i}" for i in range(200))
    one = PrefixPass(items(long, "Name three rivers in Wales."), PrefixOptions())
    documents = [
        Document(("sys", long.upper() + " and more"), ("system", "user")),
        Document((long[:380] + " other " + long[380:],)),
        Document(("Name three rivers in Wales!",)),
        Document(("Name three rivers in Wales, and why",)),
        Document((), ()),
    ]
    assert [[hit.item.item.id for hit in hits] for hits in one.check(documents)] == [["0"], [], ["1"], [], []]


def test_character_pass() -> None:
    # 200 characters make 141 windows.
    text = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(200))
    prepared = items(f"q {text} r s t u v w x", guards=Guards.off())
    bare = CharacterPass(prepared, CharacterOptions(min_share=0))
    assert [hit.verdict for hit in check(bare, text[:64])] == ["drop"]
    assert [(hit.verdict, hit.why, hit.hits) for hit in check(bare, text[:63])] == [
        ("borderline", "few windows", 4)
    ]
    assert check(bare, text[:59]) == []
    guarded = CharacterPass(prepared)
    assert [(hit.verdict, hit.why) for hit in check(guarded, text[:64])] == [("borderline", "small share")]
    assert [hit.verdict for hit in check(guarded, text[:100])] == ["drop"]
    (why,) = CharacterPass(items("Name three rivers in Wales.")).unusable().values()
    assert "under 60 characters" in why


def test_an_item_of_few_windows_needs_all() -> None:
    text = "a river runs by the old stone mill and the wind is cold in may"  # 62 characters
    one = CharacterPass(items(text))
    assert [(hit.verdict, hit.hits, hit.of) for hit in check(one, text)] == [("drop", 3, 3)]
    assert [hit.verdict for hit in check(one, text[:-1])] == ["borderline"]


@pytest.mark.parametrize("name", PASSES)
def test_passes_by_name(name: str) -> None:
    one = make_pass(name, items(" ".join(WORDS)))
    assert one.name == name
    with pytest.raises(ValueError, match=f"{name} has no option 'treshold'"):
        make_pass(name, items(), {"treshold": 1})


def test_options_and_names_of_passes() -> None:
    prepared = items(" ".join(f"w{i}" for i in range(107)))
    (hit,) = check(
        make_pass("exhaustive_8gram", prepared, {"threshold": 0.9}), prepared.items[0].item.texts[0]
    )
    assert hit.of == 100
    five = make_pass("sampled_8gram", prepared, {"samples": 5, "borderline": "drop"})
    assert check(five, prepared.items[0].item.texts[0])[0].of == 5 and five.borderline == "drop"
    with pytest.raises(ValueError, match="did you mean 'dense'"):
        make_pass("denze", prepared)


def test_passes_are_picklable() -> None:
    text = " ".join(WORDS * 3)
    prepared = items(text, "Name three rivers in Wales.")
    for one in (
        sampled_8gram(prepared),
        exhaustive_8gram(prepared),
        PrefixPass(prepared),
        CharacterPass(prepared),
    ):
        other = pickle.loads(pickle.dumps(one))
        assert other.name == one.name
        assert check(other, text) == check(one, text) != []
