"""Runs tests behind a wall of their own; the program under test is on the other side of another one.

Names that neither the tests nor Python define stand for the program's. Calling them asks the host, which asks
the program. What comes back are plain values, built here by exact type, or references to objects that stay
there. A reference never equals a plain value, whatever its class says.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

from trivet_codec import CodecError, Decoder, Encoder, NotPlain  # type: ignore[import]


class ProgramError(Exception):
    """The program raised something that is no built-in exception, or that would end this process."""


class Lost(BaseException):
    """The program is gone or late: no further answer will come."""


class Unsupported(BaseException):
    """A test wants something that cannot be sent to the program."""


class State:
    """Of the test that runs: whether its verdict rests on names and objects of the program's own."""

    weak = False
    entry = ""


def _keep(value: Any) -> Any:
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_code")
    raise NotPlain(f"an argument of type {type(value).__name__}")


def _look_up(tag: str, found: Any) -> Any:
    State.weak = True
    return Remote({tag: found})


_decode = Decoder(_look_up)


def ask(do: str, of: Any, args: list[Any], named: dict[str, Any] | None = None) -> Any:
    """The program's answer to one request; what it raised is raised."""
    import channel  # type: ignore[import]  # there once a program runs

    try:
        codes = Encoder(_keep, given=True)(args)
        words = {key: Encoder(_keep, given=True)(one) for key, one in (named or {}).items()}
    except CodecError as error:
        raise Unsupported(str(error)) from error
    if of.get("n", State.entry) != State.entry:
        State.weak = True
    request = {"do": do, "of": of, "args": codes, "named": words, "back": do == "call"}
    channel.send({"ask": request})
    reply = channel.recv()
    if "v" in reply:
        for old, new in zip(args, reply.get("a", ()), strict=False):
            _change(old, _decode(new))
        return _decode(reply["v"])
    if "e" in reply:
        raise _exception(reply["e"], str(reply.get("text", "")))
    raise Lost


def _exception(names: list[str], text: str) -> BaseException:
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
            try:
                return kind(text)
            except TypeError:  # UnicodeError's classes want more arguments
                continue
    return ProgramError(text)


def _change(old: Any, new: Any) -> None:
    """Do to a test's own argument what the program did to its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


class Remote:
    """A name or an object of the program's."""

    __slots__ = ("_code",)

    def __init__(self, code: dict[str, Any]) -> None:
        object.__setattr__(self, "_code", code)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask("get", _code(self), [name])

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", _code(self), [name, value])

    def __call__(self, *args: Any, **named: Any) -> Any:
        return ask("call", _code(self), list(args), named)

    def __len__(self) -> int:
        return ask("len", _code(self), [])

    def __iter__(self) -> Any:
        return iter(ask("iter", _code(self), []))

    def __bool__(self) -> bool:
        return ask("bool", _code(self), []) is True

    def __str__(self) -> str:
        return ask("str", _code(self), [])

    def __repr__(self) -> str:
        return ask("repr", _code(self), [])

    def __getitem__(self, key: Any) -> Any:
        return ask("item", _code(self), [key])

    def __setitem__(self, key: Any, value: Any) -> None:
        ask("put", _code(self), [key, value])

    def __contains__(self, value: Any) -> bool:
        return any(one is value or one == value for one in self)  # the other side is not told the value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        return _code(self) == _code(other) or ask("eq", _code(self), [other]) is True

    def __lt__(self, other: object) -> Any:
        return ask("lt", _code(self), [other]) is True if isinstance(other, Remote) else NotImplemented

    def __le__(self, other: object) -> Any:
        return ask("le", _code(self), [other]) is True if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(_code(self)))


def _code(remote: Remote) -> dict[str, Any]:
    return object.__getattribute__(remote, "_code")


def main() -> None:
    """Order: {"setup", "names", "entry", "tests": [{"source", "check"}]}; a verdict a test is sent."""
    import channel  # type: ignore[import]

    order = channel.recv()
    State.entry = order["entry"]
    space: dict[str, Any] = types.ModuleType("tests").__dict__
    for name in order["names"]:
        space[name] = Remote({"n": name})
    try:
        exec(compile(order["setup"], "setup.py", "exec"), space)
    except Lost:
        return
    except BaseException as error:  # the tests' own failure, unless the program was asked for something
        channel.send({"setup": f"{type(error).__name__}: {str(error)[:300]}"})
        return
    entry = Remote({"n": order["entry"]})
    if "." not in order["entry"]:
        space[order["entry"]] = entry
    for number, test in enumerate(order["tests"]):
        State.weak = False
        outcome: dict[str, Any] = {"test": number, "passed": False}
        try:
            exec(compile(test["source"], f"test{number}.py", "exec"), space)
            if test["check"]:
                space["check"](entry)
            outcome["passed"] = True
        except Unsupported as error:
            outcome["unsupported"] = str(error)
        except Lost:
            return
        except BaseException as error:  # whatever it is, the test has not passed
            outcome["error"] = type(error).__name__
        channel.send({**outcome, "weak": State.weak})
    channel.send({"done": True})
