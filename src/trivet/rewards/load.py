"""Python objects named in a recipe: `package.module:name`, `package.module.name` or `file.py:name`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from trivet.recipe.problems import Problem, RecipeError
from trivet.recipe.userfile import LoadError, load_file


def split_target(target: str) -> tuple[str, str]:
    """(module or file, name). Raises LoadError when there is no name."""
    separator = ":" if ":" in target else "."
    place, _, name = target.rpartition(separator)
    if not place or not name:
        raise LoadError(f"{target!r} names no object: write package.module:name or path/to/file.py:name")
    return place, name


def load_object(target: str) -> Any:
    """What `target` names. Raises LoadError: no file or module, an import that fails, no such name."""
    place, name = split_target(target)
    try:
        module = load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except LoadError:
        raise
    except Exception as error:  # importing runs anybody's code
        raise LoadError(f"importing {place!r} failed: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LoadError(f"{place!r} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def import_all(names: Sequence[str]) -> None:
    """A recipe's `imports`: files and modules that register environments and algorithms.

    Raises RecipeError naming the key (`imports.0`), the file or module and what is wrong with it.
    """
    for index, name in enumerate(names):
        try:
            if name.endswith(".py"):
                load_file(name)
            else:
                importlib.import_module(name)
        except Exception as error:  # importing runs anybody's code
            why = str(error) if isinstance(error, LoadError) else f"{type(error).__name__}: {error}"
            problem = Problem(f"imports.{index}: {name!r} cannot be imported: {why}")
            raise RecipeError(name, [problem]) from error
