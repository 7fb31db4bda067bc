"""Coded values compared as Python compares the values, whatever a program sends; printed output."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.rewards.code.compare import How, same, same_output
from trivet.rewards.code.functional import holds
from trivet.rewards.code.inside.trivet_codec import CodecError, Decoder, Encoder, NotPlain
from trivet.rewards.code.plan import Pair

EXACT = How()
_NUMBERS = (
    st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0**60, math.inf])
    | st.sampled_from([1j, 1 + 0j, Fraction(1), Fraction(1, 2), Decimal(1), Decimal("0.5")])
)
_KEYS = _NUMBERS | st.text(max_size=2) | st.none() | st.binary(max_size=2)
_HASHABLE = st.recursive(
    _KEYS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
_VALUES = st.recursive(
    _HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.sets(_HASHABLE, max_size=3)
        | st.dictionaries(_HASHABLE, inner, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=2))
        | st.builds(range, st.integers(0, 4), st.integers(0, 4), st.integers(1, 3))
        | st.builds(bytearray, st.binary(max_size=2))
    ),
    max_leaves=8,
)


def coded(value: Any) -> Any:
    """As it arrives: through JSON."""
    return json.loads(json.dumps(Encoder()(value)))


def _nothing(tag: str, found: Any) -> Any:
    raise AssertionError(tag)


@given(_VALUES)
def test_values_travel(value: Any) -> None:
    back = Decoder(_nothing)(coded(value))
    assert type(back) is type(value) and back == value
    assert same(coded(value), coded(value), EXACT)


def _twins(value: Any) -> st.SearchStrategy[Any]:
    return st.just(value) | _VALUES


@given(_VALUES.flatmap(lambda value: st.tuples(st.just(value), _twins(value))))
def test_equal_exactly_when_python_says_so(pair: tuple[Any, Any]) -> None:
    left, right = pair
    assert same(coded(left), coded(right), EXACT) == (left == right)


@given(_NUMBERS, _NUMBERS)
def test_numbers_of_all_kinds(left: Any, right: Any) -> None:
    assert same(coded(left), coded(right), EXACT) == (left == right)
    assert same(coded({left}), coded({right}), EXACT) == ({left} == {right})
    assert same(coded({left: 1}), coded({right: 1}), EXACT) == (left == right)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*"icbBtszdqrFDIony", "x"]), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(_VALUES, _JSON)
def test_whatever_arrives_is_compared(expected: Any, arrived: Any) -> None:
    for how in (EXACT, How(0.1, json=True, wrapped=True)):
        assert same(coded(expected), arrived, how) in (True, False)
    for want in ("true", "false", "is", "unequal"):
        assert holds(Pair([], {}, want, coded(expected)), arrived) in (True, False)  # type: ignore[arg-type]
    assert holds(Pair([], {}, "near", 1.0, How(0.5)), arrived) in (True, False)


@given(_JSON)
def test_whatever_arrives_is_decoded_or_refused(arrived: Any) -> None:
    with contextlib.suppress(CodecError):
        Decoder(lambda tag, found: None)(arrived)


def test_subclasses_travel_as_their_base() -> None:
    point = namedtuple("point", "x y")
    for value, plain in [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (point(1, 2), (1, 2)),
    ]:
        assert same(coded(plain), coded(value), EXACT)


def test_what_does_not_travel() -> None:
    with pytest.raises(NotPlain):
        Encoder()(object())
    loop: list[Any] = []
    loop.append(loop)
    for value in (loop, iter(int, 1), [0] * 3_000_000):
        with pytest.raises(CodecError):
            Encoder()(value)


def test_tolerance_is_for_floats_only() -> None:
    near = How(1e-6)
    assert same(coded([1.0, (2.0,)]), coded([1.0 + 1e-9, (2,)]), near)
    assert not same(coded([1.0]), coded([1.1]), near)
    assert not same(coded(1), coded(1 + 1e-9), near)
    assert same(coded(math.nan), coded(math.nan), near) and not same(coded(math.nan), coded(math.nan), EXACT)
    assert not same(coded(1.0), coded(10**400), near)


def test_what_json_cannot_tell_apart() -> None:
    loose = How(json=True)
    assert same(coded([[1, 2]]), coded([(1, 2)]), loose) and not same(coded([[1, 2]]), coded([(1, 2)]), EXACT)
    assert same(coded({"1": 2}), coded({1: 2}), loose) and not same(coded({"1": 2}), coded({1: 2}), EXACT)
    assert same(coded([5]), coded(5), How(wrapped=True)) and not same(coded([5]), coded(5), EXACT)


def test_values_made_to_take_long_do_not() -> None:
    colliding = {"s": [{"i": format(n * ((1 << 61) - 1), "x")} for n in range(50_000)]}
    assert not same(coded(set(range(50_000))), colliding, EXACT)
    assert not same(coded(1), {"F": [{"i": "f" * 1_000_000}, {"i": "e" * 1_000_000}]}, EXACT)
    assert not same(coded(1), {"D": "9" * 1_000_000}, EXACT)
    assert not same(coded(1), {"D": "1e999999999"}, EXACT)
    assert not same(coded([1]), {"r": [0, 10**18, 1]}, EXACT)


# -- printed output --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "tolerance", "equal"),
    [
        ("4\n", "4", None, True),
        ("4", "4\n\n  \n", None, True),
        ("1 2\n3\n", "1 2  \r\n3\t\r\n", None, True),
        ("1 2", "1  2", None, False),
        ("1 2", "1\n2", None, False),
        (" 4", "4", None, False),
        ("4", "", None, False),
        ("", "", None, True),
        ("", "\n \n", None, True),
        ("0.5", "0.50", None, False),
        ("0.5 yes", "0.5000001 yes", 1e-6, True),
        ("0.5 yes", "0.51 yes", 1e-6, False),
        ("0.5 yes", "0.5 no", 1e-6, False),
        ("1000000", "1000000.5", 1e-6, True),
        ("0.5", "nan", 1e-6, False),
        ("inf", "inf", 1e-6, True),
        ("10", "1_0", 1e-6, False),
        ("1 2", "1", 1e-6, False),
    ],
)
def test_printed_output(expected: str, got: str, tolerance: float | None, equal: bool) -> None:
    assert same_output(expected, got, tolerance) is equal


@given(st.lists(st.text(alphabet="ab 1", max_size=5), max_size=4), st.integers(0, 3))
def test_blanks_at_the_ends_do_not_count(lines: list[str], more: int) -> None:
    padded = "\n".join(line + " " * more for line in lines) + "\n" * more
    assert same_output("\n".join(lines), padded)
