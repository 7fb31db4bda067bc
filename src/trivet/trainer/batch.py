"""From groups to flat columns, and from one batch to several updates."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.algorithms.base import Batch, PreparedBatch
from trivet.types import Group


def collate(groups: Sequence[Group]) -> Batch: ...


def split(prepared: PreparedBatch, n: int) -> list[PreparedBatch]: ...
