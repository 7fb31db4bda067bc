"""An algorithm in one file: imitate the best answers of each group (expert iteration, one update a round).

No advantage, no ratio: a mask leaves the best rollouts of each group whose rewards differ, and cross-entropy
trains on their tokens.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from trivet.algorithms import Algorithm, Batch, StreamSpec, make_part, register_algorithm, register_mask
from trivet.algorithms.credit import GroupStack


@register_mask("best_of_group")
def best_of_group(batch: Batch, *, share: Annotated[float, Field(gt=0, le=1)] = 0.25) -> np.ndarray:
    """keep (_N,): rollouts among the best `share` of their group; none of a group whose rewards are equal."""
    stack = GroupStack.of(batch)  # scored rollouts by (group, player); the rest is never kept
    reward_GK = np.where(stack.mask_GK, stack.gather(batch.reward_N), -np.inf)
    count_G = np.maximum(1, np.floor(share * stack.mask_GK.sum(-1))).astype(int)
    bound_G = np.take_along_axis(-np.sort(-reward_GK, -1), count_G[:, None] - 1, -1)
    lowest_G = np.where(stack.mask_GK, reward_GK, np.inf).min(-1, keepdims=True)
    best_GK = stack.mask_GK & (reward_GK >= bound_G) & (reward_GK > lowest_G)
    return np.nan_to_num(stack.scatter(best_GK.astype(float))) > 0


@register_algorithm("best_of")
def best_of(*, share: float = 0.25, aggregation: str = "token_mean") -> Algorithm:
    """loss = sum over t of w_t * -log pi(t), t over the tokens of the best rollouts."""
    stream = StreamSpec(
        "best", make_part("objective", "cross_entropy"), make_part("aggregation", aggregation)
    )
    mask = make_part("mask", {"kind": "best_of_group", "share": share})
    return Algorithm("best_of", (stream,), masks=(mask,))
