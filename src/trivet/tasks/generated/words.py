"""Lists and words: sorting, reversal, counting, and chains of small transformations.

Answers are exact. Everything is written in letters, digits and spaces of the tiny model's alphabet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from trivet.tasks.generated.base import Item, final, grades, register_generator

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VOWELS = "aeiou"


def _word(rng: random.Random, length: int, letters: str = _LETTERS) -> str:
    return "".join(rng.choice(letters) for _ in range(length))


@register_generator("sorting")
def sorting(rng: random.Random, *, difficulty: int | list[int] = 1, form: str = "boxed") -> Iterator[Item]:
    """Numbers in rising order. Grade g sorts 2g to 2g + 1 numbers; from grade 3 they have two digits, from
    grade 4 some are negative."""
    wanted = grades(difficulty, 5)
    while True:
        grade = rng.choice(wanted)
        low, high = (-99 if grade >= 4 else 0), (99 if grade >= 3 else 9)
        numbers = [rng.randint(low, high) for _ in range(2 * grade + rng.randint(0, 1))]
        given = " ".join(map(str, numbers))
        answer = " ".join(map(str, sorted(numbers)))
        yield Item(
            given, f"sort: {given}", answer, final(answer, form), exact=True, tags=(f"difficulty:{grade}",)
        )


@register_generator("reversal")
def reversal(rng: random.Random, *, difficulty: int | list[int] = 1, form: str = "boxed") -> Iterator[Item]:
    """A word backwards. Grade g has 2g + 1 to 2g + 2 letters."""
    wanted = grades(difficulty, 5)
    while True:
        grade = rng.choice(wanted)
        word = _word(rng, 2 * grade + rng.randint(1, 2))
        answer = word[::-1]
        yield Item(
            word, f"reverse: {word}", answer, final(answer, form), exact=True, tags=(f"difficulty:{grade}",)
        )


@register_generator("counting")
def counting(rng: random.Random, *, difficulty: int | list[int] = 1, form: str = "boxed") -> Iterator[Item]:
    """How often a letter stands in a word of 4g to 4g + 3 letters (grade g), drawn from three letters."""
    wanted = grades(difficulty, 5)
    while True:
        grade = rng.choice(wanted)
        letters = "".join(rng.sample(_LETTERS, 3))
        word = _word(rng, 4 * grade + rng.randint(0, 3), letters)
        letter = rng.choice(letters)
        answer = str(word.count(letter))
        steps = " ".join(f"{char}{n}" for n, char in enumerate((c for c in word if c == letter), 1))
        yield Item(
            f"{letter}/{word}",
            f"count {letter} in {word}",
            answer,
            final(answer, form, steps),
            tags=(f"difficulty:{grade}",),
        )


_STEPS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "upper": str.upper,
    "double": lambda word: "".join(char * 2 for char in word),
    "drop first": lambda word: word[1:],
    "drop last": lambda word: word[:-1],
    "rotate": lambda word: word[1:] + word[:1],
    "no vowels": lambda word: "".join(char for char in word if char.lower() not in _VOWELS),
    "sort": lambda word: "".join(sorted(word)),
    "next letter": lambda word: "".join(_next(char) for char in word),
}


def _next(char: str) -> str:
    """The letter after it, z to a, case kept."""
    base = ord("a") if char.islower() else ord("A")
    return chr(base + (ord(char) - base + 1) % 26)


@register_generator("transforms")
def transforms(rng: random.Random, *, difficulty: int | list[int] = 1, form: str = "boxed") -> Iterator[Item]:
    """A word through g steps, in order (grade g): reverse, upper, double, rotate, no vowels, ..."""
    wanted = grades(difficulty, 6)
    while True:
        grade = rng.choice(wanted)
        names = rng.sample(list(_STEPS), grade)
        word = _word(rng, rng.randint(4, 6))
        states = [word]
        for name in names:
            states.append(_STEPS[name](states[-1]))
        answer = states[-1]
        if not answer:
            continue
        chain = ", ".join(names)
        yield Item(
            f"{chain}/{word}",
            f"{chain}: {word}",
            answer,
            final(answer, form, " ".join(states[1:-1])),
            exact=True,
            tags=(f"difficulty:{grade}",),
        )
