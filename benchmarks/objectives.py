"""What objectives and corrections cost, as a share of an update of the quick start's model.

    python benchmarks/objectives.py [--rounds 20] [--threads 1]

64 prompts of 6 tokens x 8 answers of 4, random weights: the smallest model in use, where the loss weighs
most. Timed are `Trainer.update` as a whole and, inside it, all that turns log-probabilities into a loss
and its derivative (streams, corrections, statistics, autograd); medians of the rounds, after two that
warm up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from training import quickstart

from trivet.algorithms import prepare, resolve
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, collate
from trivet.trainer import trainer as module
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

NAMES = (
    *("grpo", "dr_grpo", "rloo", "gspo", "dapo", "cispo", "sapo", "topr", "sppo", "rec", "gmpo", "dppo"),
    *("is_reinforce", "opmd", "maxrl", "success_offset"),
)


def batch_of() -> Any:
    rng, groups = np.random.default_rng(0), []
    for g in range(64):
        ids, rollouts = rng.integers(2, 90, 6).tolist(), []
        for attempt in range(8):
            trace = Trace()
            root = trace.add(-1, ids)
            trace.add_sampled(root, rng.integers(2, 90, 4), -rng.uniform(3.5, 5.5, 4), 0)
            task, score = Task("bench", (Message("user", "?"),)), Scored(float(rng.integers(2)))
            rollouts.append(Rollout(task, trace, score, Termination.FINISHED, attempt=attempt))
        groups.append(Group(f"g{g}", IssueKey(f"t{g}", 0), rollouts))
    return collate(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spent: list[float] = []
    own = module._Terms.__call__

    def timed(self: Any, *given: Any) -> Any:
        begin = time.perf_counter()
        out = own(self, *given)
        spent.append(time.perf_counter() - begin)
        return out

    module._Terms.__call__ = timed  # type: ignore[method-assign]
    batch = batch_of()
    print("| algorithm | an update | of it the loss | share |\n| --- | --- | --- | --- |")
    for name in NAMES:
        trainer = Trainer(quickstart(), Config(lr=1e-6), micro_tokens=16384)
        prepared, whole, loss = prepare(batch, resolve(name)), [], []
        for _ in range(args.rounds + 2):
            spent.clear()
            begin = time.perf_counter()
            trainer.update(prepared, step=1)
            whole.append(time.perf_counter() - begin)
            loss.append(sum(spent))
        update, part = statistics.median(whole[2:]), statistics.median(loss[2:])
        print(f"| {name} | {1e3 * update:.1f} ms | {1e3 * part:.2f} ms | {100 * part / update:.1f}% |")


if __name__ == "__main__":
    main()
