"""Real questions with checkable constraints: what `env: instruct` plays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from trivet.rewards.constraints import describe
from trivet.tasks.base import TasksetError, nearest
from trivet.tasks.generated.base import Item, grades, register_generator
from trivet.tasks.load import records
from trivet.types import content_hash

_PROMPTS = ("prompt", "question", "problem", "instruction", "query")
_READ = 50_000  # questions read at most
_TIMES = 1_000  # constraint sets drawn per question before the stream ends

# Common words, so that requiring or forbidding them is neither trivial nor absurd. None of them stands in
# the phrases below, so that no set of constraints contradicts itself.
_COMMON = (
    "about after again also always another because before between both could down each even every first from"
    " great "
    "have high home into just know large last life little long make many more most much must never next only "
    "other over part people place right same should small some still such take than their these thing think "
    "those through time under very water what when where which while work world would year"
)
_WORDS = _COMMON.split()
_STARTS = ("well then", "in short", "let me explain", "here is my answer", "good question")
_ENDS = ("that is all.", "is there anything else?", "i hope this helps.", "the end.")

Maker = Callable[[random.Random], dict[str, Any]]


def _range(rng: random.Random, low: int, high: int, step: int) -> dict[str, int]:
    a = rng.randrange(low, high, step)
    kind = rng.randrange(3)
    if kind == 0:
        return {"at_least": a}
    if kind == 1:
        return {"at_most": a}
    return {"at_least": a, "at_most": a + rng.randrange(step, 3 * step + 1, step)}


# Constraints of one family exclude each other: a set takes at most one of each.
_FAMILIES: dict[str, tuple[Maker, ...]] = {
    "case": (lambda rng: {"kind": "lower_case"}, lambda rng: {"kind": "upper_case"}),
    "length": (
        lambda rng: {"kind": "word_count", **_range(rng, 20, 120, 10)},
        lambda rng: {"kind": "sentence_count", **_range(rng, 2, 8, 1)},
    ),
    "words": (
        lambda rng: {"kind": "required_words", "words": rng.sample(_WORDS, rng.randint(1, 3))},
        lambda rng: {"kind": "forbidden_words", "words": rng.sample(_WORDS, rng.randint(1, 3))},
    ),
    "frame": (
        lambda rng: {"kind": "starts_with", "phrase": rng.choice(_STARTS)},
        lambda rng: {"kind": "ends_with", "phrase": rng.choice(_ENDS)},
        lambda rng: {"kind": "quotation"},
        lambda rng: {"kind": "bullet_count", "count": rng.randint(2, 5)},
    ),
    "marks": (lambda rng: {"kind": "no_commas"},),
    "digits": (lambda rng: {"kind": "no_digits"}, lambda rng: {"kind": "contains_number"}),
}


def draw(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """`count` constraints (at most 6) that can all be kept at once."""
    families = rng.sample(sorted(_FAMILIES), count)
    return [rng.choice(_FAMILIES[family])(rng) for family in families]


def _questions(source: str, subset: str | None, split: str, field: str | None) -> list[str]:
    texts: dict[str, None] = {}
    for record in islice(records(source, subset, split), _READ):
        if field is None:
            field = next((name for name in _PROMPTS if name in record.row), None)
            if field is None:
                raise TasksetError(f"{record.place}: say args.field (columns: {', '.join(record.row)})")
        if field not in record.row:
            raise TasksetError(f"{record.place}: no column {field!r}{nearest(field, record.row)}")
        text = record.row[field]
        if not isinstance(text, str) or not text.strip():
            raise TasksetError(f"{record.place}: column {field!r} holds no text")
        texts[text.strip()] = None
    if not texts:
        raise TasksetError(f"{source}: it is empty")
    return list(texts)


@register_generator("constraints")
def constraints(
    rng: random.Random,
    *,
    questions: str,
    field: str | None = None,
    subset: str | None = None,
    questions_split: str = "train",
    difficulty: int | list[int] = [1, 2, 3],  # noqa: B006 - never changed
    per_question: int = 1,
) -> Iterator[Item]:
    """Questions of a file or hub data set (`questions`, column `field`), each with g constraints (grade g, 1
    to 6) and `per_question` times. A question is in train or in test with all of its variants."""
    wanted = grades(difficulty, len(_FAMILIES))
    if not isinstance(per_question, int) or not 1 <= per_question <= _TIMES:
        raise TasksetError(f"args.per_question: {per_question!r} is not a whole number from 1 to {_TIMES}")
    texts = _questions(questions, subset, questions_split, field)
    rng.shuffle(texts)
    for variant in range(per_question):
        for text in texts:
            grade = rng.choice(wanted)
            chosen = draw(rng, grade)
            asked = " ".join(describe(constraint) for constraint in chosen)
            key = content_hash(text)
            yield Item(
                key=f"{key}/{variant}",
                group=key,
                prompt=f"{text}\n\n{asked}",
                answer="",
                response="",
                tags=(f"difficulty:{grade}", *(f"constraint:{c['kind']}" for c in chosen)),
                payload={"constraints": chosen},
            )
