"""Score centering: the sampled token's score less what the sampler expected it to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trivet.algorithms.base import AlgorithmError, Level, ObjectiveInputs
from trivet.algorithms.objectives.policy import mismatch_stats
from trivet.algorithms.registry import register_objective

if TYPE_CHECKING:
    from torch import Tensor


@register_objective("centred_pg")
@dataclass(frozen=True)
class CentredPG:
    """l_t = -A (log pi(t) - sum over k of q_k log pi(k)), q the sampler's stored top-K, renormalised.

    Its gradient is -A (grad log pi(t) - sum_k q_k grad log pi(k)): the score of the token less the sampler's
    expected score over its candidates, which is 0 only on-policy. With a stale or low-precision sampler the
    plain score has a mean of its own, whatever the rewards say, and drives entropy and the gap between the
    two policies; taking that mean out leaves what the advantages say. The importance weight is a correction's
    (`token_tis`), truncated and detached; so are q and A. The sampled token need not be among the K. Tokens
    without entries are not centred; `uncentred` is their share.
    """

    level: ClassVar[Level] = "token"
    advantage: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"top"})

    def __call__(self, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if x.advantage_P is None or x.top is None:
            raise AlgorithmError("centred_pg reads advantage_P and top; one of them is missing")
        mass_P, expected_P = torch.zeros_like(x.weight_P), torch.zeros_like(x.logp_P)
        q_E = x.top.sampler_E.exp()
        mass_P = mass_P.index_add(0, x.top.position_E, q_E)
        q_E = q_E / mass_P.clamp_min(1e-30)[x.top.position_E]
        expected_P = expected_P.index_add(0, x.top.position_E, q_E * x.top.logp_E)
        centred_P = x.logp_P - expected_P
        stats = {
            "uncentred": (mass_P == 0).sum(),
            "top_mass": mass_P.sum(),
            "score_bias": expected_P.detach().sum(),
            **mismatch_stats(x),
        }
        return -x.weight_P * x.advantage_P * centred_P, stats
