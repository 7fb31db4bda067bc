"""TensorBoard as an extra: scalars of every metric, one run a stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivet.monitor.files import MonitorError


class Board:
    """Writes `tensorboard/<stage>/`. Raises MonitorError when TensorBoard is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MonitorError(
                f"monitor.tensorboard is true but TensorBoard cannot be imported ({error}): "
                "pip install 'trivet[tensorboard]', or set monitor.tensorboard: false"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._purge: dict[str, int] = {}

    def write(self, stage: str, step: int, values: Mapping[str, int | float | None]) -> None:
        """One step's numbers; null ones are left out."""
        if stage not in self._writers:
            purge = self._purge.pop(stage, None)
            self._writers[stage] = self._make(str(self._folder / stage), purge_step=purge)
        writer = self._writers[stage]
        for key, value in values.items():
            if value is not None:
                writer.add_scalar(key, value, step)
        writer.flush()

    def rewind(self, stage: str, step: int, later: set[str]) -> None:
        """The next writer of a rewound stage hides what was written after the checkpoint."""
        for name in {stage, *later}:
            writer = self._writers.pop(name, None)
            if writer is not None:
                writer.close()
            self._purge[name] = step + 1 if name == stage else 0

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
