"""The mathematics verifier: is the final answer equal to the known one?

In this order: the last box is read; normal forms are compared; numbers are compared exactly; what could
run for ever is refused; the rest is decided by math-verify in a process that is killed at the limit.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

from trivet.rewards import answers
from trivet.rewards.answers import Fallback
from trivet.rewards.pool import Outcome, PoolError, WorkerPool
from trivet.types import Reward, Scored, Unscored

_KEPT = 20_000


def gold_answers(gold: Any) -> list[str]:
    """The accepted answers as text: a string, a number, or a list of those; boxes are opened. [] without."""
    if gold is None or isinstance(gold, bool):
        return []
    if isinstance(gold, int | float):
        return [str(int(gold)) if isinstance(gold, float) and gold.is_integer() else str(gold)]
    if isinstance(gold, str):
        boxed = answers.last_boxed(gold)
        text = (gold if boxed is None else boxed).strip()
        return [text] if text else []
    if isinstance(gold, Sequence):
        return [text for one in gold for text in gold_answers(one)]
    return []


class MathVerifier:
    """Scores 1 or 0; unscored when the gold is missing or the algebra did not come to an end.

    `fallback` reads answers that are not boxed: "phrase" (after "answer is"), "number" (also the last
    number).
    `limit_s` bounds one algebra call, `max_answer` the answer's length (letters). Workers start when the
    first answer needs algebra. The parts of a score: `answered` (an answer was found), and `refused` or
    `unreadable` (1) where that is why it is 0.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        limit_s: float = 3.0,
        fallback: Fallback = "none",
        max_answer: int = 512,
        memory_bytes: int = 2 << 30,
    ) -> None:
        if fallback not in ("none", "phrase", "number"):
            raise ValueError(f"fallback {fallback!r} is not one of none, phrase, number")
        self.fallback: Fallback = fallback
        self.max_answer = max_answer
        self.pool = WorkerPool(
            "trivet.rewards.math_worker:equal",
            workers,
            limit_s=limit_s,
            memory_bytes=memory_bytes,
            preload=("trivet.rewards.math_worker:warm",),
        )
        self._verdicts: OrderedDict[tuple[str, str], dict[str, bool]] = OrderedDict()

    async def verify(self, text: str, gold: Any, *, exact: bool = False) -> Reward:
        """The reward of an answer. `gold`: text (LaTeX or plain), a number, or a list of alternatives.

        `exact` answers are words or lists, not mathematics: compared letter by letter, but for blanks at
        the ends and doubled ones.
        """
        golds = gold_answers(gold)
        if not golds:
            return Unscored("no_gold", f"the task has no usable answer: payload.answer is {gold!r}")
        found = answers.extract(text, self.fallback)
        if found is None:
            return Scored(0.0, {"answered": 0.0})
        if exact:
            return _score(any(found.split() == one.split() for one in golds))
        verdicts = [await self._compare(one, found) for one in golds]
        for verdict in verdicts:
            if isinstance(verdict, Scored) and verdict.value == 1.0:
                return verdict
        unscored = [verdict for verdict in verdicts if isinstance(verdict, Unscored)]
        return unscored[0] if unscored else verdicts[0]

    async def _compare(self, gold: str, answer: str) -> Scored | Unscored:
        if gold.isascii() and gold.isdecimal() and answer.isascii() and answer.isdecimal():
            return _score(gold.lstrip("0") == answer.lstrip("0"))
        if len(answer) > self.max_answer:
            same = answer.strip() == gold.strip()
            return _score(same, refused=not same)
        if not answers.balanced(gold):
            return Unscored("bad_gold", f"the gold answer {gold[:80]!r} has braces that do not match")
        left, right = answers.normalise(gold), answers.normalise(answer)
        verdict = answers.quick(left, right)
        if verdict is not None:
            return _score(verdict)
        if answers.too_large(right, self.max_answer):
            if answers.too_large(left, self.max_answer):
                return Unscored("verifier_refused", f"gold {left[:80]!r} is too large to evaluate")
            return _score(False, refused=True)
        return await self._algebra(*answers.align(left, right))

    async def _algebra(self, gold: str, answer: str) -> Scored | Unscored:
        key = (gold, answer)
        known = self._verdicts.get(key)
        if known is None:
            try:
                outcome = await self.pool.call(gold, answer)
            except PoolError as error:
                return Unscored("verifier_unavailable", str(error))
            if outcome.kind != "value":
                return _failed(outcome, gold, answer)
            known = self._verdicts[key] = outcome.value
            while len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        if not known["gold"]:
            return Unscored("bad_gold", f"math-verify cannot read the gold answer {gold!r}")
        return _score(known["equal"], unreadable=known["error"] or not known["answer"])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.pool.close)

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def _score(same: bool, **flags: bool) -> Scored:
    marks = {name: 1.0 for name, on in flags.items() if on}
    return Scored(float(same), {"answered": 1.0, **marks})


def _failed(outcome: Outcome, gold: str, answer: str) -> Unscored:
    cause = {"timed_out": "verifier_timeout"}.get(outcome.kind, "verifier_crashed")
    return Unscored(cause, f"comparing {answer[:80]!r} with {gold[:80]!r}: {outcome.detail}")
