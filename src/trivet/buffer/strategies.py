"""In what order ready groups are delivered: a small registry of strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from trivet.buffer.errors import LedgerError
from trivet.buffer.schema import issues


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ready, unpinned issues of a stage, as a strategy sees them."""

    connection: Connection
    where: tuple[sa.ColumnElement[bool], ...]

    def first(
        self, n: int, *order: sa.ColumnElement, where: tuple[sa.ColumnElement[bool], ...] = ()
    ) -> list[int]:
        """Numbers of the first `n` candidates (that also fulfil `where`) in the given order."""
        query = sa.select(issues.c.seq).where(*self.where, *where).order_by(*order).limit(n)
        return [int(seq) for seq in self.connection.scalars(query)]


Strategy = Callable[[Candidates, int], list[int]]
"""Picks up to n issue numbers, in the order of delivery, without changing anything."""

_REGISTRY: dict[str, Strategy] = {}


def register_strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Make a delivery strategy known under `name`. Raises LedgerError when the name is taken."""

    def add(strategy: Strategy) -> Strategy:
        if name in _REGISTRY:
            raise LedgerError(f"delivery strategy {name!r} is already registered")
        _REGISTRY[name] = strategy
        return strategy

    return add


def get_strategy(name: str) -> Strategy:
    """The strategy of that name. Raises LedgerError naming the known ones."""
    if name not in _REGISTRY:
        raise LedgerError(f"delivery strategy {name!r} is not known; known are {sorted(_REGISTRY)}")
    return _REGISTRY[name]


@register_strategy("fifo")
def fifo(candidates: Candidates, n: int) -> list[int]:
    """In order of issue."""
    return candidates.first(n, issues.c.seq.asc())


@register_strategy("freshest")
def freshest(candidates: Candidates, n: int) -> list[int]:
    """By the version of the oldest token, newest first; then in order of issue; foreign tokens last."""
    return candidates.first(n, sa.func.coalesce(issues.c.min_version, -1).desc(), issues.c.seq.asc())
