"""Rubrics: an answer is held against several criteria, some checked by code, some judged by a model.

Only required criteria make the score; the others are parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet.rewards.constraints import ConstraintError
from trivet.rewards.instructions import Instruction, from_constraint
from trivet.rewards.judge import Judge
from trivet.types import Message, Reward, Scored, Unscored

_KEYS = ("name", "check", "judge", "required")


class RubricError(ValueError):
    """A rubric cannot be used; says which criterion and what is wrong."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """Checked by an instruction, or else judged by `question`."""

    name: str
    check: Instruction | None = None
    question: str = ""
    required: bool = True


class Rubric:
    """Criteria, at least one of them required. Made from data by `from_data`."""

    def __init__(self, criteria: Sequence[Criterion]) -> None:
        if not any(one.required for one in criteria):
            raise RubricError("a rubric needs at least one required criterion")
        names = [one.name for one in criteria]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise RubricError(f"criteria share the names {doubled}; each needs its own")
        for one in criteria:
            if (one.check is None) == (not one.question.strip()):
                raise RubricError(f"criterion {one.name!r} needs either a check or a question for the judge")
        self.criteria = tuple(criteria)

    @classmethod
    def from_data(cls, data: Any, *, prompt: str | None = None) -> Rubric:
        """A list of {"name", "check": instruction or constraint | "judge": a question, "required": true}.

        Raises RubricError naming the criterion.
        """
        if not isinstance(data, list | tuple) or not data:
            raise RubricError("a rubric is a list of criteria")
        return cls([_criterion(index, one, prompt) for index, one in enumerate(data)])

    @property
    def judged(self) -> bool:
        """A judge is needed."""
        return any(one.check is None for one in self.criteria)

    async def score(self, messages: Sequence[Message], answer: str, *, judge: Judge | None = None) -> Reward:
        """1 when every required criterion holds, 0 when one does not, Unscored when the judge cannot say of
        one and no other fails. A judge's verdict holds from a half of its scale on. Never raises but on
        cancellation.

        Parts: each criterion's name (1 or 0, absent where unknown), and `held`, the share of required ones
        that hold, where all are known. The judge is not asked once a required check has failed.
        """
        if self.judged and judge is None:
            return Unscored("no_judge", "the rubric has criteria for a judge, and there is none")
        checks = [one for one in self.criteria if one.check is not None]
        found = await asyncio.to_thread(_checked, checks, answer)
        unknown: list[Unscored] = []
        if all(found[one.name] for one in checks if one.required) and judge is not None:
            asked = [one for one in self.criteria if one.check is None]
            rewards = await asyncio.gather(
                *(judge.score(messages, answer, question=one.question) for one in asked)
            )
            for one, reward in zip(asked, rewards, strict=True):
                if isinstance(reward, Scored):
                    found[one.name] = reward.value >= 0.5
                elif one.required:
                    detail = reward.detail if isinstance(reward, Unscored) else "no verdict yet"
                    cause = reward.cause if isinstance(reward, Unscored) else "judge_unavailable"
                    unknown.append(Unscored(cause, f"criterion {one.name!r}: {detail}"))
        return self._reward(found, unknown)

    def _reward(self, found: Mapping[str, bool], unknown: Sequence[Unscored]) -> Reward:
        required = [found.get(one.name) for one in self.criteria if one.required]
        parts = {name: float(holds) for name, holds in found.items()}
        if None not in required:
            parts["held"] = sum(map(bool, required)) / len(required)
        if False in required:
            return Scored(0.0, parts)
        return unknown[0] if unknown else Scored(1.0, parts)


def _checked(checks: Sequence[Criterion], answer: str) -> dict[str, bool]:
    return {one.name: one.check.holds(answer) for one in checks if one.check is not None}


def _criterion(index: int, data: Any, prompt: str | None) -> Criterion:
    where = f"criterion {index}"
    if not isinstance(data, Mapping):
        raise RubricError(f"{where} is {type(data).__name__}; it must be an object")
    where = f"criterion {data.get('name', index)!r}"
    unknown = sorted(set(map(str, data)) - set(_KEYS))
    if unknown:
        raise RubricError(f"{where} has unknown keys {unknown} (known: {list(_KEYS)})")
    name, question, required = data.get("name"), data.get("judge", ""), data.get("required", True)
    if not isinstance(name, str) or not name.strip() or name == "held":
        raise RubricError(f'{where} needs a name (text, not "held")')
    if not isinstance(question, str) or not isinstance(required, bool):
        raise RubricError(f"{where}: judge must be text and required true or false")
    check = data.get("check")
    try:
        instruction = None if check is None else from_constraint(check, prompt=prompt)
    except ConstraintError as error:
        raise RubricError(f"{where}: {error}") from error
    return Criterion(name, instruction, question, required)
