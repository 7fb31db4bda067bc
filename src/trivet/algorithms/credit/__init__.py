"""Credit: from rewards to advantages. Compared is within (group, player), never across."""

from trivet.algorithms.credit.distill import JSD, ReverseKL
from trivet.algorithms.credit.group import (
    ROUNDING,
    GroupNormalised,
    GroupStack,
    LeaveOneOut,
    MeanOnly,
    all_equal,
    centred,
    group_key,
    lift,
    normalised,
    pooled,
)
from trivet.algorithms.credit.outcome import (
    OPMD,
    AsymRE,
    MaxRL,
    Reinforce,
    ReinforcePlusPlusBaseline,
    ReMax,
    SuccessOffset,
    shortness_N,
)
from trivet.algorithms.credit.returns import GAE, Returns
from trivet.algorithms.credit.turns import GiGPO, MultiStepGRPO, lift_turns, turn_returns

__all__ = [
    "GAE",
    "JSD",
    "OPMD",
    "ROUNDING",
    "AsymRE",
    "GiGPO",
    "GroupNormalised",
    "GroupStack",
    "LeaveOneOut",
    "MaxRL",
    "MeanOnly",
    "MultiStepGRPO",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlusBaseline",
    "Returns",
    "ReverseKL",
    "SuccessOffset",
    "all_equal",
    "centred",
    "group_key",
    "lift",
    "lift_turns",
    "normalised",
    "pooled",
    "shortness_N",
    "turn_returns",
]
