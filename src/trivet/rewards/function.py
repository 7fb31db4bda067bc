"""Any Python function as a reward, with everything it may do wrong kept apart from a score of 0.

A function named in a recipe ("module:function", "file.py:function") runs in killable processes. One that is
handed over as an object cannot be killed: it runs in a thread with a deadline, and when too many of those
hang, nothing more is started.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

from trivet.rewards.load import load_object
from trivet.rewards.pool import Outcome, PoolError, WorkerPool
from trivet.rewards.worker import describe
from trivet.types import (
    Message,
    Pending,
    Reward,
    SchemaError,
    Scored,
    Task,
    Unscored,
    reward_from_dict,
    reward_to_dict,
)

_VALUE_KEYS = ("value", "reward", "score")


# -- what a function returns ---------------------------------------------------------------------


def _number(value: Any) -> float | None:
    """A finite float from a bool, int, float, or a scalar of an array library; None for anything else."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) in (1, ()) and not isinstance(value, int | float):
        try:
            value = item()
        except (ValueError, TypeError, RuntimeError):
            return None
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def to_reward(value: Any, name: str) -> Reward:
    """What a function's return value means. Numbers and bools score; a mapping needs `value` (or `reward`, or
    `score`) and may hold parts; rewards are taken as they are; all else is Unscored("verifier_invalid")."""
    if isinstance(value, Scored | Unscored | Pending):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(value, name)
    number = _number(value)
    if number is None:
        shown = repr(value)
        return Unscored(
            "verifier_invalid",
            f"{name} returned {shown[:80]} ({type(value).__name__}); return a finite number, a dict with "
            '"value" and parts, or a Reward',
        )
    return Scored(number)


def _from_mapping(value: Mapping[Any, Any], name: str) -> Reward:
    present = [key for key in _VALUE_KEYS if key in value]
    if len(present) != 1:
        return Unscored(
            "verifier_invalid",
            f"{name} returned a dict with keys {sorted(map(str, value))}; exactly one of {list(_VALUE_KEYS)} "
            "must hold the score",
        )
    parts = value.get("parts")
    rest = {key: one for key, one in value.items() if key not in (present[0], "parts")}
    parts = {**(parts if isinstance(parts, Mapping) else {}), **rest}
    numbers = {str(key): _number(one) for key, one in {present[0]: value[present[0]], **parts}.items()}
    wrong = sorted(key for key, one in numbers.items() if one is None)
    if wrong:
        return Unscored("verifier_invalid", f"{name} returned a dict whose {wrong} are not finite numbers")
    score = numbers.pop(present[0])
    assert score is not None  # `wrong` is empty
    return Scored(score, {key: one for key, one in numbers.items() if one is not None})


# -- what a function is given --------------------------------------------------------------------


class Caller:
    """Calls a function by its parameters' names, or with (task, text) when it has its own names for them.

    Known names: task, text, message, reasoning, payload, prompt, messages, and every key of the payload.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
        self.function = function
        self.name = name
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:  # some functions written in C
            raise TypeError(f"{name}: {error}; wrap it in a function of (task, text)") from error
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.named = [p for p in parameters if p.kind in named]
        self.positional = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        self.rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)

    def __call__(self, task: Task, message: Message) -> Any:
        text = message.text
        known: dict[str, Any] = {
            **task.payload,
            "task": task,
            "text": text,
            "message": message,
            "reasoning": message.reasoning,
            "payload": task.payload,
            "prompt": task.messages[-1].text,
            "messages": task.messages,
        }
        required = {p.name for p in self.named if p.default is p.empty}
        if required and required <= known.keys() and required >= set(self.positional):
            given = {p.name: known[p.name] for p in self.named if p.name in known}
            extra = {k: v for k, v in known.items() if k not in given} if self.rest else {}
            return self.function(**given, **extra)
        if (len(self.positional) == 2 and required <= set(self.positional)) or self.variadic:
            return self.function(task, text)
        if len(self.positional) == 1 and required <= set(self.positional):
            return self.function(text)
        raise TypeError(
            f"{self.name} needs {sorted(required - known.keys())}, which neither the known names "
            f"(task, text, message, reasoning, payload, prompt, messages) nor this task's payload "
            f"({sorted(task.payload)}) give"
        )


class Remote:
    """Made once in each worker: the function by its name; takes and gives JSON."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.caller = Caller(load_object(target), target)

    async def __call__(self, task: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        value = self.caller(Task.from_dict(task), Message.from_dict(message))
        if inspect.isawaitable(value):
            value = await value
        return reward_to_dict(to_reward(value, self.target))


# -- the reward ----------------------------------------------------------------------------------


class FunctionReward:
    """Scores answers with a function: a name (killable processes) or an object (threads, not killable).

    `limit_s` bounds one call, `workers` the calls at once. With an object, `max_hung` calls over the limit
    that have still not come back stop further ones (they would only hang too).
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        workers: int = 2,
        limit_s: float = 10.0,
        memory_bytes: int = 2 << 30,
        max_hung: int = 8,
    ) -> None:
        self.limit_s = limit_s
        self.max_hung = max_hung
        self.workers = workers
        self.hung = 0
        self._lock = threading.Lock()
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.pool: WorkerPool | None = None
        if isinstance(function, str):
            self.name = function
            self.pool = WorkerPool(
                "trivet.rewards.function:Remote",
                workers,
                limit_s=limit_s,
                memory_bytes=memory_bytes,
                init=[function],
                preload=("trivet.rewards.function",),
            )
        else:
            self.name = getattr(function, "__name__", type(function).__name__)
            self._caller = Caller(function, self.name)

    async def warm(self) -> None:
        """Load the function in every worker. Raises PoolError when it does not load."""
        if self.pool is not None:
            await self.pool.warm()

    async def score(self, task: Task, message: Message) -> Reward:
        """The function's verdict. Never raises but on cancellation; whatever is wrong is Unscored."""
        try:
            message.text  # noqa: B018 - media have no text
        except SchemaError as error:
            return Unscored("verifier_invalid", str(error))
        if self.pool is None:
            return await self._in_thread(task, message)
        try:
            outcome = await self.pool.call(task.to_dict(), message.to_dict())
        except PoolError as error:
            return Unscored("verifier_unavailable", str(error))
        except (TypeError, ValueError) as error:  # the payload is not JSON
            return Unscored("verifier_invalid", f"task {task.id} cannot be sent to {self.name}: {error}")
        return self._from_outcome(outcome)

    def _from_outcome(self, outcome: Outcome) -> Reward:
        if outcome.kind == "value":
            return reward_from_dict(outcome.value)
        causes = {"timed_out": "verifier_timeout", "raised": "verifier_raised"}
        detail = outcome.detail
        if outcome.kind == "timed_out":
            detail = f"{self.name} took over {self.limit_s:g} s"
        elif outcome.kind == "raised":
            detail = f"{self.name} raised {detail}"
        return Unscored(causes.get(outcome.kind, "verifier_crashed"), detail)

    # -- objects: threads ------------------------------------------------------------------------

    async def _in_thread(self, task: Task, message: Message) -> Reward:
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self.workers))
        async with slots:
            if self.hung >= self.max_hung:
                return Unscored(
                    "verifier_unavailable",
                    f"{self.hung} calls of {self.name} hang and cannot be killed; name the function in a "
                    'module or file ("module:function") to have it run in killable processes',
                )
            return await self._one_thread(loop, task, message)

    async def _one_thread(self, loop: asyncio.AbstractEventLoop, task: Task, message: Message) -> Reward:
        future: asyncio.Future[Reward] = loop.create_future()
        state = {"abandoned": False, "done": False}

        def deliver(reward: Reward) -> None:
            if not future.done():
                future.set_result(reward)

        def run() -> None:
            try:
                value = self._caller(task, message)
                if inspect.isawaitable(value):
                    value = asyncio.run(_await(value))
                reward = to_reward(value, self.name)
            except BaseException as error:  # SystemExit of a verifier is an answer too
                reward = Unscored("verifier_raised", f"{self.name} raised {describe(error)}")
            with self._lock:
                state["done"] = True
                self.hung -= state["abandoned"]
            if not state["abandoned"] and not loop.is_closed():
                loop.call_soon_threadsafe(deliver, reward)

        threading.Thread(target=run, name=f"trivet-reward-{self.name}", daemon=True).start()
        try:
            async with asyncio.timeout(self.limit_s):
                return await future
        except TimeoutError:
            return Unscored("verifier_timeout", f"{self.name} took over {self.limit_s:g} s")
        finally:
            with self._lock:
                if not state["done"]:
                    state["abandoned"] = True
                    self.hung += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the workers; hanging threads are left to end with the program."""
        if self.pool is not None:
            self.pool.close()


async def _await(value: Any) -> Any:
    return await value
