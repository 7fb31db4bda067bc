"""Benchmarks over checkpoints: pass@k with intervals."""

from trivet.evals.evaluate import Evaluation, EvaluationError, evaluate, summarise
from trivet.evals.passk import mean_interval, pass_at_k, wilson

__all__ = [
    "Evaluation",
    "EvaluationError",
    "evaluate",
    "mean_interval",
    "pass_at_k",
    "summarise",
    "wilson",
]
