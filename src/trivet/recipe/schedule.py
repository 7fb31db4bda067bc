"""Which weights a batch is sampled with (run mode `both`)."""

from __future__ import annotations

FORMULA = "v(e) = max(0, interval * floor((e - 1 - offset) / interval))"


def sampled_after(step: int, interval: int, offset: int) -> int:
    """v(e): batch `step` (e = 1, 2, ...) is sampled with the weights after step v(e); 0: the starting ones.

    interval 1, offset 0 gives lag 0; interval 2 lags 0, 1, 0, 1; interval 1, offset 1 lags 0, 1, 1, 1.
    """
    if step < 1 or interval < 1 or offset < 0:
        raise ValueError(f"no schedule for step {step}, interval {interval}, offset {offset}")
    return max(0, interval * ((step - 1 - offset) // interval))


def lag(step: int, interval: int, offset: int) -> int:
    """How many steps behind the sampling weights of batch `step` are: e - 1 - v(e)."""
    return step - 1 - sampled_after(step, interval, offset)
