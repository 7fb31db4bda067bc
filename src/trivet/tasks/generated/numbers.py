"""Sums and arithmetic. Prompts use letters of the tiny model's alphabet only, and few of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from trivet.tasks.base import TasksetError
from trivet.tasks.generated.base import Item, final, grades, register_generator

_ENUMERATED = 2  # digits up to which all sums are listed


@register_generator("addition")
def addition(
    rng: random.Random, *, digits: int = 2, padded: bool = True, reverse: bool = False, form: str = "boxed"
) -> Iterator[Item]:
    """`07+35=` of two numbers of up to `digits` digits, zero-padded when `padded`.

    The answer has `digits + 1` digits when padded; `reverse` asks for it last digit first (carries then run
    in the direction of writing, which small models learn much sooner). `form`: boxed | plain | worked.
    """
    if not isinstance(digits, int) or isinstance(digits, bool) or not 1 <= digits <= 12:
        raise TasksetError(f"args.digits: {digits!r} is not a whole number from 1 to 12")
    for a, b in _pairs(rng, digits):
        width = digits if padded else 0
        left, right = str(a).zfill(width), str(b).zfill(width)
        answer = str(a + b).zfill(width + 1 if padded else 0)
        if reverse:
            answer = answer[::-1]
        yield Item(
            key=f"{digits}/{a}+{b}",
            prompt=f"{left}+{right}=",
            answer=answer,
            response=final(answer, form, _carries(a, b, digits)),
            # Reversed digits are a spelling, not a number: 010 and 01 must not be equal.
            exact=reverse,
            tags=(f"digits:{digits}",),
        )


def _pairs(rng: random.Random, digits: int) -> Iterator[tuple[int, int]]:
    top = 10**digits
    if digits <= _ENUMERATED:
        order = list(range(top * top))
        rng.shuffle(order)
        yield from (divmod(index, top) for index in order)
        return
    while True:
        yield rng.randrange(top), rng.randrange(top)


def _carries(a: int, b: int, digits: int) -> str:
    """The sum digit by digit from the right: 7+5=12 0+3+1=4."""
    steps: list[str] = []
    carry = 0
    for place in range(digits):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    return " ".join(steps)


@register_generator("arithmetic")
def arithmetic(rng: random.Random, *, difficulty: int | list[int] = 1, form: str = "boxed") -> Iterator[Item]:
    """Expressions with a whole answer. Grades: 1 one sum or difference up to 20; 2 up to 100, or a product of
    digits; 3 three terms with precedence; 4 with parentheses; 5 with an exact division and larger numbers."""
    wanted = grades(difficulty, 5)
    while True:
        grade = rng.choice(wanted)
        text, value = _EXPRESSIONS[grade](rng)
        yield Item(
            key=text,
            prompt=f"{text}=",
            answer=str(value),
            response=final(str(value), form, f"{text}={value}"),
            tags=(f"difficulty:{grade}",),
        )


def _simple(rng: random.Random, top: int) -> tuple[str, int]:
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (f"{a}+{b}", a + b) if rng.random() < 0.5 else (f"{a}-{b}", a - b)


def _second(rng: random.Random) -> tuple[str, int]:
    if rng.random() < 0.5:
        return _simple(rng, 100)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return f"{a}*{b}", a * b


def _precedence(rng: random.Random) -> tuple[str, int]:
    a, b, c = rng.randint(1, 50), rng.randint(2, 12), rng.randint(2, 12)
    sign = rng.choice((1, -1))
    if rng.random() < 0.5:
        return f"{a}{'+' if sign > 0 else '-'}{b}*{c}", a + sign * b * c
    return f"{b}*{c}{'+' if sign > 0 else '-'}{a}", b * c + sign * a


def _parentheses(rng: random.Random) -> tuple[str, int]:
    inner, value = _simple(rng, 20)
    a, b = rng.randint(2, 9), rng.randint(1, 50)
    sign = rng.choice((1, -1))
    return f"{a}*({inner}){'+' if sign > 0 else '-'}{b}", a * value + sign * b


def _division(rng: random.Random) -> tuple[str, int]:
    quotient, divisor, rest = rng.randint(2, 99), rng.randint(2, 12), rng.randint(10, 999)
    inner, value = _parentheses(rng)
    sign = rng.choice((1, -1))
    text = f"{quotient * divisor}/{divisor}{'+' if sign > 0 else '-'}{rest}+{inner}"
    return text, quotient + sign * rest + value


_EXPRESSIONS = {
    1: lambda rng: _simple(rng, 20),
    2: _second,
    3: _precedence,
    4: _parentheses,
    5: _division,
}
