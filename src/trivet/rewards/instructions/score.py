"""Several instructions at once: strict and loose, and what they make of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trivet.rewards import constraints
from trivet.rewards.instructions.base import KINDS, Instruction, InstructionError, make
from trivet.types import Reward, Scored, Unscored

Mode = Literal["strict", "loose"]


class _Constraint(Instruction):
    """A constraint of `rewards.constraints`, which a task may mix with the instructions here."""

    __slots__ = ()

    def holds(self, text: str) -> bool:
        return constraints.check({"kind": self.kind, **self.arguments}, text)


def from_constraint(constraint: Any, *, prompt: str | None = None) -> Instruction:
    """{"kind": an instruction's id or a constraint's name, and its parameters}. Raises ConstraintError."""
    if isinstance(constraint, Mapping) and isinstance(name := constraint.get("kind"), str) and ":" in name:
        return make(name, {key: one for key, one in constraint.items() if key != "kind"}, prompt=prompt)
    valid = constraints.validate(constraint)
    return _Constraint(valid["kind"], {key: one for key, one in valid.items() if key != "kind"})


def from_row(row: Mapping[str, Any]) -> list[Instruction]:
    """The instructions of a task's payload: `instruction_id_list` and `kwargs` (the columns of IFEval and
    IFBench; kinds that read the prompt also need `prompt`), `constraints`, or both. Raises ConstraintError:
    an unknown id or parameter, one that is missing or amiss, lists of different lengths, nothing to check."""
    prompt = row.get("prompt")
    prompt = prompt if isinstance(prompt, str) else None
    ids, given = row.get("instruction_id_list") or [], row.get("kwargs")
    own = row.get("constraints") or []
    for key, value in (("instruction_id_list", ids), ("constraints", own)):
        if not isinstance(value, list | tuple):
            raise InstructionError(f"{key} is {type(value).__name__}; it must be a list")
    if given is None:
        given = [None] * len(ids)
    if not isinstance(given, list | tuple) or len(given) != len(ids):
        count = len(given) if isinstance(given, list | tuple) else type(given).__name__
        raise InstructionError(f"kwargs ({count}) must be a list as long as instruction_id_list ({len(ids)})")
    out = [make(name, one, prompt=prompt) for name, one in zip(ids, given, strict=True)]
    out += [from_constraint(one, prompt=prompt) for one in own]
    if not out:
        raise InstructionError("there is no instruction to check (instruction_id_list, constraints)")
    return out


def loose_variants(text: str) -> list[str]:
    """The text, without its first line, its last, both; and each of them without asterisks (IFEval's "loose":
    an introduction, a closing line and markdown are forgiven)."""
    rows = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (rows[1:], rows[:-1], rows[1:-1]))]
    return list(dict.fromkeys([*cut, *(one.replace("*", "") for one in cut)]))


def held(instructions: Sequence[Instruction], text: str, mode: Mode = "strict") -> list[bool]:
    """Whether each holds: in the text, or ("loose") in one of its variants."""
    variants = [text] if mode == "strict" else loose_variants(text)
    return [any(one.holds(variant) for variant in variants) for one in instructions]


def score(
    instructions: Sequence[Instruction], text: str, *, mode: Mode = "strict", partial: float = 0.0
) -> Scored:
    """1 when all hold, else `partial` times the share that does. Parts: each kind (1 or 0) and the share,
    `held`, in this mode. Raises InstructionError without any instruction."""
    if not instructions:
        raise InstructionError("there is no instruction to check")
    found = held(instructions, text, mode)
    share = sum(found) / len(found)
    parts: dict[str, float] = {}
    for one, holds in zip(instructions, found, strict=True):
        parts[one.kind] = min(parts.get(one.kind, 1.0), float(holds))
    parts["held"] = share
    return Scored(1.0 if all(found) else partial * share, parts)


def score_row(row: Mapping[str, Any], text: str, *, mode: Mode = "strict", partial: float = 0.0) -> Reward:
    """`score` of the instructions in a task's payload; Unscored where they are missing or wrong."""
    if not row.get("instruction_id_list") and not row.get("constraints"):
        return Unscored("no_constraints", "the task has no instruction_id_list and no constraints")
    try:
        return score(from_row(row), text, mode=mode, partial=partial)
    except constraints.ConstraintError as error:
        return Unscored("bad_constraints", str(error))


def instruction_ids() -> list[str]:
    """All ids that are judged."""
    return sorted(KINDS)
