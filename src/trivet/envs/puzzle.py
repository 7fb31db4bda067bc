"""Puzzles whose answers a program judges: many answers may be right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

from trivet.envs.base import SingleTurn
from trivet.envs.registry import register_env
from trivet.rewards import answers
from trivet.rewards.checker import ProgramChecker
from trivet.rewards.pool import Outcome, PoolError, WorkerPool
from trivet.types import Message, Reward, Rollout, Scored, Task, Unscored

Read = Literal["auto", "tag", "box", "whole"]
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LONGEST = 100_000


def final_answer(text: str, read: Read) -> str | None:
    """What the last <answer> tags or the last box hold, or the whole text; "auto" is the first of these that
    there is. None without."""
    if read in ("auto", "tag") and (found := _TAGGED.findall(text)):
        return found[-1].strip()
    if read in ("auto", "box") and (boxed := answers.last_boxed(text)) is not None:
        return boxed.strip()
    return text.strip() or None if read in ("auto", "whole") else None


class Checker:
    """What judges one kind of puzzle: a function of (spec, answer) that runs in killable processes and
    returns {"value": 0..1}, or {"changed": why}."""

    def __init__(self, target: str, preload: str) -> None:
        self.target, self.preload = target, preload

    def pool(self, workers: int, limit_s: float) -> WorkerPool:
        return WorkerPool(self.target, workers, limit_s=limit_s, preload=(self.preload,))


# A kind of `payload.puzzle` is judged by the checker of its name here.
CHECKERS: dict[str, Callable[[], Checker]] = {
    "reasoning_gym": lambda: Checker("trivet.rewards.gym:score", "trivet.rewards.gym:warm"),
}


@register_env("puzzle")
class Puzzle(SingleTurn):
    """Reward = what the puzzle's own function says of the answer, from 0 to 1; with `threshold`, 1 from there
    on and else 0 (the function's value is then a part).

    `payload["puzzle"]` names the kind and what its checker needs: "reasoning_gym" (the taskset
    `reasoning_gym:NAME` writes it), or "program" with a `checker`, the source of `def check(answer, data)`,
    which runs in a sandbox, and its `data`. `read` says where the answer stands, see `final_answer`;
    `workers` and `limit_s` are of the checker's processes.
    """

    def __init__(
        self,
        *,
        read: Read = "auto",
        threshold: float | None = None,
        workers: int = 2,
        limit_s: float = 20.0,
    ) -> None:
        if read not in get_args(Read):
            raise ValueError(f"read {read!r} is not one of {', '.join(get_args(Read))}")
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"threshold {threshold} must be above 0 and at most 1")
        if workers < 1 or limit_s <= 0:
            raise ValueError(f"workers {workers} must be 1 or more and limit_s {limit_s} above 0")
        self.score_limit_s = None  # every call has its own limit; the queue before it may be long
        self.read: Read = read
        self.threshold, self.workers, self.limit_s = threshold, workers, limit_s
        self._pools: dict[str, WorkerPool] = {}
        self._programs = ProgramChecker(workers=workers, limit_s=limit_s)

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        spec = task.payload.get("puzzle")
        kinds = ["program", *CHECKERS]
        if not isinstance(spec, Mapping) or spec.get("kind") not in kinds:
            return Unscored("no_puzzle", f"task {task.id}: payload.puzzle must name a kind of {kinds}")
        answer = final_answer(message.text, self.read)
        if answer is None:
            return Scored(0.0, {"answered": 0.0})
        if len(answer) > _LONGEST:
            return Scored(0.0, {"answered": 1.0, "too_long": 1.0})
        if spec["kind"] == "program":
            reward = await self._programs.check(spec.get("checker"), answer, spec.get("data"))
            return self._threshold(reward.value) if isinstance(reward, Scored) else reward
        try:
            outcome = await self._pool(spec["kind"]).call(dict(spec), answer)
        except PoolError as error:
            return Unscored("verifier_unavailable", str(error))
        return self._reward(task, outcome)

    def _pool(self, kind: str) -> WorkerPool:
        if kind not in self._pools:
            self._pools[kind] = CHECKERS[kind]().pool(self.workers, self.limit_s)
        return self._pools[kind]

    def _reward(self, task: Task, outcome: Outcome) -> Reward:
        if outcome.kind != "value":
            cause = {"timed_out": "verifier_timeout", "raised": "verifier_raised"}.get(outcome.kind)
            return Unscored(cause or "verifier_crashed", f"task {task.id}: {outcome.detail}")
        found: Any = outcome.value
        if "changed" in found:
            return Unscored("puzzle_changed", f"task {task.id}: {found['changed']}: another version made it")
        value = found["value"]
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            return Unscored(
                "verifier_invalid", f"task {task.id}: its checker says {value!r}; it must be 0..1"
            )
        return self._threshold(value)

    def _threshold(self, value: float) -> Scored:
        if self.threshold is None:
            return Scored(float(value), {"answered": 1.0})
        return Scored(float(value >= self.threshold), {"answered": 1.0, "value": float(value)})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await self._programs.close()
