"""Token-in token-out generation: the contract every engine keeps, and the embedded engine under `torch`."""

from trivet.engine.base import (
    Engine,
    EngineError,
    EngineFactory,
    EngineTimeout,
    Finish,
    Generation,
    Sampling,
    Top,
    WeightsNotArrived,
    request_seed,
)

__all__ = [
    "Engine",
    "EngineError",
    "EngineFactory",
    "EngineTimeout",
    "Finish",
    "Generation",
    "Sampling",
    "Top",
    "WeightsNotArrived",
    "request_seed",
]
