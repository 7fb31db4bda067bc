"""pass@k and its uncertainty."""

from __future__ import annotations

import math

import numpy as np

Z95 = 1.959963984540054


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement from n, c of them right, is right.

    1 - C(n-c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1), as a
    product so that large n does not overflow. n=4, c=1, k=2: 1 - C(3,2)/C(4,2) = 1 - 3/6 = 0.5. Raises
    ValueError when k > n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} of {n} samples with {c} right is not defined: need 1 <= k <= n, 0 <= c <= n"
        )
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95% Wilson score interval of a proportion (Wilson 1927). Never leaves [0, 1], honest at 0 and 1.

    5 of 10: centre 0.5, half-width 0.2634: (0.2366, 0.7634).
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(value_N: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean over tasks: normal, with n-1; the Wilson interval where all tasks agree."""
    n, mean = len(value_N), float(value_N.mean())
    if n < 2 or float(value_N.std()) == 0.0:
        return wilson(mean * n, n)
    half = Z95 * float(value_N.std(ddof=1)) / math.sqrt(n)
    return max(0.0, mean - half), min(1.0, mean + half)
