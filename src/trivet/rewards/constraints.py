"""Instructions that a program can check: pure functions of the answer's text, each with its wording.

A constraint is a JSON object with a `kind` and the kind's parameters: {"kind": "word_count", "at_most": 50}.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet.types import Scored

Constraint = Mapping[str, Any]

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
# Linear in the text, whatever a policy writes: runs are tried once, blanks do not cross lines.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]\u201d\u2019]*+(?=\s|$)")
_BULLET = re.compile(r"^[^\S\n]*[-*\u2022][^\S\n]+\S", re.MULTILINE)
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No)\.", re.IGNORECASE)
_DECIMAL_POINT = re.compile(r"(?<=\d)\.(?=\d)")


class ConstraintError(ValueError):
    """A constraint is not one of the known ones or its parameters make no sense."""


def words(text: str) -> list[str]:
    """Runs of letters and digits; apostrophes and hyphens inside belong to the word."""
    return _WORD.findall(text)


def sentences(text: str) -> int:
    """Ends of sentences, plus one for a last sentence without its end mark."""
    clean = _DECIMAL_POINT.sub("", _ABBREVIATION.sub("", text)).strip()
    if not clean:
        return 0
    pieces = [piece for piece in _SENTENCE_END.split(clean) if words(piece)]
    return len(pieces)


def _has(text: str, word: str) -> bool:
    """The word or phrase stands in the text by itself, whatever its case."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _cased(text: str, fold: Callable[[str], str]) -> bool:
    return any(char.isalpha() for char in text) and text == fold(text)


def _between(value: int, at_least: int | None, at_most: int | None) -> bool:
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _range(noun: str) -> Callable[[Constraint], str]:
    def say(c: Constraint) -> str:
        low, high = c.get("at_least"), c.get("at_most")
        if low is not None and high is not None:
            return f"exactly {low} {noun}" if low == high else f"between {low} and {high} {noun}"
        return f"at least {low} {noun}" if low is not None else f"at most {high} {noun}"

    return say


def _quote(items: Sequence[str]) -> str:
    return ", ".join(f'"{item}"' for item in items)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of constraint. `parameters`: name -> type ("int?", "words", "text", "int"; ? is optional)."""

    check: Callable[[str, Constraint], bool]
    say: Callable[[Constraint], str]
    parameters: Mapping[str, str]


_RANGE = {"at_least": "int?", "at_most": "int?"}

KINDS: dict[str, Kind] = {
    "lower_case": Kind(
        lambda text, c: _cased(text, str.lower), lambda c: "Write in lower case only, no capital letters.", {}
    ),
    "upper_case": Kind(
        lambda text, c: _cased(text, str.upper), lambda c: "Write in capital letters only.", {}
    ),
    "word_count": Kind(
        lambda text, c: _between(len(words(text)), c.get("at_least"), c.get("at_most")),
        lambda c: f"Use {_range('words')(c)}.",
        _RANGE,
    ),
    "sentence_count": Kind(
        lambda text, c: _between(sentences(text), c.get("at_least"), c.get("at_most")),
        lambda c: f"Write {_range('sentences')(c)}.",
        _RANGE,
    ),
    "paragraph_count": Kind(
        lambda text, c: len([p for p in re.split(r"\n\s*\n", text) if p.strip()]) == c["count"],
        lambda c: f"Write exactly {c['count']} paragraphs, with an empty line between them.",
        {"count": "int"},
    ),
    "required_words": Kind(
        lambda text, c: all(_has(text, word) for word in c["words"]),
        lambda c: f"Use each of these words: {_quote(c['words'])}.",
        {"words": "words"},
    ),
    "forbidden_words": Kind(
        lambda text, c: not any(_has(text, word) for word in c["words"]),
        lambda c: f"Do not use any of these words: {_quote(c['words'])}.",
        {"words": "words"},
    ),
    "starts_with": Kind(
        lambda text, c: text.strip().casefold().startswith(c["phrase"].casefold()),
        lambda c: f'Begin with "{c["phrase"]}".',
        {"phrase": "text"},
    ),
    "ends_with": Kind(
        lambda text, c: text.strip().casefold().endswith(c["phrase"].casefold()),
        lambda c: f'End with "{c["phrase"]}" and nothing after it.',
        {"phrase": "text"},
    ),
    "no_commas": Kind(lambda text, c: "," not in text, lambda c: "Do not use any commas.", {}),
    "no_digits": Kind(
        lambda text, c: not any(char.isdigit() for char in text), lambda c: "Do not use any digits.", {}
    ),
    "bullet_count": Kind(
        lambda text, c: len(_BULLET.findall(text)) == c["count"],
        lambda c: f'Give exactly {c["count"]} bullet points, each on its own line and beginning with "- ".',
        {"count": "int"},
    ),
    "quotation": Kind(
        lambda text, c: (
            len(text.strip()) > 2 and text.strip()[0] in '"\u201c' and text.strip()[-1] in '"\u201d'
        ),
        lambda c: "Put your whole answer in double quotation marks.",
        {},
    ),
    "contains_number": Kind(
        lambda text, c: any(char.isdigit() for char in text), lambda c: "Use at least one number.", {}
    ),
}


def validate(constraint: Any) -> Constraint:
    """The constraint itself. Raises ConstraintError: unknown kind or parameter, one missing or amiss."""
    if not isinstance(constraint, Mapping) or not isinstance(constraint.get("kind"), str):
        raise ConstraintError(f"a constraint is an object with a `kind`, not {constraint!r}")
    name = constraint["kind"]
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConstraintError(f"no constraint {name!r}{hint} (known: {', '.join(KINDS)})")
    parameters = KINDS[name].parameters
    unknown = sorted(set(constraint) - {"kind", *parameters})
    if unknown:
        raise ConstraintError(f"constraint {name!r} takes no {unknown} (parameters: {list(parameters)})")
    for key, kind in parameters.items():
        value = constraint.get(key)
        if value is None and kind.endswith("?"):
            continue
        if not _fits(value, kind.rstrip("?")):
            raise ConstraintError(
                f"constraint {name!r}: {key} is {value!r}; it must be {_WORDING[kind.rstrip('?')]}"
            )
    if parameters is _RANGE:
        _check_range(name, constraint)
    return constraint


_WORDING = {
    "int": "a whole number of at least 1",
    "text": "text",
    "words": "a list of words",
}


def _fits(value: Any, kind: str) -> bool:
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if kind == "text":
        return isinstance(value, str) and bool(value.strip())
    return isinstance(value, list | tuple) and bool(value) and all(_fits(word, "text") for word in value)


def _check_range(name: str, c: Constraint) -> None:
    low, high = c.get("at_least"), c.get("at_most")
    if low is None and high is None:
        raise ConstraintError(f"constraint {name!r} needs at_least, at_most or both")
    if low is not None and high is not None and low > high:
        raise ConstraintError(f"constraint {name!r}: at_least {low} is over at_most {high}")


def describe(constraint: Constraint) -> str:
    """The constraint as a sentence for a prompt. Raises ConstraintError."""
    valid = validate(constraint)
    return KINDS[valid["kind"]].say(valid)


def check(constraint: Constraint, text: str) -> bool:
    """Whether the text keeps to the constraint. Raises ConstraintError; an empty text keeps to nothing."""
    valid = validate(constraint)
    return bool(text.strip()) and KINDS[valid["kind"]].check(text, valid)


def score(constraints: Sequence[Constraint], text: str, *, partial: float = 0.0) -> Scored:
    """1 when all hold, else `partial` times the share that does. Parts: each kind (1 or 0), and the share.

    Raises ConstraintError, also for no constraints at all.
    """
    if not constraints:
        raise ConstraintError("there is no constraint to check")
    held = [check(constraint, text) for constraint in constraints]
    share = sum(held) / len(held)
    parts: dict[str, float] = {}
    for constraint, holds in zip(constraints, held, strict=True):
        name = constraint["kind"]
        parts[name] = min(parts.get(name, 1.0), float(holds))
    parts["held"] = share
    return Scored(1.0 if all(held) else partial * share, parts)
