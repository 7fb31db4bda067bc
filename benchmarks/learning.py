"""Does every algorithm learn? All of them on the quick start's sums, from one supervised checkpoint.

    python benchmarks/learning.py [--out learning.jsonl] [--steps 120] [--workers 2] [--only grpo ppo]
    python benchmarks/learning.py --table learning.jsonl       # the table of what is there

The supervised stage of the quick start runs once (seed 2, until 36% of the sampled answers are right). Every
algorithm then trains from its checkpoint: 64 prompts x 8 answers a step, four updates each (one where the
objective has no clip and is meant for on-policy steps: `ON_POLICY`), AdamW at 2e-3 with cosine decay to a
fifth, 64 held-out sums x 8 answers every 15 steps. The settings are the quick start's own and were tuned for
none of them; what an algorithm needs beyond (a critic's learning rate, stored top entries, expert examples, a
teacher) stands in `ARMS`. The core algorithms run with three seeds, the others
with one. A row is written when its run ends; rows that are there are not run again, so the script may be
stopped and started. Each run is a process of one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

CORE = ("grpo", "dr_grpo", "rloo", "ppo")
SEEDS = (1, 2, 3)
PLAIN = (
    *("gspo", "dapo", "cispo", "sapo", "topr", "sppo", "rec", "gmpo", "dppo", "is_reinforce"),
    *("reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opmd", "asymre", "maxrl"),
    *("success_offset", "gigpo", "multi_step_grpo", "raft", "remax"),
)
ARMS: dict[str, dict[str, Any]] = {name: {} for name in (*CORE, *PLAIN)} | {
    "ppo": {"trainer": {"critic_lr": 5e-3}},
    "success_offset": {"algorithm": {"kind": "success_offset", "floor": 6}},
    "dr_grpo": {"algorithm": {"kind": "dr_grpo", "length": 6}},
    "score_centering": {"engine": {"top": 12}},
    "on_policy_distillation": {"teacher": True},
    "jsd": {"teacher": True},
    "mix": {"expert": True},
    "chord": {"expert": True},
}
GOAL = 0.8
TRIVET = (sys.executable, "-m", "trivet.cli")
ON_POLICY = frozenset(
    (
        *("cispo", "sapo", "is_reinforce", "rloo", "reinforce", "maxrl", "remax", "opmd", "asymre"),
        *("sppo", "success_offset", "score_centering", "on_policy_distillation", "jsd"),
    )
)
"""Nothing in their objective stops a token whose ratio has moved: with four updates at this rate they
collapse (cispo to 0.6%, sapo to 1%, is_reinforce to 0.2%, rloo to 0%)."""


def sums(split: str, **more: Any) -> dict[str, Any]:
    args = {"reverse": True, "form": "plain"}
    return {"source": "generated:addition", "name": "addition", "split": split, "args": args, **more}


def recipe(folder: Path, name: str, seed: int, steps: int, start: str, teacher: str) -> dict[str, Any]:
    """One algorithm's run as a recipe."""
    arm = dict(ARMS[name])
    played = {"env": "math", "env_args": {"fallback": "number"}}
    stage: dict[str, Any] = {
        "name": "rl",
        "algorithm": arm.pop("algorithm", name),
        "tasks": [sums("train", **played)],
        "batch": {"prompts": 64, "group": 8, "micro_tokens": 16384},
        "trainer": {"lr": 2e-3, "betas": [0.9, 0.99], "warmup_steps": 10, "schedule": "cosine"},
        "steps": steps,
        "checkpoints": {"every": 0},
    }
    stage["batch"]["updates_per_batch"] = 1 if name in ON_POLICY else 4
    stage["trainer"] |= {"min_lr_ratio": 0.2} | arm.pop("trainer", {})
    models = {"teacher": {"model": teacher}} if arm.pop("teacher", False) else {}
    if arm.pop("expert", False):
        stage["expert"] = {"tasks": [sums("train", skip=2000)], "prompts": 16}
        stage["tasks"][0]["limit"] = 2000
    return {
        "name": f"{name}-{seed}",
        "seed": seed,
        "output": str(folder / f"{name}-{seed}"),
        "policy": {"model": start},
        "models": models,
        "runtime": {"threads": 1},
        "monitor": {"plots": False, "samples_every": 0},
        "sampling": {"temperature": 1.0, "max_tokens": 6},
        "engine": {"slots": 128},
        "eval": {"every": 15, "samples": 8, "k": [1, 8], "tasks": [sums("test", limit=64, **played)]},
        "stages": [stage | arm],
    }


def train(folder: Path, content: dict[str, Any], trivet: Sequence[str] = TRIVET) -> None:
    """A recipe in a process of its own. Raises RuntimeError with its last lines."""
    path = folder / f"{content['name']}.yaml"
    path.write_text(yaml.safe_dump(content))
    done = subprocess.run([*trivet, "run", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-12:]))


def row(folder: Path, name: str, seed: int, steps: int, start: str, teacher: str) -> dict[str, Any]:
    """What one run came to."""
    begin = time.perf_counter()
    content = recipe(folder, name, seed, steps, start, teacher)
    try:
        train(folder, content)
    except RuntimeError as error:
        return {"algorithm": name, "seed": seed, "error": str(error)}
    lines = (Path(content["output"]) / "metrics.jsonl").read_text().splitlines()
    evals, last = {}, {}
    for line in map(json.loads, lines):
        last |= line
        if "eval/addition/pass@1" in line:
            evals[line["step"]] = line["eval/addition/pass@1"]
    reached = [step for step, value in sorted(evals.items()) if value >= GOAL]
    return {
        "algorithm": name,
        "seed": seed,
        "steps": steps,
        "start": evals[min(evals)],
        "end": evals[max(evals)],
        "to_goal": reached[0] if reached else None,
        "entropy": last.get("train/entropy"),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def prepared(folder: Path, steps: int) -> tuple[str, str]:
    """(the supervised checkpoint all start from, a model trained from it by grpo to teach), made once."""
    start, teacher = folder / "sft" / "sft" / "model", folder / "teacher" / "rl" / "model"
    if not start.exists():
        command = ["run", "quickstart", f"output={folder / 'sft'}", "stages.rl.steps=3"]
        subprocess.run([*TRIVET, *command], check=True, capture_output=True)
    if not teacher.exists():
        content = recipe(folder, "grpo", 7, 2 * steps, str(start), "")
        train(folder, content | {"name": "teacher", "output": str(folder / "teacher")})
    return str(start), str(teacher)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| algorithm | seed | start | end | steps to 80% | seconds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for r in sorted(rows, key=lambda r: (r["algorithm"], r["seed"])):
        if "error" in r:
            yield f"| {r['algorithm']} | {r['seed']} | failed: {r['error'].splitlines()[-1]} | | | |"
        else:
            shown = [f"{100 * r[when]:.1f}%" for when in ("start", "end")]
            shown += [str(r["to_goal"] or "not"), str(r["seconds"])]
            yield f"| {r['algorithm']} | {r['seed']} | " + " | ".join(shown) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learning.jsonl"))
    parser.add_argument("--folder", type=Path, help="of the runs; default: a temporary one")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=sorted(ARMS))
    parser.add_argument("--table", type=Path, help="print the table of this file and end")
    args = parser.parse_args()
    path = args.table or args.out
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if args.table is None:
        there = {(r["algorithm"], r["seed"]) for r in rows if "error" not in r}
        wanted = [(n, s) for n in (args.only or ARMS) for s in (SEEDS if n in CORE else SEEDS[:1])]
        with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.workers) as pool:
            folder = args.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            start, teacher = prepared(folder, args.steps)

            def one(what: tuple[str, int]) -> None:
                found = row(folder, *what, args.steps, start, teacher)
                with path.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                rows.append(found)
                print(list(table([found]))[-1], flush=True)

            list(pool.map(one, [what for what in wanted if what not in there]))
    print("\n".join(table([r for r in rows if "error" not in r] + [r for r in rows if "error" in r])))


if __name__ == "__main__":
    main()
