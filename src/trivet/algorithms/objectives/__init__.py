"""Objectives: what each position (or unit) contributes to the loss. torch is imported inside the calls.

An objective returns weighted terms, to be summed, and statistics that add up over chunks, micro-batches and
ranks (`evaluate` documents their names).
"""

from trivet.algorithms.objectives.centering import CentredPG
from trivet.algorithms.objectives.policy import LOG_RATIO_BOUND, PPOClip, mismatch_stats
from trivet.algorithms.objectives.preference import DPO, IPO, KTO, ORPO
from trivet.algorithms.objectives.regularise import KL, EntropyBonus
from trivet.algorithms.objectives.sequence import GMPO, GSPO, TOPR
from trivet.algorithms.objectives.supervised import CrossEntropy
from trivet.algorithms.objectives.value import BradleyTerry, ValueLoss
from trivet.algorithms.objectives.weighted import CISPO, DPPO, REC, SAPO, SPPO, ISReinforce

__all__ = [
    "CISPO",
    "DPO",
    "DPPO",
    "GMPO",
    "GSPO",
    "IPO",
    "KL",
    "KTO",
    "LOG_RATIO_BOUND",
    "ORPO",
    "REC",
    "SAPO",
    "SPPO",
    "TOPR",
    "BradleyTerry",
    "CentredPG",
    "CrossEntropy",
    "EntropyBonus",
    "ISReinforce",
    "PPOClip",
    "ValueLoss",
    "mismatch_stats",
]
