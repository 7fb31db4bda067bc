"""How a rollout is scored: verifiers, functions, constraints, and the processes they run in.

Names are imported when first used: a worker process needs only its own module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.rewards.function import FunctionReward
    from trivet.rewards.math import MathVerifier
    from trivet.rewards.pool import Outcome, PoolError, WorkerPool
    from trivet.rewards.reward_model import RewardModel, RewardModelError

__all__ = [
    "FunctionReward",
    "MathVerifier",
    "Outcome",
    "PoolError",
    "RewardModel",
    "RewardModelError",
    "WorkerPool",
]

_HOME = {
    "FunctionReward": "function",
    "MathVerifier": "math",
    "Outcome": "pool",
    "PoolError": "pool",
    "RewardModel": "reward_model",
    "RewardModelError": "reward_model",
    "WorkerPool": "pool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"trivet.rewards.{_HOME[name]}"), name)
