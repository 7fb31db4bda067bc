"""Short answers compared as text: exact, normalised, fuzzy, as a number with a tolerance, or as a choice.

Everything here is pure and bounded: of an answer over `max_answer` letters only equality is looked at.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args

from trivet.rewards import answers
from trivet.types import Reward, Scored, Unscored

Match = Literal["exact", "normalised", "fuzzy", "number", "choice"]
Read = Literal["whole", "box", "phrase", "last_line"]
_T = TypeVar("_T")

_ARTICLES = frozenset({"a", "an", "the"})
_SEPARATORS = "-/\u2010\u2011\u2012\u2013\u2014"
_PHRASE = re.compile(r"\banswer\s{0,4}(?:is|:|=)\s{0,4}:?\s{0,4}([^\n]{1,400})", re.IGNORECASE)
_NUMERAL = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,400})(?:\.\d{0,400})?(?:[eE][-+]?\d{1,4}|\s?/\s?\d{1,400})?|"
    r"(?<![\w.])[-+]?\.\d{1,400}"
)
_LETTER = r"[(\[*_{\s]*([A-Z])[)\]*_}.:]*"
_LETTERS = re.compile(
    rf"{_LETTER}(?:\s*(?:,|&|and\b)?\s*[(\[*]*[A-Z][)\]*_}}.:]*(?![A-Za-z]))*(?![A-Za-z'\u2019])"
)
_OR = re.compile(r"^\s*(?:or|/)\s*[(\[*]*[A-Z](?![a-z])")


class TextError(ValueError):
    """A text verifier's arguments make no sense."""


# -- reading the answer --------------------------------------------------------------------------


def read(text: str, where: Read) -> str | None:
    """The answer in `text`: all of it, the last box, what follows the last "answer is" (or the last box), or
    the last line with anything on it. None when there is none."""
    if where == "whole":
        return text.strip() or None
    if where == "last_line":
        lines = text.rstrip().rsplit("\n", 1)
        return lines[-1].strip() or None
    boxed = answers.last_boxed(text)
    if boxed is not None or where == "box":
        return boxed
    found = None
    for found in _PHRASE.finditer(text):  # noqa: B007 - the last one counts
        pass
    return found.group(1).strip().rstrip(".").strip() or None if found else None


def accepted(gold: Any) -> list[str]:
    """The accepted answers: text, a number, or a list of those. [] without."""
    if isinstance(gold, bool) or gold is None:
        return []
    if isinstance(gold, int | float):
        return [str(int(gold)) if isinstance(gold, float) and gold.is_integer() else str(gold)]
    if isinstance(gold, str):
        return [gold] if gold.strip() else []
    if isinstance(gold, list | tuple):
        return [one for item in gold for one in accepted(item)]
    return []


# -- comparing -----------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """Unicode compatibility forms in one, case folded, without punctuation, English articles and doubled
    blanks; of a text that has nothing else, its case-folded form. The usual one for short answers (SQuAD)."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(
        " " if char in _SEPARATORS else char
        for char in folded
        if unicodedata.category(char)[0] != "P" or char in _SEPARATORS
    )
    words = [word for word in kept.split() if word not in _ARTICLES]
    return " ".join(words) or " ".join(folded.split())


def ratio(left: str, right: str) -> float:
    """Similarity of two texts in 0..1: 1 - edits / both lengths, an edit being an insertion or a deletion."""
    from rapidfuzz import fuzz

    return fuzz.ratio(left, right) / 100.0


def number_in(text: str) -> Fraction | None:
    """The only numeral in a short answer (with or without a unit), exactly; None without or with several."""
    whole = answers.number(answers.normalise(text))
    if whole is not None:
        return whole
    found = _NUMERAL.findall(text)
    if len(found) != 1:
        return None
    return answers.number(answers.normalise(found[0].replace(" ", "")))


def choice_in(text: str) -> frozenset[str] | None:
    """The letters a short answer begins with ("B", "(B) because", "A, C"); None when it is none or either."""
    text = answers.normalise(text)
    match = _LETTERS.match(text)
    if match is None or _OR.match(text[match.end() :]):
        return None
    return frozenset(re.findall(r"[A-Z](?![A-Za-z])", match.group().replace("and", " ")))


class TextVerifier:
    """Scores 1 or 0 by comparing an answer with the accepted ones; unscored without any.

    `match`: "exact" (but for blanks at the ends), "normalised" (see `normalise`), "fuzzy" (1 where the
    `ratio` of the normal forms is at least `threshold`; the ratio is a part), "number" (within
    `relative * |gold|` or `absolute`), "choice" (the same letters; where the options
    are given also the option's own text). `read` says where the answer stands, see the function; numbers and
    choices are looked for in the last box, after "answer is", and at last in the last line.
    """

    def __init__(
        self,
        match: Match = "normalised",
        *,
        read: Read = "whole",
        threshold: float = 0.9,
        relative: float = 0.0,
        absolute: float = 0.0,
        max_answer: int = 10_000,
    ) -> None:
        for name, value, known in (("match", match, get_args(Match)), ("read", read, get_args(Read))):
            if value not in known:
                raise TextError(f"{name} {value!r} is not one of {', '.join(known)}")
        if not 0 < threshold <= 1:
            raise TextError(f"threshold {threshold} must be above 0 and at most 1")
        if not (0 <= relative < 1 and 0 <= absolute < float("inf")):
            raise TextError(
                f"relative {relative} must be in [0, 1) and absolute {absolute} finite, 0 or more"
            )
        if match == "fuzzy" and importlib.util.find_spec("rapidfuzz") is None:
            raise TextError("match 'fuzzy' needs the package rapidfuzz: pip install rapidfuzz")
        self.match: Match = match
        self.read: Read = read
        self.threshold = threshold
        self.relative, self.absolute = Fraction(relative), Fraction(absolute)
        self.max_answer = max_answer

    def score(self, text: str, gold: Any, *, choices: Sequence[str] | Mapping[str, str] = ()) -> Reward:
        """The reward of an answer. `gold`: text, a number, or a list of alternatives; for "choice" a letter
        or several ("A,C"). Parts: `answered`, `too_long`, `ratio` (fuzzy)."""
        golds = accepted(gold)
        if not golds:
            return Unscored("no_gold", f"the task has no usable answer: payload.answer is {gold!r}")
        if any(len(one) > self.max_answer for one in golds):
            return Unscored("bad_gold", f"the gold answer is over {self.max_answer} letters long")
        if self.match in ("number", "choice"):
            return self._number(text, golds) if self.match == "number" else _choice(text, golds, choices)
        found = read(text, self.read)
        if found is None:
            return Scored(0.0, {"answered": 0.0})
        if len(found) > self.max_answer:
            return Scored(0.0, {"answered": 1.0, "too_long": 1.0})
        if self.match == "exact":
            return _score(any(found.strip() == one.strip() for one in golds))
        left, right = normalise(found), [normalise(one) for one in golds]
        if self.match == "normalised":
            return _score(left in right)
        best = max(ratio(left, one) for one in right)
        return _score(best >= self.threshold, ratio=best)

    def _number(self, text: str, golds: Sequence[str]) -> Reward:
        values = [number_in(one) for one in golds]
        if None in values:
            return Unscored("bad_gold", f"the gold answer {golds[values.index(None)][:80]!r} is no number")
        found = _last(text, number_in)
        if found is None:
            return Scored(0.0, {"answered": 0.0})
        wanted = [value for value in values if value is not None]
        near = [abs(found - one) <= max(self.relative * abs(one), self.absolute) for one in wanted]
        return _score(any(near))


def _choice(text: str, golds: Sequence[str], choices: Sequence[str] | Mapping[str, str]) -> Reward:
    options = choices if isinstance(choices, Mapping) else dict(zip(_ALPHABET, choices, strict=False))
    wanted = [choice_in(one.upper() if len(one.strip()) == 1 else one) for one in golds]
    if None in wanted or (options and not all(one <= options.keys() for one in wanted if one)):
        return Unscored("bad_gold", f"the gold answer {golds[0][:80]!r} is no letter of an option")
    by_text = {normalise(str(option)): frozenset({letter}) for letter, option in options.items()}

    def reading(piece: str) -> frozenset[str] | None:
        return by_text.get(normalise(piece))

    found = _last(text, lambda piece: reading(piece) or choice_in(piece))
    return Scored(0.0, {"answered": 0.0}) if found is None else _score(found in wanted)


_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPTION = 2_000


def _last(text: str, reading: Callable[[str], _T | None]) -> _T | None:
    """What `reading` makes of the last box; without a box of what follows "answer is", else the last line."""
    boxed = answers.last_boxed(text)
    if boxed is not None:
        return reading(boxed[:_OPTION])
    phrase, line = read(text, "phrase"), read(text, "last_line")
    for piece in (phrase, line):
        value = reading(piece[:_OPTION]) if piece else None
        if value is not None:
            return value
    return None


def _score(same: bool, **parts: float) -> Scored:
    return Scored(float(same), {"answered": 1.0, **parts})
