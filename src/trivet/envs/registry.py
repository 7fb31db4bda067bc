"""Environments by name, by dotted path or by file, with their arguments checked."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from trivet.envs.base import Environment, SingleTurn
from trivet.rewards.load import LoadError, load_object

_Class = TypeVar("_Class", bound=Callable[..., Any])

# Imported when first asked for: a verifier's libraries cost a second.
_BUILT_IN = {
    "math": "trivet.envs.math",
    "callable": "trivet.envs.callable",
    "chat": "trivet.envs.chat",
    "code": "trivet.envs.code",
    "instruct": "trivet.envs.instruct",
    "puzzle": "trivet.envs.puzzle",
    "qa": "trivet.envs.qa",
    "reward_model": "trivet.envs.reward_model",
}
_REGISTERED: dict[str, Callable[..., Any]] = {}


class EnvError(ValueError):
    """An environment cannot be made; the message names it and what to change."""


def _origin(cls: Callable[..., Any]) -> tuple[str, str]:
    """(file, name): the same for a file that is imported as a module and loaded by its path."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__, cls.__qualname__


def register_env(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: makes an environment known to recipes as `env: name`. The latest one wins within a
    file that is loaded again, under whatever module's name; another file's name is refused."""

    def register(cls: _Class) -> _Class:
        known = _REGISTERED.get(name)
        if known is not None and _origin(known) != _origin(cls):
            raise EnvError(f"environment {name!r} is taken by {known.__module__}.{known.__qualname__}")
        _REGISTERED[name] = cls
        return cls

    return register


def environment_names() -> list[str]:
    """All names `env:` may hold besides dotted and file paths."""
    return sorted({*_BUILT_IN, *_REGISTERED})


def _find(name: str) -> Callable[..., Any]:
    if name not in _REGISTERED and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name in _REGISTERED:
        return _REGISTERED[name]
    if ":" in name or "." in name:
        try:
            return load_object(name)
        except LoadError as error:
            raise EnvError(f"environment {name!r}: {error}") from error
    near = difflib.get_close_matches(name, environment_names(), 1, 0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise EnvError(
        f"no environment {name!r}; {hint}known: {environment_names()}; "
        "your own: package.module:Class or path/to/file.py:Class"
    )


def _check_args(name: str, cls: Callable[..., Any], args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(cls)
    except ValueError as error:
        raise EnvError(f"environment {name!r} is not a class of Python's own: {error}") from error
    names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in args:
        if key not in names and not open_ended:
            near = difflib.get_close_matches(key, names, 1, 0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise EnvError(f"environment {name!r} takes no argument {key!r}; {hint}it takes {names}")
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in args
    ]
    if missing:
        raise EnvError(f"environment {name!r} needs env_args {missing}")


def make_env(name: str, **args: Any) -> Environment:
    """The environment a recipe names: registered, `module:Class`, `module.Class` or `file.py:Class`.

    `demonstrate` is understood by every `SingleTurn`. Raises EnvError on unknown names and arguments, missing
    arguments, and values that are refused.
    """
    cls = _find(name)
    demonstrate = args.pop("demonstrate", False)
    if not callable(cls):
        raise EnvError(f"environment {name!r} is {type(cls).__name__}, not a class")
    _check_args(name, cls, args)
    try:
        env = cls(**args)
    except EnvError:
        raise
    except (ValueError, TypeError) as error:
        raise EnvError(f"environment {name!r} refuses its arguments: {error}") from error
    if not inspect.iscoroutinefunction(getattr(env, "rollout", None)):
        raise EnvError(f"environment {name!r} has no `async def rollout(self, task, policy, attempt)`")
    if demonstrate:
        if not isinstance(env, SingleTurn):
            raise EnvError(f"environment {name!r} is no SingleTurn: it has to add demonstrations itself")
        env.demonstrate = True
    return env
