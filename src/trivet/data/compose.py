"""What a mix is made of, and how often each example is used so that it becomes what was asked for.

Targets are shares of categories, of sources, or of both, counted in examples or in trained tokens. A source
below its share is repeated: whole passes and a remainder chosen by the seed; one above it gives a choice.
What is chosen in one source of one category depends on the seed, their names and its own examples, on nothing
else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

Unit = Literal["samples", "trained_tokens"]

HISTOGRAM_EDGES: tuple[int, ...] = (0, *(2**k for k in range(8, 18)))
"""Lengths (tokens) at which the bins of a length histogram begin; the last has no end."""


_FIT_ROUNDS = 2000
_FIT_OFF = 1e-3  # where a cell must vanish for both tables to be met, fitting nears them slowly


class MixError(ValueError):
    """Targets that no use of these examples can meet; says which and why."""


@dataclass(frozen=True, slots=True)
class Examples:
    """An index of examples (_N). `source_N` and `category_N` number the names in `sources` and `categories`;
    `tokens_N` is the whole length, `trained_N` the tokens with loss, `turns_N` the messages of the assistant
    and `supervised_N` those of them that are trained."""

    sources: tuple[str, ...]
    categories: tuple[str, ...]
    source_N: np.ndarray
    category_N: np.ndarray
    tokens_N: np.ndarray
    trained_N: np.ndarray
    turns_N: np.ndarray
    supervised_N: np.ndarray

    def __post_init__(self) -> None:
        names = ("source_N", "category_N", "tokens_N", "trained_N", "turns_N", "supervised_N")
        lengths = {name: len(getattr(self, name)) for name in names}
        if len(set(lengths.values())) > 1:
            raise MixError(f"the columns of the index differ in length: {lengths}")
        for name, known in (("source_N", self.sources), ("category_N", self.categories)):
            column = getattr(self, name)
            if len(column) and not (column.min() >= 0 and column.max() < len(known)):
                raise MixError(
                    f"{name} names {column.min()}..{column.max()}, but there are {len(known)} names"
                )
            if len(set(known)) < len(known):
                raise MixError(f"{name}: names occur twice: {sorted(known)}")

    def __len__(self) -> int:
        return len(self.source_N)

    def amount(self, unit: Unit) -> np.ndarray:
        """What each example counts in a unit. int64 (_N,)."""
        return np.ones(len(self), np.int64) if unit == "samples" else self.trained_N.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a mix should be. `categories` and `sources`: name -> share of the mix, summing to 1; what is left
    out has no say (None), but where a table is given every name that has examples must be in it, with 0 to
    leave it out. `by` is what shares and `total` count. `total` None: as much as the examples with a share
    have, each used once. `most_passes`: how often a source of a category may be used at most."""

    categories: Mapping[str, float] | None = None
    sources: Mapping[str, float] | None = None
    by: Unit = "samples"
    total: int | None = None
    most_passes: float = 8.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """`uses_N`: how often each example is used. `cells`: one row per category and source with what was asked
    and what was achieved, `categories` and `sources` the same summed. Shares are of the unit asked by."""

    uses_N: np.ndarray
    by: Unit
    total: int
    cells: list[dict[str, Any]] = field(default_factory=list)
    categories: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def order(self) -> np.ndarray:
        """Numbers of the examples used, each as often as it is used, in index order. int64."""
        return np.repeat(np.arange(len(self.uses_N)), self.uses_N)


def compose(examples: Examples, targets: Targets) -> Mix:
    """How often each example is used so that the mix meets the targets. Raises MixError where it cannot."""
    _check_targets(targets)
    amount_N = examples.amount(targets.by)
    have_CS = _cells(examples, amount_N)
    count_CS = _cells(examples, np.ones(len(examples), np.int64))
    wanted_C = _shares(targets.categories, examples.categories, count_CS.sum(1), "category")
    wanted_S = _shares(targets.sources, examples.sources, count_CS.sum(0), "source")
    share_CS = _fit(have_CS, wanted_C, wanted_S, examples, targets.by)
    total = targets.total
    if total is None:
        total = int(have_CS[share_CS > 0].sum())
    asked_CS = _apportion(share_CS, total)
    _check_passes(asked_CS, have_CS, examples, targets)
    uses_N = np.zeros(len(examples), np.int64)
    cell_N = examples.category_N.astype(np.int64) * len(examples.sources) + examples.source_N
    for category, source in np.argwhere(asked_CS > 0).tolist():
        members = np.flatnonzero(cell_N == category * len(examples.sources) + source)
        key = f"{targets.seed}\n{examples.categories[category]}\n{examples.sources[source]}"
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big"))
        uses_N[members] = _uses(amount_N[members], int(asked_CS[category, source]), rng)
    return _report(examples, targets.by, share_CS, asked_CS, uses_N)


def _check_targets(targets: Targets) -> None:
    if targets.by not in ("samples", "trained_tokens"):
        raise MixError(f"by is {targets.by!r}; it must be samples or trained_tokens")
    if targets.total is not None and not 0 < targets.total < 2**53:
        raise MixError(f"total is {targets.total}; it must be above 0")
    if not targets.most_passes > 0:
        raise MixError(f"most_passes is {targets.most_passes}; it must be above 0")


def _cells(examples: Examples, value_N: np.ndarray) -> np.ndarray:
    """Sums over category and source. int64 (_C, _S)."""
    out = np.zeros((len(examples.categories), len(examples.sources)), np.int64)
    np.add.at(out, (examples.category_N, examples.source_N), value_N)
    return out


def _shares(
    wanted: Mapping[str, float] | None, names: Sequence[str], count: np.ndarray, what: str
) -> np.ndarray | None:
    """The shares in the order of the names. Raises MixError for what is missing, unknown, or does not sum."""
    if wanted is None:
        return None
    for name, share in wanted.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise MixError(f"{what} {name!r}: its share is {share!r}; it must be a number from 0 to 1")
        if share and name not in names:
            raise MixError(
                f"{what} {name!r} has a share of {share}, but no example; there are {sorted(names)}"
            )
        if share and not count[names.index(name)]:
            raise MixError(f"{what} {name!r} has a share of {share}, but no example is left in it")
    unnamed = [f"{n} ({c} examples)" for n, c in zip(names, count, strict=True) if c and n not in wanted]
    if unnamed:
        raise MixError(f"no share is given for {what} {', '.join(unnamed)}: give one, 0 to leave it out")
    if abs(sum(wanted.values()) - 1) > 1e-6:
        raise MixError(f"the shares by {what} sum to {sum(wanted.values()):.6g}, not to 1: {dict(wanted)}")
    return np.asarray([wanted.get(name, 0.0) for name in names], np.float64)


def _fit(
    have_CS: np.ndarray,
    wanted_C: np.ndarray | None,
    wanted_S: np.ndarray | None,
    examples: Examples,
    unit: Unit,
) -> np.ndarray:
    """Share of each cell: as the examples lie, scaled by rows and columns in turn until both tables are met
    (iterative proportional fitting). float64 (_C, _S), summing to 1."""
    share_CS = have_CS.astype(np.float64)
    tables = [(wanted_C, 1, examples.categories), (wanted_S, 0, examples.sources)]
    for wanted, axis, names in tables:
        if wanted is not None:
            _check_amount(wanted, have_CS.sum(axis), names, unit)
    for wanted, axis, _ in tables:  # what is left out counts for nothing in the other table
        if wanted is not None:
            share_CS *= np.expand_dims(wanted > 0, axis)
    if not share_CS.sum():
        raise MixError(
            f"there are no {unit.replace('_', ' ')} to mix: no example that has any lies in a category and a "
            "source that have a share"
        )
    off, name = 0.0, ""
    for _ in range(_FIT_ROUNDS):
        for wanted, axis, _ in tables:
            if wanted is not None:
                sums = share_CS.sum(axis)
                factor = np.divide(wanted, sums, out=np.zeros_like(wanted), where=sums > 0)
                share_CS = share_CS * np.expand_dims(factor, axis)
        off, name = _worst(share_CS, tables)
        if off < 1e-9:
            break
    if off > _FIT_OFF:
        raise MixError(
            f"the shares by category and by source cannot be met together, whatever is repeated: {name!r} "
            f"stays off by {off:.2%}. A category that one source alone has can have no more than that "
            "source's share"
        )
    return share_CS / share_CS.sum()


def _worst(share_CS: np.ndarray, tables: Sequence[tuple[Any, int, Sequence[str]]]) -> tuple[float, str]:
    """By how much the worst row or column misses its wanted share, and its name."""
    out = (0.0, "")
    for wanted, axis, names in tables:
        if wanted is not None:
            off = np.abs(share_CS.sum(axis) - wanted)
            out = max(out, (float(off.max(initial=0.0)), names[int(off.argmax())]))
    return out


def _check_amount(wanted: np.ndarray, have: np.ndarray, names: Sequence[str], unit: Unit) -> None:
    for name, share, amount in zip(names, wanted, have, strict=True):
        if share and not amount:
            raise MixError(
                f"{name!r} has a share of {share}, but its examples have no {unit.replace('_', ' ')}"
            )


def _apportion(share_CS: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to the shares that sum to the total: largest remainders. int64 (_C, _S)."""
    exact = (share_CS * total).ravel()
    out = np.floor(exact).astype(np.int64)
    short = total - int(out.sum())
    out[np.argsort(-(exact - out), kind="stable")[:short]] += 1
    return out.reshape(share_CS.shape)


def _check_passes(asked_CS: np.ndarray, have_CS: np.ndarray, examples: Examples, targets: Targets) -> None:
    for category, source in np.argwhere(asked_CS > 0).tolist():
        asked, have = int(asked_CS[category, source]), int(have_CS[category, source])
        if asked > targets.most_passes * have:
            what = f"category {examples.categories[category]!r} of source {examples.sources[source]!r}"
            raise MixError(
                f"{what} has {have} {targets.by.replace('_', ' ')}, its part of the mix is {asked}: "
                f"{asked / have:.1f} passes, above most_passes {targets.most_passes:g}. Lower its share or "
                "the total, or allow more passes"
            )


def _uses(amount_N: np.ndarray, asked: int, rng: np.random.Generator) -> np.ndarray:
    """Uses of a cell's examples that come to about `asked`: whole passes, then the examples of a permutation
    up to where the sum is nearest. int64 (_N,)."""
    passes, rest = divmod(asked, int(amount_N.sum()))
    order_N = rng.permutation(len(amount_N))
    sum_N = np.cumsum(amount_N[order_N])
    chosen = int(np.searchsorted(sum_N, rest, side="right"))  # the most whose sum is not above the rest
    if chosen < len(sum_N) and sum_N[chosen] - rest < rest - (sum_N[chosen - 1] if chosen else 0):
        chosen += 1
    uses_N = np.full(len(amount_N), passes, np.int64)
    uses_N[order_N[:chosen]] += 1
    return uses_N


def _report(
    examples: Examples,
    unit: Unit,
    share_CS: np.ndarray,
    asked_CS: np.ndarray,
    uses_N: np.ndarray,
) -> Mix:
    amount_N = examples.amount(unit)
    tables = {
        "asked_share": share_CS,
        "asked": asked_CS,
        "achieved": _cells(examples, uses_N * amount_N),
        "available": _cells(examples, amount_N),
        "examples": _cells(examples, np.ones(len(examples), np.int64)),
        "uses": _cells(examples, uses_N),
    }
    achieved = int(tables["achieved"].sum())

    def row(names: dict[str, str], values: dict[str, Any]) -> dict[str, Any]:
        plain = {key: value.item() for key, value in values.items()}
        passes = plain["uses"] / plain["examples"] if plain["examples"] else 0.0
        return {**names, **plain, "achieved_share": plain["achieved"] / max(achieved, 1), "passes": passes}

    cells = [
        row(
            {"category": examples.categories[c], "source": examples.sources[s]},
            {key: table[c, s] for key, table in tables.items()},
        )
        for c, s in np.argwhere(tables["examples"] > 0).tolist()
    ]
    categories, sources = (
        [row({what: name}, {k: t.sum(axis)[i] for k, t in tables.items()}) for i, name in enumerate(names)]
        for what, axis, names in (("category", 1, examples.categories), ("source", 0, examples.sources))
    )
    return Mix(uses_N, unit, int(asked_CS.sum()), cells, categories, sources)


# -- what a mix is made of -------------------------------------------------------------------------


def composition_table(
    examples: Examples, uses_N: np.ndarray | None = None, *, edges: Sequence[int] = HISTOGRAM_EDGES
) -> dict[str, Any]:
    """What the examples, each counted as often as it is used (once by default), come to.

    `cells` (by category and source), `categories`, `sources` and `total`: samples, share_samples, raw_tokens,
    trained_tokens, share_trained, turns, supervised_turns, and of the lengths in tokens mean, p50, p95, max
    and `histogram`, counts of the bins that begin at `edges` (0 first), the last without an end. A percentile
    is the smallest length that at least so many of the samples do not exceed. Plain numbers, ready for JSON.
    """
    uses_N = np.ones(len(examples), np.int64) if uses_N is None else np.asarray(uses_N, np.int64)
    if len(uses_N) != len(examples) or (uses_N < 0).any():
        raise MixError(f"uses must be {len(examples)} numbers, 0 or more")
    if not edges or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise MixError(f"edges must ascend from 0, so that every length has a bin: {list(edges)}")
    whole = (int(uses_N.sum()), int((uses_N * examples.trained_N).sum()))

    def rows(key_N: np.ndarray, names: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
        order_N = np.argsort(key_N, kind="stable")
        border = np.searchsorted(key_N[order_N], np.arange(len(names) + 1))
        parts = [order_N[a:b] for a, b in pairwise(border.tolist())]
        return [
            {**name, **_summary(examples, part, uses_N[part], whole, edges)}
            for name, part in zip(names, parts, strict=True)
            if uses_N[part].any()
        ]

    sources = [{"source": name} for name in examples.sources]
    categories = [{"category": name} for name in examples.categories]
    cell_N = examples.category_N.astype(np.int64) * len(sources) + examples.source_N
    everything = np.arange(len(examples))
    return {
        "edges": list(edges),
        "cells": rows(cell_N, [{**category, **source} for category in categories for source in sources]),
        "categories": rows(examples.category_N, categories),
        "sources": rows(examples.source_N, sources),
        "total": _summary(examples, everything, uses_N, whole, edges),
    }


def _summary(
    examples: Examples, part: np.ndarray, uses_N: np.ndarray, whole: tuple[int, int], edges: Sequence[int]
) -> dict[str, Any]:
    length_N = examples.tokens_N[part].astype(np.int64)
    order_N = np.argsort(length_N, kind="stable")
    length_N, samples_N = length_N[order_N], np.cumsum(uses_N[order_N])
    samples = int(samples_N[-1]) if len(samples_N) else 0
    raw, trained = int((length_N * uses_N[order_N]).sum()), int((examples.trained_N[part] * uses_N).sum())

    def percentile(q: float) -> int:
        if not samples:
            return 0
        return int(length_N[np.searchsorted(samples_N, max(1, math.ceil(round(q * samples, 6))))])

    upto = np.concatenate([[0], samples_N])[np.searchsorted(length_N, edges)]  # samples below each edge
    return {
        "samples": samples,
        "share_samples": samples / whole[0] if whole[0] else 0.0,
        "raw_tokens": raw,
        "trained_tokens": trained,
        "share_trained": trained / whole[1] if whole[1] else 0.0,
        "turns": int((examples.turns_N[part] * uses_N).sum()),
        "supervised_turns": int((examples.supervised_N[part] * uses_N).sum()),
        "mean": raw / samples if samples else 0.0,
        "p50": percentile(0.5),
        "p95": percentile(0.95),
        "max": percentile(1.0),
        "histogram": np.diff(np.append(upto, samples)).tolist(),
    }
