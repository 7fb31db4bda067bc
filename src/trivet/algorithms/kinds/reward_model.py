"""A reward model: a language model's body with one number as its output, trained on preferences."""

from __future__ import annotations

import numpy as np

from trivet.algorithms.base import Algorithm, Batch, StreamSpec
from trivet.algorithms.registry import PartSpec, make_part, register_algorithm


def last_trained(batch: Batch) -> np.ndarray:
    """keep_T: each rollout's last trained token, where its score is read (the token that ends the answer)."""
    keep_T = np.zeros(batch.tokens, bool)
    trained = np.flatnonzero(batch.train_T > 0)
    rollout = batch.rollout_T[trained]
    if len(trained):
        keep_T[trained[np.flatnonzero(np.append(rollout[1:] != rollout[:-1], True))]] = True
    return keep_T


@register_algorithm("reward_model")
def reward_model(*, objective: PartSpec = "bradley_terry") -> Algorithm:
    """loss = mean over pairs of -log sigmoid(r_chosen - r_rejected - margin).

    Source: Bradley & Terry 1952; Ouyang et al. 2022, "Training language models to follow instructions with
    human feedback", equation 1. r is a linear read-out of the last hidden state at the token that ends the
    answer. Trains on preference pairs (mode train). The result is a directory for scoring, exported in the
    format of Hugging Face's sequence classification where the architecture has it: `env: reward_model`
    rewards answers with it; it does not become the next stage's policy. `objective`: `{margin: 1.0}` sets by
    how much a chosen answer shall win; or another loss of scalar outputs.
    """
    if isinstance(objective, dict):
        objective = {"kind": "bradley_terry", **objective}
    # One position per answer: each gets 1 / answers, a pair 2 / answers = 1 / pairs (or its weight's share).
    stream = StreamSpec(
        "preference",
        make_part("objective", objective),
        make_part("aggregation", "weighted_sequence_mean"),
        select=last_trained,
    )
    return Algorithm(
        "reward_model",
        (stream,),
        consumes=frozenset({"preference"}),
        modes=frozenset({"train"}),
        produces="reward_model",
    )
