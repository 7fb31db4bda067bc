"""Credit: from rewards to advantages. Compared is within (group, player), never across."""

from trivet.algorithms.credit.group import (
    ROUNDING,
    GroupNormalised,
    GroupStack,
    LeaveOneOut,
    MeanOnly,
    all_equal,
    centred,
    lift,
)
from trivet.algorithms.credit.returns import GAE, Returns

__all__ = [
    "GAE",
    "ROUNDING",
    "GroupNormalised",
    "GroupStack",
    "LeaveOneOut",
    "MeanOnly",
    "Returns",
    "all_equal",
    "centred",
    "lift",
]
