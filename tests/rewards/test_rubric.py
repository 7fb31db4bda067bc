"""Rubrics: required criteria make the score, whoever checks them; what cannot be told is no 0."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trivet.rewards.chat_api import ChatError
from trivet.rewards.judge import Judge, Scale
from trivet.rewards.rubric import Rubric, RubricError
from trivet.types import Message, Reward, Scored, Unscored

ASKED = [Message("user", "Write about a cat, without commas.")]
COMMAS = {"name": "no commas", "check": {"kind": "punctuation:no_comma"}}
SHORT = {"name": "short", "check": {"kind": "word_count", "at_most": 5}, "required": False}
CAT = {"name": "about a cat", "judge": "Is it about a cat?"}
KIND = {"name": "kind", "judge": "Is it kind?", "required": False}


class Model:
    """Says yes to questions with one of the words; fails at those with "broken"."""

    def __init__(self, *yes: str) -> None:
        self.yes = yes
        self.asked: list[str] = []

    async def __call__(self, messages: Any, *, seed: int) -> str:
        prompt = messages[0]["content"]
        self.asked.append(prompt)
        if "broken" in prompt:
            raise ChatError("server", "down")
        return json.dumps({"verdict": "yes" if any(f"{word}?" in prompt for word in self.yes) else "no"})


def scored(data: list[Any], answer: str, *yes: str) -> tuple[Reward, Model]:
    model = Model(*yes)
    return asyncio.run(Rubric.from_data(data).score(ASKED, answer, judge=Judge(model))), model


def test_all_required_criteria_hold() -> None:
    reward, model = scored([COMMAS, SHORT, CAT, KIND], "A cat sat on the old wall.", "cat")
    parts = {"no commas": 1.0, "short": 0.0, "about a cat": 1.0, "kind": 0.0, "held": 1.0}
    assert reward == Scored(1.0, parts)
    assert len(model.asked) == 2


def test_a_judged_criterion_fails() -> None:
    reward, _ = scored([COMMAS, CAT], "A dog.")
    assert reward == Scored(0.0, {"no commas": 1.0, "about a cat": 0.0, "held": 0.5})


def test_the_judge_is_not_asked_where_a_check_has_failed() -> None:
    reward, model = scored([COMMAS, SHORT, CAT], "A cat, a wall.", "cat")
    assert reward == Scored(0.0, {"no commas": 0.0, "short": 1.0})
    assert model.asked == []


def test_an_optional_check_that_fails_stops_nothing() -> None:
    reward, model = scored([SHORT, CAT], "One two three four five six.", "cat")
    assert isinstance(reward, Scored)
    assert reward.value == 1.0
    assert len(model.asked) == 1


BROKEN = {"name": "unknown", "judge": "Is it broken?"}


def test_what_the_judge_cannot_say_is_unscored() -> None:
    reward, _ = scored([COMMAS, CAT, BROKEN], "A cat.", "cat")
    assert reward == Unscored("judge_unavailable", "criterion 'unknown': down")


def test_another_required_criterion_that_fails_decides_alone() -> None:
    reward, _ = scored([COMMAS, CAT, BROKEN], "A dog.")
    assert reward == Scored(0.0, {"no commas": 1.0, "about a cat": 0.0})


def test_an_optional_criterion_that_cannot_be_told_stops_nothing() -> None:
    reward, _ = scored([CAT, {**BROKEN, "required": False}], "A cat.", "cat")
    assert reward == Scored(1.0, {"about a cat": 1.0, "held": 1.0})


def test_on_a_scale_a_half_holds() -> None:
    async def five(messages: Any, *, seed: int) -> str:
        return '{"verdict": 5}'

    for top, value in ((9, 1.0), (10, 0.0)):
        judge = Judge(five, verdict=Scale(1, top))
        reward = asyncio.run(Rubric.from_data([CAT]).score(ASKED, "A cat.", judge=judge))
        assert isinstance(reward, Scored)
        assert reward.value == value


def test_without_a_judge() -> None:
    reward = asyncio.run(Rubric.from_data([COMMAS, CAT]).score(ASKED, "A cat."))
    assert isinstance(reward, Unscored)
    assert reward.cause == "no_judge"
    rubric = Rubric.from_data([COMMAS])
    assert not rubric.judged
    assert asyncio.run(rubric.score(ASKED, "A cat.")) == Scored(1.0, {"no commas": 1.0, "held": 1.0})


@pytest.mark.parametrize("answer", ["", "\x00\ud800" * 1000, "a " * 500_000])
def test_anything_may_be_written(answer: str) -> None:
    reward, _ = scored([COMMAS, SHORT, CAT], answer, "cat")
    assert isinstance(reward, Scored)
    assert reward.value == float(bool(answer))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "list of criteria"),
        ([], "list of criteria"),
        (["x"], "criterion 0 is str"),
        ([SHORT], "at least one required"),
        ([CAT, CAT], "share the names"),
        ([{"name": "x"}], "either a check or a question"),
        ([{**CAT, "check": {"kind": "no_commas"}}], "either a check or a question"),
        ([{"judge": "?"}], "needs a name"),
        ([{**CAT, "name": "held"}], "needs a name"),
        ([{**CAT, "required": "yes"}], "required true or false"),
        ([{**CAT, "weight": 2}], "unknown keys"),
        ([{"name": "x", "check": {"kind": "no_comma"}}], "'x': .*did you mean 'no_commas'"),
        ([{"name": "x", "check": {"kind": "keywords:existence"}}], "'x': .*keywords is None"),
    ],
)
def test_wrong_rubrics_are_refused(data: Any, words: str) -> None:
    with pytest.raises(RubricError, match=words):
        Rubric.from_data(data)
