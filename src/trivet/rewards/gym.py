"""Puzzles of `reasoning-gym` (pip install reasoning-gym): made anew from their name, arguments, seed and
index, and scored by their own function. What is stored is that recipe, not the library's objects."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

SIZE = 1_000  # of every data set: some prepare all items at once, and one makes others of another size
_KEPT = 256


class GymError(ValueError):
    """The library is not there, or does not know such a puzzle."""


def names() -> list[str]:
    """All puzzles of the installed version. Raises GymError."""
    return sorted(name for name in _library().factory.DATASETS if name != "composite")


def _library() -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        import reasoning_gym.factory  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise GymError(f"reasoning_gym puzzles need `pip install reasoning-gym` ({error})") from error
    return reasoning_gym


@lru_cache(_KEPT)
def _data(name: str, seed: int, arguments: str) -> Any:
    return _library().create_dataset(name, size=SIZE, seed=seed, **json.loads(arguments))


def data(name: str, seed: int, arguments: Mapping[str, Any]) -> Any:
    """The library's data set. Raises GymError."""
    try:
        return _data(name, seed, json.dumps(dict(arguments), sort_keys=True))
    except GymError:
        raise
    except Exception as error:  # assertions, type errors, value errors of each puzzle's own checks
        reason = str(error) or type(error).__name__
        raise GymError(f"reasoning_gym refuses {name!r} with {dict(arguments)}: {reason}") from error


def digest(question: str) -> str:
    """What a question is recognised by."""
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@lru_cache(_KEPT)
def _entry(name: str, seed: int, arguments: str, index: int) -> Any:
    return _data(name, seed, arguments)[index]


def score(spec: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """{"value": what the puzzle's own function says, 0 to 1} or {"changed": why}. For worker processes."""
    logging.disable(logging.CRITICAL)
    name, seed, index = spec["name"], spec["seed"], spec["index"]
    arguments = json.dumps(spec.get("args") or {}, sort_keys=True)
    entry = _entry(name, seed, arguments, index)
    if digest(entry["question"]) != spec["question"]:
        return {"changed": f"{name} makes another question of seed {seed} and index {index}"}
    return {"value": float(_data(name, seed, arguments).score_answer(answer, entry))}


def warm() -> None:
    """Load the library, which takes seconds, once for all workers."""
    _library()
