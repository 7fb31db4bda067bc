"""The mathematics verifier: right verdicts, and nothing that stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.rewards import answers
from trivet.rewards.math import MathVerifier, gold_answers
from trivet.types import Reward, Scored, Unscored

T, F = True, False

# What the algebra alone gets wrong (the first seven), and what it gets right and must stay so.
PAIRS = [
    ("10", r"10\%", F),
    (r"[0,\infty)", r"x \ge 0", T),
    (r"3\times10^8", "3e8", T),
    (r"2\,000", "2000", T),
    ("12:30", "12{:}30", T),
    (r"\text{no solution}", r"\emptyset", T),
    ("47", "12+35", F),
    ("1/2", "0.5", T),
    ("1/2", r"\dfrac12", T),
    (r"50\%", "0.5", T),
    (r"50\%", "50", T),
    (r"50\%", r"50\%", T),
    ("0.5", r"50\%", T),
    (r"50\%", "51", F),
    ("10", "10 cm", T),
    ("10", r"10\text{ cm}", T),
    ("10", "10 apples", T),
    ("10 cm", "0.1 m", F),
    ("18", r"\$18", T),
    ("18", "18 dollars", T),
    ("(1,2)", "[1,2]", F),
    ("(1,2)", "(2,1)", F),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)", T),
    (r"\{1,2,3\}", "1,2,3", T),
    (r"\{1,2,3\}", "3,2,1", T),
    (r"\sqrt{8}", r"2\sqrt{2}", T),
    (r"\sqrt8", "2.828", F),
    ("1000", "1,000", T),
    ("1,000", "1000", T),
    ("300000000", "300{,}000{,}000", T),
    (r"11,\! 111,\! 100", "11111100", T),
    ("3", r"\boxed{3}", T),
    ("-3", "- 3", T),
    ("-3", "\u22123", T),
    ("-3", "3", F),
    ("x=3", "3", T),
    ("3", "x=3", T),
    ("3", "1+2=3", T),
    ("3", "x=4", F),
    (r"1\frac12", "3/2", T),
    (r"90^\circ", "90", T),
    (r"90^{\circ}", "90", T),
    (r"\text{A}", "A", T),
    (r"\text{Evelyn}", "evelyn", T),
    (r"\text{Evelyn}", "Bob", F),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", T),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", F),
    (r"\pi", "3.14159", F),
    ("1/3", "0.3333", F),
    (r"\pm 2", "2,-2", T),
    (r"1\le x\le 3", "[1,3]", T),
    ("[1,3]", r"1 \leq x \leq 3", T),
    ("(1,3]", "1<x\u22643", T),
    ("(1,3]", r"1<x<3", F),
    ("x<3", r"(-\infty,3)", T),
    (r"(-\infty,3)", "3>x", T),
    (r"(-\infty,3)", "3<x", F),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", T),
    (r"x^2+2x+1", "(x+1)^2", T),
    ("6 - 5i", "-5i+6", T),
    ("100", "10^2", T),
    (r"3\times10^8", r"3 \cdot 10^{8}", T),
    ("300000000", r"3 \times 10^8", T),
    ("21_7", "21_8", F),
    (r"\emptyset", r"\{\}", T),
    (r"\emptyset", "0", F),
    ("0", r"\emptyset", F),
    ("5", r"\sqrt{25}", T),
    ("5", "1++", F),
    ("5", ")(", F),
    ("5", "abc", F),
    ("5", "", F),
    ("2", "2x", F),
    ("0", "-0", T),
    ("0.5", ".50", T),
]

# Each of these kept the algebra busy for over five seconds.
BLOW_UPS = [
    "9^{9^9}",
    "(10^{10})!",
    r"\sum_{k=1}^{10^9} k",
    "3^{40000000}+1",
    r"\binom{100000000}{50000000}",
    "123456789^{1234567}",
    "9^9^9",
    "99999!",
    "2**(10**9)",
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(limit_s=2.0)
    yield verifier
    verifier.close()


def verify(verifier: MathVerifier, text: str, gold: object) -> Reward:
    return asyncio.run(verifier.verify(text, gold))


@pytest.mark.parametrize(("gold", "answer", "right"), PAIRS)
def test_verdicts(verifier: MathVerifier, gold: str, answer: str, right: bool) -> None:
    reward = verify(verifier, rf"So the answer is $\boxed{{{answer}}}$.", gold)
    assert isinstance(reward, Scored), reward
    assert reward.value == float(right)
    assert reward.parts["answered"] == 1.0


@pytest.mark.parametrize("answer", BLOW_UPS)
def test_blow_ups_are_refused_before_algebra(verifier: MathVerifier, answer: str) -> None:
    for gold in ("5", "x+1"):
        reward = verify(verifier, rf"\boxed{{{answer}}}", gold)
        assert isinstance(reward, Scored)
        assert reward.value == 0
    big = verify(verifier, r"\boxed{8^{8^8}}", answer)
    assert isinstance(big, Unscored)
    assert big.cause == "verifier_refused"


def test_algebra_without_end_is_unscored_and_the_pool_survives(verifier: MathVerifier) -> None:
    async def mixed() -> list[Reward]:
        texts = [r"\boxed{(x+y+z+1)^{200}}"] * 2 + [r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt{9}}"]
        return await asyncio.gather(*(verifier.verify(text, r"\sqrt{8}") for text in texts))

    rewards = asyncio.run(mixed())
    assert [getattr(r, "cause", None) for r in rewards[:2]] == ["verifier_timeout"] * 2
    assert [getattr(r, "value", None) for r in rewards[2:]] == [1.0, 0.0]
    assert verify(verifier, r"\boxed{\frac{\sqrt{32}}{2}}", r"2\sqrt{2}") == Scored(1.0, {"answered": 1.0})


def test_several_boxes_the_last_counts(verifier: MathVerifier) -> None:
    assert verify(verifier, r"first \boxed{4}, final \boxed{5}", "5") == Scored(1.0, {"answered": 1.0})
    assert verify(verifier, r"first \boxed{5}, final \boxed{4}", "5") == Scored(0.0, {"answered": 1.0})
    assert verify(verifier, r"\boxed{5} and then \boxed{4", "5") == Scored(1.0, {"answered": 1.0})


def test_no_answer_is_zero_and_no_gold_is_unscored(verifier: MathVerifier) -> None:
    assert verify(verifier, "the answer is 5", "5") == Scored(0.0, {"answered": 0.0})
    assert verify(verifier, "", "5") == Scored(0.0, {"answered": 0.0})
    for gold in (None, "", " ", [], {}, True):
        reward = verify(verifier, r"\boxed{5}", gold)
        assert isinstance(reward, Unscored)
        assert reward.cause == "no_gold"


def test_gold_may_be_a_number_or_alternatives(verifier: MathVerifier) -> None:
    assert verify(verifier, r"\boxed{5}", 5) == Scored(1.0, {"answered": 1.0})
    assert verify(verifier, r"\boxed{5}", 5.0) == Scored(1.0, {"answered": 1.0})
    assert verify(verifier, r"\boxed{six}", ["5", "six"]) == Scored(1.0, {"answered": 1.0})
    assert gold_answers(r"so \boxed{7}") == ["7"]


def test_long_answers_never_reach_algebra(verifier: MathVerifier) -> None:
    reward = verify(verifier, r"\boxed{" + "1+" * 4000 + "1}", "4001")
    assert reward == Scored(0.0, {"answered": 1.0, "refused": 1.0})


def test_unreadable_gold_is_unscored(verifier: MathVerifier) -> None:
    reward = verify(verifier, r"\boxed{x}", r"\frac{")
    assert isinstance(reward, Unscored)
    assert reward.cause == "bad_gold"


def test_works_off_the_main_thread(verifier: MathVerifier) -> None:
    async def elsewhere() -> Reward:
        return await asyncio.to_thread(lambda: asyncio.run(verifier.verify(r"\boxed{\sqrt{12}}", r"2\sqrt3")))

    assert asyncio.run(elsewhere()) == Scored(1.0, {"answered": 1.0})


@pytest.mark.parametrize(
    ("text", "fallback", "found"),
    [
        (r"\boxed{\{1,2\}}", "none", r"\{1,2\}"),
        (r"\boxed{\frac{1}{2}}", "none", r"\frac{1}{2}"),
        (r"\boxed 5", "none", "5"),
        (r"\fbox{5}", "none", "5"),
        (r"\boxed{}", "none", ""),
        (r"\boxed{5", "none", None),
        ("The answer is 7.", "none", None),
        ("The answer is 7.", "phrase", "7"),
        ("Answer: x = 2", "phrase", "x = 2"),
        ("3 and then 1,234.", "phrase", None),
        ("3 and then 1,234.", "number", "1,234"),
        ("no digits", "number", None),
    ],
)
def test_extraction(text: str, fallback: answers.Fallback, found: str | None) -> None:
    assert answers.extract(text, fallback) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", Fraction(2469, 2)),
        ("12,34", None),
        ("-.5", Fraction(-1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("1e99999", None),
        ("3/0", None),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("1.2.3", None),
        ("", None),
        ("5.", Fraction(5)),
    ],
)
def test_numbers(text: str, value: Fraction | None) -> None:
    assert answers.number(text) == value


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_rules_never_fail_and_equal_text_is_equal(text: str) -> None:
    form = answers.normalise(text)
    assert answers.quick(form, form) is bool(form)
    answers.too_large(form)
    answers.align(form, "[0,1]")
    answers.extract(text, "number")


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_never_need_algebra(a: int, b: int) -> None:
    assert answers.quick(answers.normalise(f"{a:,}"), answers.normalise(str(b))) is (a == b)
