"""Plain Python values as JSON, by exact type; both sides of a sandbox's wall use it.

None, bool, float, str and lists stand for themselves, as do small ints. All else is an object with one key:
`i` int (hexadecimal), `c` complex, `b` bytes, `B` bytearray, `t` tuple, `s` set, `z` frozenset, `d` dict
(pairs), `q` deque, `r` range, `F` Fraction, `D` Decimal, `I` an iterator's items, `y` a built-in class, `o`
an object that stays where it is (its number), `n` a name on the other side. Values of subclasses travel as
their base's: their methods are not asked.
"""

from __future__ import annotations

import builtins
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

DEPTH = 150
NODES = 250_000  # of a result: values within values; 64 letters, or two commas, count as one
SMALL = 1 << 53
_ITEMS = 200_000


class CodecError(ValueError):
    """The value is too deep or too large, or the message is none of ours."""


class NotPlain(CodecError):
    """A value of a type that does not travel."""


class Encoder:
    """`keep(value)` gives what stands for a value that does not travel; without it NotPlain is raised.
    `given`: for arguments."""

    def __init__(self, keep: Callable[[Any], Any] | None = None, *, given: bool = False) -> None:
        self._keep = keep
        # What tests hand over may be larger than results, so that any result may be handed over again.
        self._left, self._depth = (4 * NODES, DEPTH + 50) if given else (NODES, DEPTH)

    def __call__(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if depth > self._depth or self._left < 0:
            raise CodecError("a value is nested too deeply or too large")
        if value is None or value is True or value is False:
            return value
        for base, encode in _ENCODERS:
            if issubclass(type(value), base):
                return encode(self, value, depth + 1)
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self(value.tolist(), depth + 1)
        if hasattr(type(value), "__next__"):
            found = list(itertools.islice(value, _ITEMS + 1))
            if len(found) > _ITEMS:
                raise CodecError("an iterator gives too many items")
            return {"I": self.all(found, depth + 1)}
        return self._other(value, depth)

    def all(self, values: Any, depth: int) -> list[Any]:
        return [self(one, depth) for one in values]

    def text(self, value: str) -> str:
        self._left -= (len(value) >> 6) + (value.count(",") >> 1)
        if self._left < 0:
            raise CodecError("a value is too large")
        return value

    def _other(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is type and value.__module__ == "builtins" and vars(builtins).get(value.__name__) is value:
            return {"y": value.__name__}
        if kind.__module__ == "fractions" and kind.__name__ == "Fraction":
            return {"F": [self(value.numerator, depth + 1), self(value.denominator, depth + 1)]}
        if kind.__module__ == "decimal" and kind.__name__ == "Decimal":
            return {"D": str(value)}
        if self._keep is None:
            raise NotPlain(f"a value of type {kind.__name__} does not travel")
        return self._keep(value)


def _int(encoder: Encoder, value: int, depth: int) -> Any:
    plain = int.__int__(value)
    return plain if -SMALL < plain < SMALL else {"i": encoder.text(int.__format__(plain, "x"))}


def _pairs(encoder: Encoder, value: dict[Any, Any], depth: int) -> Any:
    return {"d": [[encoder(key, depth), encoder(one, depth)] for key, one in dict.items(value)]}


_ENCODERS: tuple[tuple[type, Callable[[Encoder, Any, int], Any]], ...] = (
    (int, _int),
    (str, lambda e, v, d: e.text(str.__str__(v))),
    (float, lambda e, v, d: float.__float__(v)),
    (list, lambda e, v, d: e.all(list.__iter__(v), d)),
    (tuple, lambda e, v, d: {"t": e.all(tuple.__iter__(v), d)}),
    (dict, _pairs),
    (set, lambda e, v, d: {"s": e.all(set.__iter__(v), d)}),
    (frozenset, lambda e, v, d: {"z": e.all(frozenset.__iter__(v), d)}),
    (bytes, lambda e, v, d: {"b": e.text(bytes.hex(v))}),
    (bytearray, lambda e, v, d: {"B": e.text(bytearray.hex(v))}),
    (complex, lambda e, v, d: {"c": [v.real, v.imag]}),
    (range, lambda e, v, d: {"r": e.all((v.start, v.stop, v.step), d)}),
    (deque, lambda e, v, d: {"q": e.all(deque.__iter__(v), d)}),
    (type({}.keys()), lambda e, v, d: {"I": e.all(v, d)}),
    (type({}.values()), lambda e, v, d: {"I": e.all(v, d)}),
    (type({}.items()), lambda e, v, d: {"I": e.all(v, d)}),
)


def integer(found: Any) -> int:
    """An int as `encode` writes it. CodecError."""
    if isinstance(found, dict) and isinstance(found.get("i"), str):
        found = int(found["i"], 16)
    if not isinstance(found, int):
        raise CodecError("an integer was expected")
    return found


def _fraction(found: Any) -> Any:
    from fractions import Fraction

    return Fraction(integer(found[0]), integer(found[1]))


def _decimal(found: Any) -> Any:
    from decimal import Decimal

    return Decimal(found)


def _class(found: Any) -> type:
    value = vars(builtins)[found]
    if not isinstance(value, type):
        raise CodecError(f"{found!r} is no class")
    return value


class Decoder:
    """`look_up(tag, found)` gives the objects of the tags `o` and `n`."""

    def __init__(self, look_up: Callable[[str, Any], Any], depth: int = DEPTH) -> None:
        self._look_up = look_up
        self._depth = depth

    def __call__(self, found: Any) -> Any:
        """The value. CodecError for whatever is no value's code."""
        try:
            return self._value(found, 0)
        except CodecError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise CodecError(f"no value: {type(error).__name__}") from error

    def _value(self, found: Any, depth: int) -> Any:
        if depth > self._depth:
            raise CodecError("a value is nested too deeply")
        if isinstance(found, list):
            return [self._value(one, depth + 1) for one in found]
        if not isinstance(found, dict):
            return found
        ((tag, inner),) = found.items()
        if tag in ("o", "n"):
            return self._look_up(tag, inner)
        if tag == "d":
            return {self._value(key, depth + 1): self._value(one, depth + 1) for key, one in inner}
        if tag in _MADE:
            return _MADE[tag](self._value(one, depth + 1) for one in inner)
        return _READ[tag](inner)


_MADE: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "s": set,
    "z": frozenset,
    "q": deque,
    "I": lambda items: iter(list(items)),
    "r": lambda items: range(*items),
}
_READ: dict[str, Callable[[Any], Any]] = {
    "i": lambda found: int(found, 16),
    "c": lambda found: complex(*found),
    "b": bytes.fromhex,
    "B": bytearray.fromhex,
    "F": _fraction,
    "D": _decimal,
    "y": _class,
}
