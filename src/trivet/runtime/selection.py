"""Which checkpoint a stage hands on, and when a plateau ends it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.recipe.supervised import KeepBest

if TYPE_CHECKING:
    from trivet.trainer import Trainer


@dataclass(slots=True)
class Standing:
    """The best value so far and its step; the value at the last progress, and evaluations since then."""

    step: int | None = None
    best: float | None = None
    progress: float | None = None
    waited: int = 0


def look(standing: Standing, config: KeepBest, step: int, value: float) -> Standing:
    """The standing after the evaluation of `step`.

    The best is the first of the best values. Progress is a value better than that of the last progress by
    more than `min_delta`; every other evaluation is waited. A value that is not finite is neither.
    """
    sign = 1.0 if config.mode == "max" else -1.0
    if not math.isfinite(value):
        return Standing(standing.step, standing.best, standing.progress, standing.waited + 1)
    best = standing.best is None or sign * (value - standing.best) > 0
    moved = standing.progress is None or sign * (value - standing.progress) > config.min_delta
    return Standing(
        step if best else standing.step,
        value if best else standing.best,
        value if moved else standing.progress,
        0 if moved else standing.waited + 1,
    )


class Selection:
    """Keeps the weights of the best evaluation in `directory`, and the standing in the stage's checkpoints.

    Weights are written when they are found best; those before them are removed only once a checkpoint knows
    of the new ones, so that a run which goes on from an older checkpoint finds what that one calls best.
    """

    def __init__(self, config: KeepBest, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.standing = Standing()

    def restore(self, state: dict[str, Any] | None) -> None:
        self.standing = Standing(**state) if state else Standing()

    def state(self) -> dict[str, Any]:
        return asdict(self.standing)

    def look(self, step: int, value: float, trainer: Trainer) -> None:
        """Take an evaluation into account; keep its weights when it is the best."""
        from trivet.trainer import checkpoint

        self.standing = look(self.standing, self.config, step, value)
        if self.standing.step == step:
            checkpoint.write_weights(self.directory, step, trainer)

    @property
    def plateau(self) -> str | None:
        """Why the stage ends here, where it does."""
        patience = self.config.patience
        if patience is None or self.standing.waited < patience:
            return None
        return f"no progress of {self.config.metric} in {patience} evaluations"

    def thin(self) -> None:
        """A checkpoint has the standing: what it does not name is not needed any more."""
        from trivet.trainer import checkpoint

        if self.standing.step is not None:
            checkpoint.keep_only(self.directory, self.standing.step)

    def load(self, trainer: Trainer) -> None:
        """Put the best weights into the trainer. Raises CheckpointError where they are damaged."""
        from trivet.trainer import checkpoint

        if self.standing.step is not None:
            checkpoint.read_weights(self.directory, self.standing.step, trainer)
