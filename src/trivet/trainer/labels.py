"""Loss by what its tokens belong to: source, category."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trivet.algorithms.base import Batch

Labels = Mapping[str, Sequence[str]]
"""kind -> the name of each rollout (_N); "" belongs to none: {"source": [...], "category": [...]}."""
Observe = Callable[[np.ndarray, np.ndarray], None]
"""Is handed the batch's tokens of a chunk (_P) and their log-probabilities (_P)."""


def metric_name(name: str) -> str:
    """A name as a part of a metric's name: letters, digits, `_`, `.` and `-`.

    Another character becomes `_`; four digits of a hash then keep apart what would read the same.
    """
    plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("_")
    if plain == name:
        return name
    return f"{plain}~{hashlib.sha256(name.encode()).hexdigest()[:4]}"


class LossByLabel:
    """Adds up weight_t * -log p_t and weight_t by label, in float64, in the order of the chunks."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self._sums: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in labels}  # name -> [loss, weight]
        self.loss = self.weight = 0.0

    def observer(self, batch: Batch, weight_T: np.ndarray, labels: Labels | None = None) -> Observe:
        """For the tokens of `batch`; `labels`: its rollouts', by default those of the whole."""
        rollout_T = batch.rollout_T
        known = {
            kind: np.unique(list(names), return_inverse=True)
            for kind, names in (labels or self.labels).items()
        }

        def add(index_P: np.ndarray, logp_P: np.ndarray) -> None:
            weight_P = weight_T[index_P]
            loss_P = weight_P * -logp_P.astype(np.float64)
            self.loss += float(loss_P.sum())
            self.weight += float(weight_P.sum())
            for kind, (names, index_N) in known.items():
                label_P = index_N.reshape(-1)[rollout_T[index_P]]
                both = [np.bincount(label_P, values, minlength=len(names)) for values in (loss_P, weight_P)]
                for i in np.flatnonzero(both[1]).tolist():
                    sums = self._sums[kind].setdefault(str(names[i]), np.zeros(2))
                    sums += (both[0][i], both[1][i])

        return add

    def metrics(self) -> dict[str, float]:
        """{"source/NAME": mean loss, ...}, sorted; names as `metric_name` gives them."""
        return {
            f"{kind}/{metric_name(name)}": float(loss / weight)
            for kind, sums in self._sums.items()
            for name, (loss, weight) in sorted(sums.items())
            if name
        }
