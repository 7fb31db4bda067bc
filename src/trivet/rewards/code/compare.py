"""Results compared with what was expected, on the trusted side: coded values, and what programs print.

No object of the program's making exists here: values stay in the code of `inside/trivet_codec.py`, which is
walked along the expected one. Members of sets and keys of dicts are compared by a text of their own, since
numbers chosen to collide would make hashing them take for ever.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trivet.rewards.code.inside.trivet_codec import DEPTH, CodecError, integer

_SMALL_EXPONENT = 400
_LONGEST_BITS = 8_000


@dataclass(frozen=True, slots=True)
class How:
    """`tolerance`: of floats, absolute and relative (None: equal). `json`: what JSON cannot tell apart is
    equal (tuples and lists, numbers as keys and their text). `wrapped`: the expected value may stand in a
    list of one.
    """

    tolerance: float | None = None
    json: bool = False
    wrapped: bool = False


def same(expected: Any, got: Any, how: How) -> bool:
    """Whether two coded values are equal as by Python's `==`; objects on the other side never are."""
    try:
        if _same(expected, got, how, 0):
            return True
        return (
            how.wrapped
            and isinstance(expected, list)
            and len(expected) == 1
            and _same(expected[0], got, how, 0)
        )
    except (CodecError, TypeError, ValueError, LookupError, ArithmeticError):
        return False  # the expected value is sound: what is wrong is the program's


def number(code: Any) -> Any:
    """The number that is coded, None for what is none."""
    if isinstance(code, bool | int | float):
        return code
    if isinstance(code, dict) and len(code) == 1:
        ((tag, inner),) = code.items()
        if tag == "i":
            return integer(code)
        if tag == "c":
            return complex(float(inner[0]), float(inner[1]))
        if tag == "F":
            return _fraction(*map(integer, inner))
        if tag == "D":
            return _decimal(inner)
    return None


def _fraction(over: int, under: int) -> Fraction:
    if max(over.bit_length(), under.bit_length()) > _LONGEST_BITS:  # reducing it takes the square of that
        raise CodecError("a fraction is too long")
    return Fraction(over, under)


def _decimal(text: Any) -> Any:
    from decimal import Decimal

    if len(text) > _LONGEST_BITS:
        raise CodecError("a decimal is too long")
    value = Decimal(text)
    # Exact as a fraction where that is of a sane size, so that it can be compared with all other numbers.
    if value.is_finite() and -_SMALL_EXPONENT < value.adjusted() < _SMALL_EXPONENT:
        return Fraction(value)
    return math.nan


def _same(expected: Any, got: Any, how: How, depth: int) -> bool:
    if depth > DEPTH:
        raise CodecError("a value is nested too deeply")
    left = number(expected)
    if left is not None:
        right = number(got)
        return right is not None and _equal(left, right, how)
    if expected is None or isinstance(expected, str):
        return type(expected) is type(got) and expected == got
    (kind, items), (other_kind, others) = _parts(expected, how), _parts(got, how)
    if kind != other_kind or kind in "Io" or len(items) != len(others):
        return False
    if kind == "s":
        return {_text(one, depth) for one in items} == {_text(one, depth) for one in others}
    if kind == "d":
        return _same_dicts(items, others, how, depth)
    if kind == "b":
        return items == others
    return all(_same(one, other, how, depth + 1) for one, other in zip(items, others, strict=True))


def _parts(code: Any, how: How) -> tuple[str, Any]:
    """(kind, items): kinds whose values may be equal share a letter."""
    if isinstance(code, list):
        return "l", code
    if not isinstance(code, dict) or len(code) != 1:
        return "o", []
    ((tag, inner),) = code.items()
    if tag == "t" and how.json:
        return "l", inner
    if tag == "r":
        return "r", list(map(_plain, _range(inner)))
    return {"z": "s", "B": "b", "n": "o"}.get(tag, tag), inner if isinstance(inner, list | str) else []


def _range(bounds: Any) -> list[int]:
    """Ranges are equal when their items are."""
    found = range(*map(integer, bounds))
    if not found:
        return []
    return [found[0], found[-1], found.step] if found[0] != found[-1] else [found[0]]


def _plain(value: int) -> Any:
    return {"i": format(value, "x")}


def _same_dicts(items: Any, others: Any, how: How, depth: int) -> bool:
    def keyed(pairs: Any) -> dict[str, Any]:
        return {_text(str(key) if how.json and type(key) is int else key, depth): one for key, one in pairs}

    left, right = keyed(items), keyed(others)
    return left.keys() == right.keys() and all(_same(left[k], right[k], how, depth + 1) for k in left)


def _equal(left: Any, right: Any, how: How) -> bool:
    if left == right:
        return True
    if how.tolerance is None or not isinstance(left, float) or isinstance(right, complex):
        return False
    if math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    try:
        return math.isclose(left, float(right), rel_tol=how.tolerance, abs_tol=how.tolerance)
    except OverflowError:
        return False


def _text(code: Any, depth: int) -> str:
    """A text that is equal exactly for equal hashable values."""
    if depth > DEPTH:
        raise CodecError("a value is nested too deeply")
    value = number(code)
    if value is not None:
        return _number_text(value)
    if code is None or isinstance(code, str):
        return json.dumps(code)
    kind, items = _parts(code, How())
    if kind in "Iold":
        raise CodecError("no value that can be hashed")
    if kind == "b":
        return f"b{json.dumps(items)}"
    inner = [_text(one, depth + 1) for one in items]
    return f"{kind}[{','.join(sorted(set(inner)) if kind == 's' else inner)}]"


def _number_text(value: Any) -> str:
    if isinstance(value, complex):
        return _number_text(value.real) if not value.imag else f"c{value.real.hex()},{value.imag.hex()}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"f{value}"
    exact = Fraction(value)
    return f"n{exact.numerator:x}/{exact.denominator:x}"


# -- what programs print ---------------------------------------------------------------------------


def same_output(expected: str, got: str, tolerance: float | None = None) -> bool:
    """Line by line, without blanks at the ends of lines and empty lines at the end. With a tolerance also
    word by word, of which those that are both numbers may differ by it (absolutely or relatively)."""
    left, right = _lines(expected), _lines(got)
    if left == right:
        return True
    if tolerance is None or len(left) != len(right):
        return False
    return all(_same_line(one, other, tolerance) for one, other in zip(left, right, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _same_line(left: str, right: str, tolerance: float) -> bool:
    words, others = left.split(), right.split()
    return len(words) == len(others) and all(
        one == other or _near(one, other, tolerance) for one, other in zip(words, others, strict=True)
    )


def _near(left: str, right: str, tolerance: float) -> bool:
    if len(right) > 400 or "_" in right:
        return False
    try:
        one, other = float(left), float(right)
    except ValueError:
        return False
    return math.isfinite(other) and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
