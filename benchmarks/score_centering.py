"""What score centering adds to an update: the sampler's top-K at every trained position, against none.

    python benchmarks/score_centering.py [--layers 30 | --model DIR] [--top 32] [--rounds 3] [--threads 2]

SmolLM2-135M's shape (49,152 symbols) and random weights, or a model of yours; random tokens, 8 prompts of 48
x 8 answers of 64, K random entries at each. Both arms make the same update but for the objective; they take
turns, and each takes its best round, since other load on the machine drifts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch
from training import smollm2

from trivet.algorithms import prepare, resolve
from trivet.buffer import AttachmentStore
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

PROMPTS, PROMPT, GROUP, ANSWER = 8, 48, 8, 64


def groups(store: AttachmentStore, top: int, vocabulary: int) -> list[Group]:
    rng, out = np.random.default_rng(0), []
    for g in range(PROMPTS):
        ids, rollouts = rng.integers(2, vocabulary, PROMPT).tolist(), []
        for attempt in range(GROUP):
            trace = Trace()
            root = trace.add(-1, ids)
            node = trace.add_sampled(root, rng.integers(2, vocabulary, ANSWER), [-1.0] * ANSWER, 0)
            entries = {
                "offset": np.arange(0, (ANSWER + 1) * top, top, dtype=np.uint32),
                "id": rng.integers(0, vocabulary, ANSWER * top).astype(np.uint32),
                "logprob": np.full(ANSWER * top, np.log(0.9 / top), np.float16),
            }
            for name, array in entries.items():
                trace.attach(node, store.put(array, f"top.{name}", 0, ANSWER))
            task = Task("bench", (Message("user", "?"),))
            score = Scored(float(attempt % 2))
            rollouts.append(Rollout(task, trace, score, Termination.FINISHED, attempt=attempt))
        out.append(Group(f"g{g}", IssueKey(f"t{g}", 0), rollouts))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--model", help="directory or hub name; default: random weights")
    parser.add_argument("--top", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.model or smollm2(args.layers), Config(lr=1e-6), micro_tokens=1024)
    vocabulary = len(trainer.model.head.weight)
    plain = {"kind": "grpo", "clip": None, "aggregation": "token_mean"}
    with tempfile.TemporaryDirectory() as folder:
        store = AttachmentStore(folder)
        made = groups(store, args.top, vocabulary)
        arms: dict[str, Any] = {"without": plain, "with": "score_centering"}
        best: dict[str, float] = {}
        collected: dict[str, float] = {}
        for turn in range(args.rounds + 1):  # the first warms up
            for name, spec in arms.items():
                algorithm = resolve(spec)
                begin = time.perf_counter()
                batch = collate(made, needs=algorithm.needs, attachments=store)
                ready = time.perf_counter()
                trainer.update(prepare(batch, algorithm), step=1)
                end = time.perf_counter()
                best[name] = min(best.get(name, np.inf), end - begin) if turn else np.inf
                collected[name] = min(collected.get(name, np.inf), ready - begin)
    ratio = best["with"] / best["without"]
    name = args.model or f"{args.layers} layers"
    print(f"{name}, {vocabulary} symbols, K = {args.top}, {args.threads} thread(s)")
    print(f"an update without {best['without']:.2f} s, with {best['with']:.2f} s: {100 * (ratio - 1):+.1f}%")
    print(f"of that, batch building {1e3 * collected['without']:.0f} and {1e3 * collected['with']:.0f} ms")


if __name__ == "__main__":
    main()
