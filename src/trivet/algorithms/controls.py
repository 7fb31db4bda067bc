"""Controls: a stream's scale moves with what training shows. `control(scale, step, metrics) -> scale`.

The metrics are those of the step just trained, as the run logs them: `train/<stream>/<name>`, and
`train/entropy`, `train/kl` (to the sampler) under their plain names. Controls keep no state: where the scale
stands is all they know, and the run keeps it in its checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from trivet.algorithms.base import AlgorithmError
from trivet.algorithms.registry import nearest, register_control

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


def _read(name: str, metrics: Mapping[str, float], control: str) -> float | None:
    """The metric; None where the step trained nothing or it is not a number. Raises AlgorithmError for a name
    that the run does not log."""
    value = metrics.get(name)
    if value is None and not metrics.get("train/skipped"):
        known = [key for key in metrics if key.startswith("train/")]
        raise AlgorithmError(f"control {control!r} reads metric {name!r}{nearest(name, known)}")
    return value if value is not None and math.isfinite(value) else None


@register_control("adaptive_kl")
@dataclass(frozen=True)
class AdaptiveKL:
    """beta <- beta (1 + gain e), e = clip((KL - target) / target, -limit, limit).

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2, with its
    gain 0.1 and limit 0.2. `target`: of `metric`, by default the k3 estimate per token of the stream `kl`;
    the source's is per answer, so divide it by a usual length. Starts from a weight above 0.
    """

    target: Positive
    gain: Positive = 0.1
    limit: Positive = 0.2
    metric: str = "train/kl/k3"

    def __post_init__(self) -> None:
        if self.gain * self.limit >= 1:
            raise ValueError(
                f"gain {self.gain} times limit {self.limit} must lie below 1: the weight stays > 0"
            )

    def __call__(self, scale: float, step: int, metrics: Mapping[str, float]) -> float:
        value = _read(self.metric, metrics, "adaptive_kl")
        if value is None:
            return scale
        error = (value - self.target) / self.target
        return scale * (1 + self.gain * max(-self.limit, min(self.limit, error)))


@register_control("linear_decay")
@dataclass(frozen=True)
class LinearDecay:
    """The scale of step k + 1 is start + (end - start) min(k / steps, 1), start the scale of step 1.

    Written as a move by 1 / (steps - k + 1) of what is left, so it goes on from wherever a checkpoint stands.
    """

    steps: Annotated[int, Field(gt=0)]
    end: float = 0.0

    def __call__(self, scale: float, step: int, metrics: Mapping[str, float]) -> float:
        left = self.steps - step + 1  # moves left, this one among them
        return self.end if left <= 1 else scale + (self.end - scale) / left


@register_control("entropy_target")
@dataclass(frozen=True)
class EntropyTarget:
    """The scale rises by `delta` where the entropy lies below `target`, else it falls by it; within 0..high.

    Source: He et al. 2025, "Skywork open reasoner 1 technical report", adaptive entropy control. `metric`: by
    default the mean entropy of the trained tokens, in nats.
    """

    target: Positive
    delta: Positive = 0.005
    high: NonNegative = 1.0
    metric: str = "train/entropy"

    def __call__(self, scale: float, step: int, metrics: Mapping[str, float]) -> float:
        value = _read(self.metric, metrics, "entropy_target")
        if value is None:
            return scale
        return min(max(scale + (self.delta if value < self.target else -self.delta), 0.0), self.high)
