"""Values written as JSON or as Python literals."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any, NoReturn

_LONGEST_LITERAL = 200_000  # characters; parsing Python takes some 100 bytes of memory a character


class NotReadable(ValueError):
    """Text that is neither JSON nor a Python literal."""


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def read_json(text: str) -> Any:
    """JSON without NaN and Infinity. Raises NotReadable."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"{str(error)[:80]} in {text[:80]!r}") from None


def read_value(text: str, literals: bool = True) -> tuple[Any, bool]:
    """(value, it was a Python literal). Line breaks inside strings are forgiven. Raises NotReadable."""
    try:
        return read_json(text), False
    except NotReadable as error:
        if not literals:
            raise
        trouble = error
    try:
        return json.loads(text, parse_constant=_refuse, strict=False), True
    except (ValueError, RecursionError):
        pass
    if len(text) > _LONGEST_LITERAL or not text.lstrip().startswith(("{", "[", "(")):
        raise trouble
    try:
        with warnings.catch_warnings():  # of odd escapes in strings
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise trouble from None
    return _jsonable(value), True


def _jsonable(value: Any) -> Any:
    """Tuples become lists. Raises NotReadable for sets, bytes, complex numbers and keys that are no text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0:  # finite
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _jsonable(item) for key, item in value.items()}
    raise NotReadable(f"a Python {type(value).__name__} has no JSON form")
