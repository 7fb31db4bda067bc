"""How far the policy is from its sampler, by hand."""

from __future__ import annotations

import math

import pytest


def test_effective_sample_size_and_gap():
    """Ratios 1 and 3: (1 + 3)^2 / (2 (1 + 9)) = 0.8. |0| and |ln 3| are 0.5493 apart on average; k3 is
    (0 + 3 - 1 - ln 3) / 2 = 0.4507."""
    torch = pytest.importorskip("torch")
    from trivet.algorithms.base import ObjectiveInputs
    from trivet.algorithms.evaluate import finalise
    from trivet.algorithms.objectives import mismatch_stats

    behaviour = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    logp = behaviour + torch.tensor([0.0, math.log(3.0)], dtype=torch.float64)
    x = ObjectiveInputs(logp, torch.ones(2), torch.zeros(2, dtype=torch.long), 0, behaviour)
    out = finalise(
        {"pg/tokens": 2.0}
        | {
            (f"max/pg/{name.removeprefix('max/')}" if name.startswith("max/") else f"pg/{name}"): value
            for name, value in mismatch_stats(x).items()
        }
    )
    assert out["pg/ess/sampler_ratio"] == pytest.approx(0.8)
    assert out["pg/sampler_ratio"] == pytest.approx(2.0)
    assert out["pg/abs_log_diff"] == pytest.approx(0.5493, abs=1e-4)
    assert out["pg/kl_k3"] == pytest.approx(0.4507, abs=1e-4)
    assert out["pg/abs_log_diff_max"] == pytest.approx(math.log(3.0))


def test_no_known_sampler_counts_as_no_difference():
    torch = pytest.importorskip("torch")
    from trivet.algorithms.base import ObjectiveInputs
    from trivet.algorithms.objectives import mismatch_stats

    nan = torch.tensor([float("nan")])
    x = ObjectiveInputs(torch.tensor([-1.0]), torch.ones(1), torch.zeros(1, dtype=torch.long), 0, nan)
    stats = {name: float(value) for name, value in mismatch_stats(x).items()}
    assert stats["abs_log_diff"] == stats["kl_k3"] == 0
    assert stats["sampler_ratio"] == stats["ess/sampler_ratio"] == 1
