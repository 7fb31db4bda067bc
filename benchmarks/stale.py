"""Stale and inexact samplers: what truncated importance weights and score centering keep in place.

    python benchmarks/stale.py [--out stale.jsonl] [--steps 120] [--workers 2]
    python benchmarks/stale.py --table stale.jsonl

The quick start's sums, from the supervised checkpoint of `learning.py`. The engine samples with the
weights of 0, 2 or 6 steps ago, or with those of now rounded to 8 bits (symmetrically, a scale for each
row of a matrix). Three ways of learning from that, each one update a batch of 64 prompts x 8 answers,
token means, no clip: nothing corrected; `token_tis` within [0.5, 2.0]; that and score centering over the
sampler's 12 most probable of 16 symbols. Reported: the mean |log pi - log mu| of the last 30 steps, the
entropy there and in the 30 steps before the middle, and accuracy, which is the engine's (with its stale
or rounded weights). Rows are written as runs end; those that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import learning

SAMPLERS = {"fresh": (0, False), "2 steps old": (2, False), "6 steps old": (6, False), "8 bits": (0, True)}
PLAIN = {
    "kind": "policy_gradient",
    "aggregation": "token_mean",
    "objective": {"kind": "ppo_clip", "clip": None},
}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"algorithm": PLAIN | {"tis": None}},
    "tis": {"algorithm": PLAIN | {"tis": [0.5, 2.0]}},
    "tis + centering": {"algorithm": "score_centering", "engine": {"top": 12}},
}
SEED = 1
LR = 5e-4
"""A quarter of the quick start's: at that one every method collapses with weights that are 2 steps old."""


def rounded(tensor: Any) -> Any:
    """To 8 bits and back, a scale for each row."""
    if tensor.ndim < 2:
        return tensor.clone()
    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (tensor / scale).round().mul_(scale)


def spoil(old: int, low: bool) -> None:
    """Let every synchroniser of this process publish the weights of `old` steps ago, rounded with `low`."""
    from trivet.runtime.sync import Synchroniser

    own, kept = Synchroniser._sync, deque[dict[str, Any]](maxlen=old + 1)

    def sync(self: Any, step: int, tensors: Mapping[str, Any], probe: Any) -> dict[str, float]:
        kept.append({name: rounded(t) if low else t.clone() for name, t in tensors.items()})
        return own(self, step, kept[0], probe)

    Synchroniser._sync = sync  # type: ignore[method-assign]


def row(folder: Path, sampler: str, method: str, steps: int, start: str) -> dict[str, Any]:
    name = f"{method} {sampler}".replace(" ", "_").replace("+", "and")
    content = learning.recipe(folder, "grpo", SEED, steps, start, "")
    content |= {"name": name, "output": str(folder / name), "weights": {"proof": "checksum"}}
    stage = content["stages"][0]
    stage["batch"]["updates_per_batch"] = 1
    stage["trainer"] |= {"lr": LR}
    stage |= METHODS[method]
    content["engine"] |= stage.pop("engine", {})
    old, low = SAMPLERS[sampler]
    try:
        learning.train(folder, content, [sys.executable, __file__, "--arm", str(old), str(int(low))])
    except RuntimeError as error:
        return {"sampler": sampler, "method": method, "error": str(error)}
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/entropy" in line]
    evals = [line["eval/addition/pass@1"] for line in lines if "eval/addition/pass@1" in line]

    def mean(key: str, part: list[dict[str, Any]]) -> float:
        return sum(line[key] for line in part) / len(part)

    half = len(trained) // 2
    return {
        "sampler": sampler,
        "method": method,
        "gap": mean("train/pg/abs_log_diff", trained[-30:]),
        "entropy_half": mean("train/entropy", trained[half - 30 : half]),
        "entropy": mean("train/entropy", trained[-30:]),
        "accuracy": evals[-1],
        "best": max(evals),
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| sampler | correction | gap, nats a token | entropy, middle | entropy, end | accuracy | best |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for r in sorted(
        rows, key=lambda r: (list(SAMPLERS).index(r["sampler"]), list(METHODS).index(r["method"]))
    ):
        if "error" in r:
            yield f"| {r['sampler']} | {r['method']} | failed: {r['error'].splitlines()[-1]} | | | | |"
            continue
        shown = [f"{r['gap']:.4f}", f"{r['entropy_half']:.3f}", f"{r['entropy']:.3f}"]
        shown += [f"{100 * r['accuracy']:.1f}%", f"{100 * r['best']:.1f}%"]
        yield f"| {r['sampler']} | {r['method']} | " + " | ".join(shown) + " |"


def arm(old: int, low: bool, arguments: list[str]) -> None:
    """`trivet ...` with a spoiled sampler."""
    from trivet.cli import app

    spoil(old, low)
    app(arguments)


def main() -> None:
    if sys.argv[1:2] == ["--arm"]:
        arm(int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("stale.jsonl"))
    parser.add_argument("--folder", type=Path, help="of the runs; default: a temporary one")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", type=Path, help="print the table of this file and end")
    args = parser.parse_args()
    path = args.table or args.out
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if args.table is None:
        there = {(r["sampler"], r["method"]) for r in rows if "error" not in r}
        with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.workers) as pool:
            folder = args.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            start, _ = learning.prepared(folder, args.steps)

            def one(what: tuple[str, str]) -> None:
                found = row(folder, *what, args.steps, start)
                with path.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                rows.append(found)
                print(list(table([found]))[-1], flush=True)

            list(pool.map(one, [(s, m) for s in SAMPLERS for m in METHODS if (s, m) not in there]))
    print("\n".join(table([r for r in rows if "error" not in r])))


if __name__ == "__main__":
    main()
