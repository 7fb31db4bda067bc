"""Warnings that name their cause, folded when they repeat."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Cause:
    count: int = 0
    told: int = 0
    told_at: float = float("-inf")
    text: str = ""


class Notices:
    """Counts warnings by cause and says which to print now.

    The first of a cause is told at once. Later ones are told together, when their number has at least
    doubled and `gap_s` have passed, so that a warning a rollout fills no log.
    """

    def __init__(self, *, gap_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._causes: dict[str, _Cause] = {}
        self._gap_s, self._clock = gap_s, clock

    def add(self, cause: str, text: str) -> str | None:
        """Count one; what to print of it now, or None while it is folded."""
        entry = self._causes.setdefault(cause, _Cause())
        entry.count += 1
        entry.text = text
        due = entry.count >= 2 * entry.told and self._clock() - entry.told_at >= self._gap_s
        return self._tell(entry) if entry.told == 0 or due else None

    def rest(self) -> list[tuple[str, str]]:
        """(cause, text) of all that was folded and not told yet; it counts as told afterwards."""
        return [(name, self._tell(e)) for name, e in self._causes.items() if e.count > e.told]

    def counts(self) -> dict[str, int]:
        """How often each cause was named."""
        return {name: entry.count for name, entry in self._causes.items()}

    def _tell(self, entry: _Cause) -> str:
        more = entry.count - entry.told
        entry.told, entry.told_at = entry.count, self._clock()
        return entry.text if more == entry.count == 1 else f"{entry.text} ({more} more, {entry.count} in all)"
