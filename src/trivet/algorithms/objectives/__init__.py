"""Objectives: what each position (or unit) contributes to the loss. torch is imported inside the calls.

An objective returns weighted terms, to be summed, and statistics that add up over chunks, micro-batches and
ranks (`evaluate` documents their names).
"""

from trivet.algorithms.objectives.centering import CentredPG
from trivet.algorithms.objectives.policy import LOG_RATIO_BOUND, CrossEntropy, PPOClip, mismatch_stats
from trivet.algorithms.objectives.value import BradleyTerry, ValueLoss

__all__ = [
    "LOG_RATIO_BOUND",
    "BradleyTerry",
    "CentredPG",
    "CrossEntropy",
    "PPOClip",
    "ValueLoss",
    "mismatch_stats",
]
