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

__all__ = [
    "ROUNDING",
    "GroupNormalised",
    "GroupStack",
    "LeaveOneOut",
    "MeanOnly",
    "all_equal",
    "centred",
    "lift",
]
