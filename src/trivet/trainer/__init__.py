"""Batch building, packing, forward, objectives on streams, optimiser, checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.algorithms.prepare import prepare
    from trivet.trainer.batch import collate, split
    from trivet.trainer.model import ModelError
    from trivet.trainer.optim import PatternError
    from trivet.trainer.packing import PlanError
    from trivet.trainer.trainer import Trainer, TrainingDiverged

_WHERE = {
    "ModelError": "trivet.trainer.model",
    "PatternError": "trivet.trainer.optim",
    "PlanError": "trivet.trainer.packing",
    "Trainer": "trivet.trainer.trainer",
    "TrainingDiverged": "trivet.trainer.trainer",
    "collate": "trivet.trainer.batch",
    "prepare": "trivet.algorithms.prepare",
    "split": "trivet.trainer.batch",
}

__all__ = [
    "ModelError",
    "PatternError",
    "PlanError",
    "Trainer",
    "TrainingDiverged",
    "collate",
    "prepare",
    "split",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for: torch only with the trainer itself."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
