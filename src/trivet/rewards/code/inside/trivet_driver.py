"""Runs a program behind the wall and calls its functions on request; holds no test and no expected value.

What the program can do to this module it can only do to its own answers.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import types
from typing import Any

from trivet_codec import DEPTH, CodecError, Decoder, Encoder  # type: ignore[import]

_KEPT = 10_000


class Late(BaseException):
    """The processor time for one call is over."""


class Driver:
    """Serves one program's names and the objects that its functions gave."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.seconds = float(order["seconds"])
        self.module = types.ModuleType("solution")
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}
        sys.modules["solution"] = self.module
        self.decode = Decoder(self._look_up, 2 * DEPTH)
        self.before, self.program = order["before"], order["program"]

    def prepare(self) -> None:
        """Run what comes before the program. It may name what only the program defines: then it is for the
        tests alone."""
        with contextlib.suppress(Exception):
            exec(compile(self.before, "before.py", "exec"), self.module.__dict__)

    def load(self) -> None:
        """Run the program. Whatever it raises is raised."""
        exec(compile(self.program, "solution.py", "exec"), self.module.__dict__)

    # -- values ------------------------------------------------------------------------------------

    def _keep(self, value: Any) -> Any:
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            if number >= _KEPT:
                raise CodecError("too many objects")
            self.kept.append(value)
        return {"o": number}

    def _look_up(self, tag: str, found: Any) -> Any:
        return self.kept[found] if tag == "o" else self.named(found)

    def named(self, path: str) -> Any:
        """What `name` or `Class.method` says; of a class a new instance's."""
        first, *rest = path.split(".")
        try:
            value = self.module.__dict__[first]
        except KeyError:
            raise NameError(f"name {first!r} is not defined") from None
        for name in rest:
            value = getattr(value() if isinstance(value, type) else value, name)
        return value

    # -- requests ----------------------------------------------------------------------------------

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"v": value}, or {"e": [names of the exception's classes], "text"}; {"late": true}.

        With `back`, `a` holds the arguments where the call changed them.
        """
        signal.setitimer(signal.ITIMER_PROF, self.seconds)  # processor time
        try:
            value, given = self._do(request)
            reply = {"v": Encoder(self._keep)(value)}
            if request.get("back"):
                changed = Encoder(self._keep, given=True)(given)
                if changed != request["args"]:
                    reply["a"] = changed
        except Late:
            return {"late": True}
        except BaseException as error:  # whatever the program raises is its answer
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"e": names, "text": _text(error)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return reply

    def _do(self, request: dict[str, Any]) -> tuple[Any, list[Any]]:
        of = self.decode(request["of"])
        args = self.decode(request["args"])
        what = request["do"]
        if what == "call":
            named = {key: self.decode(one) for key, one in request.get("named", {}).items()}
            return of(*args, **named), args
        return _DO[what](of, *args), args


_DO: dict[str, Any] = {
    "get": getattr,
    "set": setattr,
    "len": len,
    "iter": iter,
    "str": str,
    "repr": repr,
    "bool": bool,
    "item": lambda of, key: of[key],
    "put": lambda of, key, value: of.__setitem__(key, value),
    "eq": lambda of, other: bool(of == other),
    "lt": lambda of, other: bool(of < other),
    "le": lambda of, other: bool(of <= other),
}


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:  # its own __str__ may do anything
        return ""


def _late(number: int, frame: object) -> None:
    raise Late


def main() -> None:
    import channel  # type: ignore[import]  # there once a program runs

    order = channel.recv()
    driver = Driver(order)
    signal.signal(signal.SIGPROF, _late)
    if driver.before:
        driver.prepare()
        channel.send({"prepared": True})
    try:
        driver.load()
    except BaseException as error:  # whatever it is: the program does not load
        channel.send({"e": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)})
        return
    channel.send({"ready": True})
    for request in order["calls"]:
        channel.send(driver.serve(request))
    while True:
        try:
            request = channel.recv()
        except EOFError:
            return
        channel.send(driver.serve(request))
