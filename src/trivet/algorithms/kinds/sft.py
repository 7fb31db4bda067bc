"""Supervised fine-tuning: cross-entropy on the tokens a renderer or a data set marked."""

from __future__ import annotations

from trivet.algorithms.base import Algorithm, StreamSpec
from trivet.algorithms.registry import PartSpec, make_part, register_algorithm


@register_algorithm("sft")
def sft(*, aggregation: PartSpec = "token_mean") -> Algorithm:
    """loss = sum over t of w_t * -log pi(t); w_t from the recorded train weights (message times sample).

    `aggregation`: token_mean (default) weighs every token alike, sequence_mean every example (an example's
    own weight then cancels out; those of its messages against each other stay), weighted_sequence_mean every
    example by its own weight.
    """
    stream = StreamSpec("ce", make_part("objective", "cross_entropy"), make_part("aggregation", aggregation))
    return Algorithm("sft", (stream,), consumes=frozenset({"sft"}), modes=frozenset({"train"}))
