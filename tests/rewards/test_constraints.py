"""Checkable instructions: each accepts what keeps to it, refuses what does not, and has a wording."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.rewards.constraints import KINDS, ConstraintError, check, describe, score, sentences, words

CASES = [
    ({"kind": "lower_case"}, "all small, 3 words.", "Not small"),
    ({"kind": "lower_case"}, "gro\u00df", "123"),
    ({"kind": "upper_case"}, "ALL LARGE 1!", "ALL LARGe"),
    ({"kind": "word_count", "at_least": 3}, "one two three", "one two"),
    ({"kind": "word_count", "at_most": 3}, "it's well-known stuff", "one two three four"),
    ({"kind": "word_count", "at_least": 2, "at_most": 3}, "one two", "one"),
    ({"kind": "sentence_count", "at_least": 2, "at_most": 2}, "One. Two!", "One."),
    ({"kind": "sentence_count", "at_most": 1}, "Dr. Who paid 3.50 today", "One. Two."),
    ({"kind": "paragraph_count", "count": 2}, "a\n\nb", "a\nb"),
    ({"kind": "required_words", "words": ["apple", "pear"]}, "Pear, apple.", "apples and pear"),
    ({"kind": "forbidden_words", "words": ["the"]}, "other theory", "in THE end"),
    ({"kind": "starts_with", "phrase": "Well then"}, "  WELL THEN, go", "so well then"),
    ({"kind": "ends_with", "phrase": "the end."}, "this is The End. \n", "the end. more"),
    ({"kind": "no_commas"}, "a b", "a, b"),
    ({"kind": "no_digits"}, "one", "1"),
    ({"kind": "contains_number"}, "1", "one"),
    ({"kind": "bullet_count", "count": 2}, "intro\n- a\n* b", "- a\n-b\n3 - 2"),
    ({"kind": "quotation"}, ' "quoted" ', '"half'),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), CASES)
def test_checks(constraint: dict[str, object], good: str, bad: str) -> None:
    assert check(constraint, good)
    assert not check(constraint, bad)
    assert not check(constraint, "  \n")
    assert describe(constraint).endswith((".", "."))


def test_every_kind_is_covered() -> None:
    assert {case[0]["kind"] for case in CASES} == set(KINDS)


@pytest.mark.parametrize(
    ("constraint", "words_"),
    [
        ({"kind": "lowercase"}, "did you mean 'lower_case'"),
        ({}, "with a `kind`"),
        ("lower_case", "with a `kind`"),
        ({"kind": "no_commas", "count": 1}, "takes no"),
        ({"kind": "word_count"}, "at_least, at_most or both"),
        ({"kind": "word_count", "at_least": 5, "at_most": 2}, "over at_most"),
        ({"kind": "word_count", "at_least": "5"}, "whole number"),
        ({"kind": "word_count", "at_least": True}, "whole number"),
        ({"kind": "bullet_count"}, "whole number"),
        ({"kind": "required_words", "words": []}, "list of words"),
        ({"kind": "required_words", "words": "apple"}, "list of words"),
        ({"kind": "starts_with", "phrase": " "}, "must be text"),
    ],
)
def test_wrong_constraints_are_refused(constraint: dict[str, object], words_: str) -> None:
    with pytest.raises(ConstraintError, match=words_):
        check(constraint, "text")


def test_score_is_binary_with_an_optional_share() -> None:
    three = [{"kind": "no_commas"}, {"kind": "lower_case"}, {"kind": "no_digits"}]
    assert score(three, "fine").value == 1.0
    assert score(three, "Not, fine").value == 0.0
    got = score(three, "Not, fine", partial=0.3)
    assert got.value == pytest.approx(0.1)
    assert got.parts == {"no_commas": 0.0, "lower_case": 0.0, "no_digits": 1.0, "held": pytest.approx(1 / 3)}
    assert score(three, "").value == 0.0
    with pytest.raises(ConstraintError, match="no constraint"):
        score([], "text")


def test_counting() -> None:
    assert words("it's 3 well-known_words") == ["it's", "3", "well-known", "words"]
    assert sentences("Mr. Smith paid $3.50. Really?! Yes") == 3
    assert sentences("...") == 0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200), st.sampled_from(CASES))
def test_checks_take_any_text(text: str, case: tuple[dict[str, object], str, str]) -> None:
    assert check(case[0], text) in (True, False)


@pytest.mark.parametrize("text", ["\n" * 1_000_000 + "x", "." * 1_000_000 + "x", "!?" * 500_000 + "x"])
def test_long_answers_take_no_longer_than_their_length(text: str) -> None:
    """Patterns that try every run from each of its places would take hours here."""
    assert not check({"kind": "bullet_count", "count": 1}, text)
    assert check({"kind": "sentence_count", "at_most": 1}, text)
