"""Short answers as text: each way of matching takes what it should, and nothing a policy writes hurts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.rewards.text import (
    TextError,
    TextVerifier,
    accepted,
    choice_in,
    normalise,
    number_in,
    ratio,
    read,
)
from trivet.types import Scored, Unscored

NASTY = [
    "",
    " \n\t ",
    "\x00\xff" * 1000,
    "\ud800" * 1000,
    "a" * 1_000_000,
    "answer is " * 100_000,
    "\\boxed{" * 100_000,
    "A," * 500_000,
    "1," * 500_000,
    "(" * 1_000_000,
    "1,234" * 200_000,
    "\n" * 1_000_000,
    "\ufdfa" * 100_000,
]


def value(verifier: TextVerifier, text: str, gold: object, **options: object) -> float:
    reward = verifier.score(text, gold, **options)  # type: ignore[arg-type]
    assert isinstance(reward, Scored)
    return reward.value


@pytest.mark.parametrize(
    ("match", "text", "gold", "right"),
    [
        ("exact", " Paris\n", "Paris", 1),
        ("exact", "paris", "Paris", 0),
        ("exact", "7", 7, 1),
        ("exact", "7", 7.0, 1),
        ("exact", "Rome", ["Paris", "Rome"], 1),
        ("normalised", "The U.S.A.", "usa", 1),
        ("normalised", "co-operate", "co operate", 1),
        ("normalised", "\uff21\uff22 c", "ab C", 1),
        ("normalised", "Stra\u00dfe", "STRASSE", 1),
        ("normalised", "?!", "?!", 1),
        ("normalised", "?!", "the", 0),
        ("normalised", "Paris, I think", "Paris", 0),
        ("fuzzy", "the Eifel Tower", "Eiffel tower", 1),
        ("fuzzy", "the Pisa tower", "Eiffel tower", 0),
        ("number", "The answer is 3.14", 3.14, 1),
        ("number", "about\n12 km", "12", 1),
        ("number", "\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("number", "answer: 1,250", 1250, 1),
        ("number", "first 3, at last\n3 or 4", 3, 0),
        ("number", "3e8", "300000000", 1),
        ("number", "-5", 5, 0),
        ("choice", "B", "B", 1),
        ("choice", "(B)", "b", 1),
        ("choice", "The answer is **B**: because A is wrong.", "(B)", 1),
        ("choice", "so\nAnswer: B) beta", "B", 1),
        ("choice", "\\boxed{\\text{B}}", "B", 1),
        ("choice", "the answer is A or B", "B", 0),
        ("choice", "A B C D", "B", 0),
        ("choice", "Because of that", "B", 0),
        ("choice", "But no", "B", 0),
        ("choice", "Answer: A, C", "C and A", 1),
        ("choice", "Answer: A", "A,C", 0),
    ],
)
def test_matching(match: str, text: str, gold: object, right: int) -> None:
    assert value(TextVerifier(match), text, gold) == right  # type: ignore[arg-type]


def test_tolerances_are_relative_or_absolute() -> None:
    assert value(TextVerifier("number"), "3.14", "3.15") == 0
    assert value(TextVerifier("number", relative=0.01), "3.14", "3.15") == 1
    assert value(TextVerifier("number", absolute=0.5), "0.4", "0") == 1
    assert value(TextVerifier("number", relative=0.5), "0.4", "0") == 0


def test_the_ratio_is_a_part_and_the_threshold_decides() -> None:
    close = ratio("eifel tower", "eiffel tower")  # 11 + 12 letters, one deletion: 1 - 1/23
    assert close == pytest.approx(22 / 23)
    reward = TextVerifier("fuzzy", threshold=0.99).score("Eifel Tower", "Eiffel Tower")
    assert reward == Scored(0.0, {"answered": 1.0, "ratio": close})
    assert value(TextVerifier("fuzzy", threshold=22 / 23 - 1e-9), "Eifel Tower", "Eiffel Tower") == 1


def test_an_options_own_text_counts() -> None:
    choice = TextVerifier("choice")
    assert value(choice, "The answer is the beta test", "B", choices=["alpha", "Beta test"]) == 1
    assert value(choice, "alpha", "B", choices={"A": "alpha", "B": "Beta"}) == 0
    assert isinstance(choice.score("C", "C", choices=["alpha", "beta"]), Unscored)


def test_where_the_answer_stands() -> None:
    text = "The answer is 4.\nNo: the answer is 5.\n\\boxed{6}\nlast \n"
    assert [read(text, where) for where in ("box", "phrase", "last_line")] == ["6", "6", "last"]
    assert read("the answer is 4. \nthe answer is: x = 5.", "phrase") == "x = 5"
    assert read("nothing", "box") is read("nothing", "phrase") is read(" \n", "whole") is None
    reward = TextVerifier("exact", read="box").score("6", "6")
    assert reward == Scored(0.0, {"answered": 0.0})


@pytest.mark.parametrize("gold", [None, "", " ", [], True, {}, [None], b"x"])
def test_no_gold_is_no_score(gold: object) -> None:
    reward = TextVerifier("exact").score("x", gold)
    assert isinstance(reward, Unscored)
    assert reward.cause == "no_gold"


def test_a_gold_that_cannot_be_read_is_no_score() -> None:
    for match, gold in (("number", "many"), ("choice", "first"), ("fuzzy", "x" * 20_000)):
        reward = TextVerifier(match).score("x", gold)  # type: ignore[arg-type]
        assert isinstance(reward, Unscored)
        assert reward.cause == "bad_gold"


@pytest.mark.parametrize("text", NASTY, ids=lambda text: repr(text[:8]))
@pytest.mark.parametrize("match", ["exact", "normalised", "fuzzy", "number", "choice"])
def test_anything_may_be_written(match: str, text: str) -> None:
    gold = {"number": "5", "choice": "B"}.get(match, "good")
    for where in ("whole", "box", "phrase", "last_line"):
        assert value(TextVerifier(match, read=where), text, gold) == 0  # type: ignore[arg-type]


def test_too_long_is_said() -> None:
    assert TextVerifier().score("a" * 10_001, "a") == Scored(0.0, {"answered": 1.0, "too_long": 1.0})


@pytest.mark.parametrize(
    "options",
    [
        {"match": "Exact"},
        {"read": "first"},
        {"threshold": 0},
        {"threshold": 1.5},
        {"relative": -1},
        {"absolute": float("inf")},
        {"absolute": float("nan")},
    ],
)
def test_arguments_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(TextError, match=f"{next(iter(options))} "):
        TextVerifier(**options)  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_an_answer_matches_itself(text: str) -> None:
    for match in ("exact", "normalised", "fuzzy"):
        if accepted(text):
            assert value(TextVerifier(match), text, text) == 1


@given(st.text(max_size=60))
def test_normal_forms_are_stable(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once or not once


@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4))
def test_a_fraction_is_read_exactly(number: object) -> None:
    assert number_in(str(number)) == number


@given(st.text(max_size=200))
def test_readings_never_raise(text: str) -> None:
    number_in(text)
    choice_in(text)
