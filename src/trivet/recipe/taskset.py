"""One taskset of a recipe."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from trivet.recipe.section import Free, Location, PositiveInt, Section


class Tasks(Section):
    """One taskset: where tasks come from and which environment plays them."""

    source: Location = Field(description="file or glob (JSONL, Parquet), dataset name, or generated:NAME")
    env: str = Field(default="math", description="name of the environment that plays the tasks")
    name: str | None = Field(default=None, description="in tables and metrics; default: from source")
    split: str = Field(default="train", description="train, test, ...; of a hub dataset or a generator")
    subset: str | None = Field(default=None, description="configuration name of a hub dataset")
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="our field -> column: prompt, answer, id, messages, response, or payload.NAME",
    )
    template: str = Field(
        default="{prompt}", description="the user message; any column may be named in braces"
    )
    args: Free = Field(default_factory=dict, description="of a generated taskset")
    env_args: Free = Field(default_factory=dict, description="of the environment")
    tags: list[str] = Field(default_factory=list, description="put on every task")
    limit: PositiveInt | None = Field(default=None, description="tasks taken, after skip")
    skip: int = Field(default=0, ge=0, description="tasks left out at the start")
    shuffle: bool = Field(default=True, description="by the recipe's seed, after skip and limit")
    licence: str = Field(default="", description="of the data, kept with every task")

    @field_validator("name")
    @classmethod
    def _part_of_a_metric(cls, name: str | None) -> str | None:
        if name is not None and (not name.strip() or set("/@") & set(name)):
            raise ValueError(f"must be text without / and @, not {name!r}: it is part of metric names")
        return name

    @property
    def label(self) -> str:
        """What tables and metric names call this taskset: `name`, or what the source is called."""
        if self.name:
            return self.name
        last = self.source.removeprefix("generated:").rstrip("/").rsplit("/", 1)[-1]
        last = re.sub(r"\.(jsonl(\.gz)?|json(\.gz)?|parquet)$", "", last)
        return re.sub(r"[^\w.-]+", "_", last).strip("_") or "tasks"
