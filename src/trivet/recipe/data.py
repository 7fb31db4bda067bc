"""The `data:` section: from raw chats to packed supervision."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trivet.recipe.section import Fraction, Location, PositiveInt, Section


class Source(Section):
    """Where conversations come from."""

    source: Location = Field(description="file, glob, directory, or name of a hub data set")
    name: str | None = Field(default=None, description="in tables and lineage; default: from source")
    category: str = Field(default="", description="capability it teaches, for composition and reports")
    split: str = Field(default="train", description="of a hub data set, or folder of a directory")
    subset: str | None = Field(default=None, description="configuration name of a hub data set")
    format: str = Field(default="auto", description="how rows are written; auto: found out from each file")
    fields: dict[str, str] = Field(
        default_factory=dict, description="our field -> column, for rows of a form of their own"
    )
    repairs: dict[str, bool] = Field(default_factory=dict, description="repair passes switched on or off")
    supervise: Literal["all", "reasoning"] | None = Field(
        default=None, description="assistant messages that are trained; default: data.supervise"
    )
    chat_template: Location | None = Field(
        default=None, description="Jinja file that renders this source; default: the tokenizer's own"
    )
    weight: float = Field(default=1.0, ge=1e-3, le=1e3, description="of every trained token")
    limit: PositiveInt | None = Field(default=None, description="lines or rows of each file, from its start")
    licence: str = Field(default="", description="kept in the manifest")

    @property
    def label(self) -> str:
        """`name`, or what the source is called."""
        if self.name:
            return self.name
        last = self.source.rstrip("/").rsplit("/", 1)[-1]
        for suffix in (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow"):
            last = last.removesuffix(suffix)
        return last.strip("*.") or "data"


class Benchmark(Section):
    """Items that the training set must not hold."""

    name: str = Field(description="a known benchmark, or any name together with fields")
    source: Location = Field(description="file, glob, or name of a hub data set")
    subset: str | None = Field(default=None, description="configuration name of a hub data set")
    split: str = Field(default="test", description="of a hub data set")
    fields: list[str] = Field(
        default_factory=list, description="columns whose text is an item's; default: the known benchmark's"
    )


class Decontaminate(Section):
    """What is dropped because a benchmark holds it."""

    benchmarks: list[Benchmark] = Field(min_length=1, description="whose items are looked for")
    passes: list[str | dict[str, Any]] = Field(
        default_factory=lambda: ["sampled_8gram"],
        description="in order; a name, or {kind: name, option: value}",
    )
    borderline: Literal["drop", "keep", "review"] = Field(
        default="review",
        description="near hits; review: left out until a person decides, and written to a file",
    )
    allow: Location | None = Field(default=None, description="file of items that may stay, with reasons")
    decisions: Location | None = Field(default=None, description="a review file with a person's decisions")


class Near(Section):
    """Near duplicates, by MinHash."""

    threshold: Fraction = Field(default=0.8, description="Jaccard similarity of word shingles")
    of: Literal["prompt", "whole"] = Field(default="whole", description="what is compared")


class Deduplicate(Section):
    """Which of several copies is kept: the first, in the order of sources and rows."""

    exact: Literal["prompt", "whole", "off"] = Field(
        default="whole", description="what is compared, case and blanks aside"
    )
    near: Near | None = Field(default=None, description="near duplicates too")


class Compose(Section):
    """The target mix."""

    by: Literal["samples", "trained_tokens"] = Field(
        default="trained_tokens", description="what shares are of"
    )
    categories: dict[str, float] = Field(default_factory=dict, description="category -> share; sum 1")
    sources: dict[str, float] = Field(default_factory=dict, description="source -> share; sum 1")
    total: PositiveInt | None = Field(
        default=None, description="samples or trained tokens; default: the most without repeating any"
    )
    max_repeat: float = Field(default=4.0, ge=1, description="passes over an example before it is an error")

    @model_validator(mode="after")
    def _shares(self) -> Compose:
        if not self.categories and not self.sources:
            raise ValueError("give shares of categories, of sources, or of both")
        for shares in (self.categories, self.sources):
            total = sum(shares.values())
            if shares and (min(shares.values()) < 0 or abs(total - 1) > 1e-6):
                raise ValueError(f"shares must be 0 or more and add up to 1; they add up to {total:g}")
        return self


class Pack(Section):
    """Examples side by side in rows of one length."""

    length: PositiveInt = Field(default=8192, description="tokens a pack holds")
    window: PositiveInt = Field(default=10_000, description="examples that are fitted together")
    window_tokens: PositiveInt = Field(
        default=32 << 20, description="tokens a window holds at most; bounds memory"
    )
    long_from: PositiveInt | None = Field(
        default=32_768, description="tokens from which an example gets fewer companions; null: no bound"
    )


class Data(Section):
    """From raw chats to packed supervision: `trivet data build`."""

    output: Location = Field(default="data/{name}", description="folder; {name} is the recipe's name")
    sources: list[Source] = Field(min_length=1, description="in order; the first of copies is kept")
    tokenizer: Location | None = Field(
        default=None, description="directory or hub name; default: the policy's, where that is one"
    )
    text_only: bool = Field(default=True, description="drop conversations with images or sound")
    rounds: bool = Field(default=True, description="one example for each completed response")
    supervise: Literal["all", "reasoning"] = Field(
        default="all", description="reasoning: train only assistant messages that carry reasoning"
    )
    merge: bool = Field(
        default=True, description="merge examples that begin the next one, where the template allows it"
    )
    render: bool = Field(default=True, description="false: no tokens, and nothing is packed")
    max_length: PositiveInt = Field(
        default=120_000, description="tokens after the template; longer examples are dropped and counted"
    )
    check_every: PositiveInt = Field(
        default=100, description="every so many examples ids are compared with the template's own"
    )
    decontaminate: Decontaminate | None = Field(default=None, description="against benchmarks")
    deduplicate: Deduplicate | None = Field(default_factory=Deduplicate, description="null: copies stay")
    compose: Compose | None = Field(default=None, description="the target mix; null: everything once")
    pack: Pack | None = Field(default_factory=Pack, description="null: nothing is packed")
    max_bad: Fraction = Field(
        default=0.05, description="share of a source's rows that may be unreadable before the build stops"
    )
    workers: PositiveInt | None = Field(default=None, description="processes; default: all cores")
    piece_mb: PositiveInt = Field(default=64, description="input that is read at once by one process")

    @field_validator("sources")
    @classmethod
    def _labels_differ(cls, sources: list[Source]) -> list[Source]:
        labels = [source.label for source in sources]
        double = sorted({label for label in labels if labels.count(label) > 1})
        if double:
            raise ValueError(f"names of sources must differ; {double} are used more than once: set name")
        return sources

    @model_validator(mode="after")
    def _tokens_to_pack(self) -> Data:
        if not self.render and self.pack is not None and "pack" in self.model_fields_set:
            raise ValueError("pack needs tokens: leave render on, or set pack to null")
        if self.compose is not None and not self.render and self.compose.by == "trained_tokens":
            raise ValueError("compose.by trained_tokens needs tokens: leave render on, or say by: samples")
        if self.compose is not None:
            known = {
                "categories": {s.category for s in self.sources},
                "sources": {s.label for s in self.sources},
            }
            for what, names in known.items():
                if unknown := sorted(set(getattr(self.compose, what)) - names):
                    raise ValueError(f"compose.{what} names {unknown}; there are {sorted(names)}")
        return self
