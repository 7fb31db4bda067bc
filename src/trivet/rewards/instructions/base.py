"""What a kind of instruction is: a pure function of the answer's text, and the parameters it takes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trivet.rewards.constraints import ConstraintError

Check = Callable[..., bool]


class InstructionError(ConstraintError):
    """An instruction is not one of the known ones, or its parameters are missing or amiss."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`check(text, **parameters)`. `parameters`: name -> type, a key of `TYPES`."""

    check: Check
    parameters: Mapping[str, str]


KINDS: dict[str, Kind] = {}

# Known by name, and why they are not judged: an answer to them is unscored.
UNSUPPORTED = {"words:start_verb": "whether a word is a verb here takes a part-of-speech tagger"}


def kind(name: str, **parameters: str) -> Callable[[Check], Check]:
    """Decorator: makes a function known as the instruction `name`. Raises InstructionError where another has
    the name, or a parameter's type is unknown."""
    for key, type_ in parameters.items():
        if type_ not in TYPES:
            raise InstructionError(f"instruction {name!r}: {key} has no known type {type_!r}: {list(TYPES)}")

    def register(check: Check) -> Check:
        known = KINDS.get(name)
        if known is not None and known.check.__qualname__ != check.__qualname__:
            raise InstructionError(f"instruction {name!r} is taken by {known.check.__module__}")
        KINDS[name] = Kind(check, parameters)
        return check

    return register


# -- parameters ----------------------------------------------------------------------------------


def _whole(value: Any, low: int) -> int:
    """Data sets write whole numbers as 8 or 8.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    if value != int(value) or value < low:
        raise ValueError
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    return [_text(one) for one in value]


def _letter(value: Any) -> str:
    letter = _text(value).strip()
    if len(letter) != 1:
        raise ValueError
    return letter


def _relation(value: Any) -> str:
    if value not in RELATIONS:
        raise ValueError
    return str(value)


def _percentage(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise ValueError
    return float(value)


def _language(value: Any) -> str:
    from trivet.rewards.instructions.language import LANGUAGES

    if value not in LANGUAGES:
        raise ValueError
    return str(value)


RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda count, limit: count < limit,
    "at least": lambda count, limit: count >= limit,
}

# type -> (reader, wording)
TYPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "count": (lambda value: _whole(value, 0), "a whole number, 0 or more"),
    "ordinal": (lambda value: _whole(value, 1), "a whole number, 1 or more"),
    "text": (_text, "text"),
    "texts": (_texts, "a list of texts"),
    "letter": (_letter, "a single character"),
    "relation": (_relation, " or ".join(f'"{one}"' for one in RELATIONS)),
    "percentage": (_percentage, "a number from 0 to 100"),
    "language": (_language, "a language code that can be told (`trivet.rewards.instructions.language`)"),
    "prompt": (_text, "the prompt's text, which this kind reads"),
}


# -- instructions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its parameters, checked."""

    kind: str
    arguments: Mapping[str, Any]

    def holds(self, text: str) -> bool:
        """Whether the text keeps to it; an empty text keeps to nothing."""
        return bool(text.strip()) and KINDS[self.kind].check(text, **self.arguments)


def make(name: Any, given: Mapping[str, Any] | None = None, *, prompt: str | None = None) -> Instruction:
    """An instruction by its id. Parameters that are None do not count (tables have a column for each).

    Raises InstructionError: unknown or unsupported id, unknown parameter, one missing or amiss.
    """
    if isinstance(name, str) and name in UNSUPPORTED:
        raise InstructionError(f"instruction {name!r} is not judged: {UNSUPPORTED[name]}")
    if not isinstance(name, str) or name not in KINDS:
        near = difflib.get_close_matches(str(name), KINDS, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InstructionError(f"no instruction {name!r}{hint}")
    if given is not None and not isinstance(given, Mapping):
        raise InstructionError(f"instruction {name!r}: its parameters are {given!r}; they must be an object")
    parameters = KINDS[name].parameters
    values = {str(key): value for key, value in (given or {}).items() if value is not None}
    unknown = sorted(set(values) - set(parameters))
    if unknown:
        raise InstructionError(f"instruction {name!r} takes no {unknown} (parameters: {list(parameters)})")
    arguments = {}
    for key, type_ in parameters.items():
        value = prompt if type_ == "prompt" else values.get(key)
        reader, wording = TYPES[type_]
        try:
            arguments[key] = reader(value)
        except (ValueError, TypeError) as error:  # TypeError: unhashable values
            shown = repr(value)[:80]
            raise InstructionError(f"instruction {name!r}: {key} is {shown}; it must be {wording}") from error
    return Instruction(name, arguments)
