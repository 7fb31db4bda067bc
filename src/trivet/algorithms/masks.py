"""Masks: which tokens may teach. Credit has been given before; the masked stay in their group's baseline."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trivet.algorithms.base import Batch
from trivet.algorithms.registry import register_mask


@register_mask("truncated")
def truncated(batch: Batch) -> np.ndarray:
    """keep_N: rollouts the policy ended itself. Source: DAPO (Yu et al. 2025), overlong filtering."""
    return ~batch.truncated_N


def staleness_T(
    batch: Batch, current_version: int, distance: Callable[[int], int] | None = None
) -> np.ndarray:
    """int64 age of the turn each token belongs to, in publications; 0 where nothing was sampled.

    A turn is as old as its oldest token. `distance(version)` counts publications along the current line;
    without it versions are taken to be consecutive (`current_version - version`).
    """
    known_T = batch.sampled_T & (batch.version_T >= 0)
    versions, inverse = np.unique(batch.version_T[known_T], return_inverse=True)
    measure = distance or (lambda version: current_version - version)
    age = np.asarray([max(0, measure(int(v))) for v in versions], np.int64)
    age_T = np.zeros(batch.tokens, np.int64)
    age_T[known_T] = age[inverse]
    turns = int(batch.turn_T.max(initial=-1)) + 2
    key_T = batch.rollout_T * turns + batch.turn_T + 1
    oldest = np.zeros(batch.rollouts * turns, np.int64)
    np.maximum.at(oldest, key_T, age_T)
    return np.where(batch.turn_T >= 0, oldest[key_T], 0)
