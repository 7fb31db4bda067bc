"""Held-out loss, and which checkpoint a stage hands on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trivet.recipe.section import Location, PositiveInt, Section
from trivet.recipe.taskset import Tasks


class HeldOut(Section):
    """Loss on data that is not trained on, measured during a supervised stage."""

    packed: Location | None = Field(default=None, description="folder of `trivet data build`")
    tasks: list[Tasks] = Field(default_factory=list, description="instead: tasksets with answers")
    every: PositiveInt = Field(default=50, description="steps; the last step is always measured")
    at_start: bool = Field(default=True, description="measure before the first step")
    limit: PositiveInt | None = Field(
        default=None, description="packs or examples, the first ones; default: all"
    )
    name: str = Field(default="held_out", description="in metrics: eval/NAME/loss")

    @field_validator("name")
    @classmethod
    def _part_of_a_metric(cls, name: str) -> str:
        if not name.strip() or set("/@") & set(name):
            raise ValueError(f"must be text without / and @, not {name!r}: it is part of metric names")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> HeldOut:
        if bool(self.packed) == bool(self.tasks):
            raise ValueError("held_out: give exactly one of packed and tasks")
        return self


class KeepBest(Section):
    """The stage hands on the checkpoint that an evaluation found best; on a plateau it may end."""

    metric: str = Field(description="of an evaluation, as in metrics.jsonl: eval/held_out/loss")
    mode: Literal["min", "max"] = Field(default="min", description="whether lower or higher is better")
    patience: PositiveInt | None = Field(
        default=None, description="evaluations in a row without progress that end the stage; default: none do"
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="progress: better than at the last progress by more than this"
    )


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """What a packed folder holds, as planning sees it. `longest`: tokens of the longest document; `steps`:
    until the stage's last epoch is used up, None where it names none."""

    packs: int
    documents: int
    tokens: int
    trained: int
    capacity: int
    longest: int
    steps: int | None
