"""Milliseconds to give credit to 10,000 groups of 16, and the ratio to a plain Python loop over the groups.

    python benchmarks/credit.py [--groups 10000] [--size 16] [--repeats 5]

Rewards lie in tenths from 0 to 1, so that groups of equal rewards occur; every rollout has two turns of four
tokens, in one of eight states. Times are of this process's own computing, the best of the repeats. The loop
is the definition written down with the standard library, and both must give the same numbers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trivet.algorithms import make_part
from trivet.algorithms.base import Batch
from trivet.trainer.batch import collate

TURNS, TOKENS, STATES = 2, 4, 8


def batch_of(groups: int, size: int, rng: np.random.Generator) -> Batch:
    """`groups` groups of `size` rollouts, without the work of making traces."""
    n, per = groups * size, TURNS * TOKENS
    reward_N = rng.integers(0, 11, n) / 10
    turn_T = np.tile(np.repeat(np.arange(TURNS, dtype=np.int32), TOKENS), n)
    return replace(
        collate([]),
        ids_T=np.ones(n * per, np.int32),
        position_T=np.tile(np.arange(1, per + 1, dtype=np.int32), n),
        row_T=np.repeat(np.arange(n, dtype=np.int32), per),
        sampled_T=np.ones(n * per, bool),
        train_T=np.ones(n * per, np.float32),
        logprob_T=np.full(n * per, -1.0, np.float32),
        turn_T=turn_T,
        row_start_R=np.arange(n) * per,
        row_length_R=np.full(n, per),
        row_rollout_R=np.arange(n),
        reward_N=reward_N,
        raw_reward_N=reward_N,
        group_N=np.repeat(np.arange(groups), size),
        player_N=np.zeros(n, np.int64),
        attempt_N=np.tile(np.arange(size), groups),
        termination_N=np.zeros(n, np.int8),
        role_N=(np.arange(n) % size == 0).astype(np.int8),  # remax's; they count in the others' means
        length_N=rng.integers(100, 2000, n),
        turn_rollout_W=np.repeat(np.arange(n), TURNS),
        turn_reward_W=np.full(n * TURNS, np.nan),
        turn_state_W=rng.integers(0, STATES, n * TURNS),
        states=tuple(map(str, range(STATES))),
        group_ids=tuple(map(str, range(groups))),
        players=("policy",),
    )


# -- the definitions, one group at a time --------------------------------------------------------


def mean_only(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards] if min(rewards) < max(rewards) else [0.0] * len(rewards)


def group_normalised(rewards: Sequence[float]) -> list[float]:
    std = statistics.stdev(rewards) or 1.0
    return [a / std for a in mean_only(rewards)]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    total, others = sum(rewards), len(rewards) - 1
    return [r - (total - r) / others for r in rewards]


def leave_one_out_std(rewards: Sequence[float]) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        std = statistics.stdev(others) if min(others) < max(others) else 1.0
        out.append((reward - sum(others) / len(others)) / std)
    return out


def logavgexp(rewards: Sequence[float]) -> list[float]:
    value = math.log(sum(math.exp(r) for r in rewards) / len(rewards))
    return [r - value for r in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [(r - mean) / mean if mean else 0.0 for r in rewards]


LOOPS: dict[str, tuple[Any, Callable[[Sequence[float]], list[float]] | None]] = {
    "mean_only": ("mean_only", mean_only),
    "group_normalised": ("group_normalised", group_normalised),
    "leave_one_out": ("leave_one_out", leave_one_out),
    "leave_one_out, std": ({"kind": "leave_one_out", "normalise": True}, leave_one_out_std),
    "opmd, logavgexp": ({"kind": "opmd", "baseline": "logavgexp"}, logavgexp),
    "asymre": ("asymre", lambda rewards: [a + 0.1 for a in mean_only(rewards)]),
    "maxrl": ("maxrl", maxrl),
    "multi_step_grpo": ("multi_step_grpo", group_normalised),
    "success_offset": ("success_offset", None),
    "remax": ("remax", None),
    "reinforce, batch": ({"kind": "reinforce", "baseline": "batch"}, None),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", None),
    "gigpo": ("gigpo", None),
}


def best_ms(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    batch = batch_of(options.groups, options.size, np.random.default_rng(0))
    rows = batch.reward_N.reshape(options.groups, options.size).tolist()
    print(f"{options.groups} groups of {options.size}")
    print(f"{'credit':30} {'ms':>8} {'loop, ms':>10} {'ratio':>8}")
    for name, (spec, loop) in LOOPS.items():
        credit = make_part("credit", spec)
        ms = best_ms(lambda credit=credit: credit(batch), options.repeats)
        if loop is None:
            print(f"{name:30} {ms:8.1f}", flush=True)
            continue
        begin = time.process_time()
        expected = [advantage for rewards in rows for advantage in loop(rewards)]
        slow = 1000 * (time.process_time() - begin)
        np.testing.assert_allclose(credit(batch), expected, rtol=1e-9, atol=1e-12)
        print(f"{name:30} {ms:8.1f} {slow:10.0f} {slow / ms:7.0f}x", flush=True)


if __name__ == "__main__":
    main()
