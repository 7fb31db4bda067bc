"""What an optimiser update costs, as ratios on the machine it runs on.

    python benchmarks/training.py             # everything at SmolLM2-135M's shape: some minutes on two cores
    python benchmarks/training.py --layers 6  # the same questions of a smaller model
    python benchmarks/training.py packed tiny # some of them

packed   2,048 tokens of mixed lengths: against a plain padded step (transformers' forward, full log-softmax,
         autograd, the same optimiser) and against the peak of a 2048^3 matrix product
sharing  8 prompts of 48 tokens x 8 answers of 64: shared prompts against separate rows against the padded
step tiny     the quick start's model, 512 short rows, where calls cost more than arithmetic
memory   peak memory of the packed and of the padded step, each in a process of its own

The arms of a comparison are interleaved and each takes its best round, since other load on the machine
drifts. Arithmetic is counted as 6 x (body parameters x tokens forwarded + vocabulary matrix x trained
positions) plus attention's own products, each (query, key) pair that is seen once. With `--threads 1`
processor time is as good as a quiet machine's wall time; with more threads waiting counts as work, so that
wall time is what is shown.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trivet.algorithms import resolve
from trivet.algorithms.prepare import prepare
from trivet.recipe.schema import Trainer as Config
from trivet.trainer import Trainer, collate
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

VOCABULARY = 49152


def smollm2(layers: int) -> Any:
    """The shape of SmolLM2-135M (30 layers), random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def quickstart() -> Any:
    """The shape of the quick start's tiny model, random weights."""
    config = Qwen3Config(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def batch_of(prompts: list[int], group: int, answer: Callable[[], int], vocabulary: int) -> Any:
    """GRPO groups with random tokens: prompts of the given lengths, `group` answers of `answer()` tokens
    each.
    """
    rng, groups = np.random.default_rng(0), []
    for g, length in enumerate(prompts):
        ids, rollouts = rng.integers(2, vocabulary, length).tolist(), []
        for attempt in range(group):
            trace, n = Trace(), answer()
            root = trace.add(-1, ids)
            trace.add_sampled(root, rng.integers(2, vocabulary, n).tolist(), [-1.0] * n, 0)
            score = Scored(float(attempt % 2))
            task = Task("bench", (Message("user", "?"),))
            rollouts.append(Rollout(task, trace, score, Termination.FINISHED, attempt=attempt))
        groups.append(Group(f"g{g}", IssueKey(f"t{g}", 0), rollouts))
    algorithm = resolve({"kind": "grpo", "proximal": "behaviour", "tis": None})
    return prepare(collate(groups), algorithm)


def padded_step(model: Any, optimiser: torch.optim.Optimizer, prepared: Any, micro_tokens: int) -> None:
    """What one writes down first: rows of similar length padded to a batch, full log-softmax, autograd,
    AdamW.
    """
    batch, stream = prepared.batch, prepared.streams[0]
    order = np.argsort(batch.row_length_R, kind="stable")
    width = int(batch.row_length_R.max())
    rows = max(micro_tokens // width, 1)
    optimiser.zero_grad()
    for part in range(0, len(order), rows):
        chosen = order[part : part + rows]
        widest = int(batch.row_length_R[chosen].max())
        grid = batch.row_start_R[chosen, None] + np.arange(widest)
        real = np.arange(widest) < batch.row_length_R[chosen, None]
        grid = np.where(real, grid, 0)
        ids = torch.from_numpy(np.where(real, batch.ids_T[grid], 0).astype(np.int64))
        mask = torch.from_numpy(real.astype(np.int64))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[..., 0]
        weight = np.where(real, stream.weight_T[grid] * stream.columns["advantage"][grid], 0.0)[:, 1:]
        (-(torch.exp(logp - logp.detach()) * torch.from_numpy(weight).float())).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def flops(model: Any, prepared: Any, metrics: dict[str, float]) -> float:
    """Of one update as the trainer does it."""
    config = model.config
    head = model.lm_head.weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head
    tokens = metrics["train/tokens_forwarded"]
    longest = prepared.batch.row_length_R[prepared.row_active_R].astype(float)
    pairs = (longest * (longest - 1) / 2).sum() * tokens / (tokens + metrics["train/tokens_shared"])
    attention = 12 * pairs * config.hidden_size * config.num_hidden_layers
    return 6 * (body * tokens + head * metrics["train/tokens_trained"]) + attention


class Clock:
    """Wall seconds, or this process's processor seconds where one thread works."""

    def __init__(self, threads: int) -> None:
        self.now = time.process_time if threads == 1 else time.perf_counter
        self.best: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        begin = self.now()
        out = work()
        self.best[name] = min(self.best.get(name, float("inf")), self.now() - begin)
        return out


def peak(clock: Clock) -> float:
    """FLOP/s of a 2048^3 matrix product in float32."""
    a = torch.randn(2048, 2048)
    torch.mm(a, a)
    clock.time("peak", lambda: [torch.mm(a, a) for _ in range(4)])
    return 4 * 2 * 2048**3 / clock.best["peak"]


def compare(model: Any, prepared: Any, args: Any, arms: list[str]) -> tuple[Clock, dict[str, Any]]:
    """Interleaved rounds of the named arms on one model: packed, shared (both the trainer), padded."""
    clock, out = Clock(args.threads), {}
    trainers = {
        name: Trainer(model, Config(lr=1e-6, share_prefix=name == "shared"), micro_tokens=args.micro_tokens)
        for name in arms
        if name != "padded"
    }
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for _ in range(args.rounds):
        for name in arms:
            if name == "padded":
                model.set_attn_implementation("sdpa")
                clock.time(name, lambda: padded_step(model, optimiser, prepared, args.micro_tokens))
                model.set_attn_implementation("trivet_packed")
            else:
                trainer = trainers[name]
                out[name] = clock.time(name, lambda t=trainer: t.update(prepared, step=1))
        peak(clock)
    return clock, out


def report(model: Any, prepared: Any, clock: Clock, out: dict[str, Any], base: str) -> None:
    rows = int(prepared.batch.row_length_R.sum())
    summit = 4 * 2 * 2048**3 / clock.best["peak"]
    for name, seconds in clock.best.items():
        if name == "peak":
            continue
        line = f"  {name:8} {seconds:8.2f} s  {rows / seconds:9.0f} row tokens/s"
        line += f"  {clock.best[base] / seconds:5.2f} x {base}"
        if name in out:
            speed = flops(model, prepared, out[name]) / seconds
            line += f"  {speed / 1e9:6.0f} GFLOP/s = {100 * speed / summit:.0f}% of {summit / 1e9:.0f}"
            line += f"  ({out[name]['train/tokens_forwarded']:.0f} tokens forwarded)"
        print(line, flush=True)


def mixed(tokens: int) -> Any:
    """Rows of 32..512 tokens, log-uniform, a quarter of each its prompt; two to a group so that all train."""
    rng = np.random.default_rng(1)
    prompts, total, answers = [], 0, []
    while total < tokens:
        prompt = int(rng.integers(8, 64))
        lengths = np.exp(rng.uniform(np.log(24), np.log(384), 2)).astype(int)
        prompts.append(prompt)
        answers += lengths.tolist()
        total += 2 * prompt + int(lengths.sum())
    source = iter(answers)
    return batch_of(prompts, 2, lambda: next(source), VOCABULARY)


def run_packed(args: Any) -> None:
    model, prepared = smollm2(args.layers), mixed(2048)
    clock, out = compare(model, prepared, args, ["packed", "padded"])
    lengths = prepared.batch.row_length_R
    shape = f"{len(lengths)} rows of {lengths.min()}..{lengths.max()} tokens, {lengths.sum()} in all"
    print(f"packed: {args.layers} layers, {shape}")
    report(model, prepared, clock, out, "padded")


def run_sharing(args: Any) -> None:
    model, prepared = smollm2(args.layers), batch_of([48] * 8, 8, lambda: 64, VOCABULARY)
    clock, out = compare(model, prepared, args, ["shared", "packed", "padded"])
    print(f"sharing: {args.layers} layers, 8 prompts of 48 tokens x 8 answers of 64 tokens")
    report(model, prepared, clock, out, "padded")
    print(f"  shared / packed: {clock.best['packed'] / clock.best['shared']:.2f} x")


def run_tiny(args: Any) -> None:
    rng = np.random.default_rng(2)
    model = quickstart()
    prepared = batch_of(rng.integers(8, 13, 32).tolist(), 16, lambda: int(rng.integers(12, 28)), 90)
    clock, out = compare(model, prepared, args, ["shared", "packed", "padded"])
    print("tiny: the quick start's model, 512 rows of 20..40 tokens")
    report(model, prepared, clock, out, "padded")


def run_memory(args: Any) -> None:
    print(f"memory: {args.layers} layers, 2,048 tokens of mixed lengths; peak resident size of a process")
    for arm in ("packed", "padded"):
        command = [sys.executable, __file__, "--child", arm, "--layers", str(args.layers)]
        command += ["--micro-tokens", str(args.micro_tokens), "--threads", str(args.threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
        print(f"  {arm:8} {json.loads(done.stdout.splitlines()[-1]) / 1024:.2f} GB", flush=True)


def child(args: Any) -> None:
    """One arm alone, twice; prints the peak resident size in MB."""
    args.rounds = 2
    compare(smollm2(args.layers), mixed(2048), args, [args.child])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parts = {"packed": run_packed, "sharing": run_sharing, "tiny": run_tiny, "memory": run_memory}
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="default: all")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", choices=["packed", "padded"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        child(args)
        return
    unit = "processor time" if args.threads == 1 else "wall time"
    print(f"torch {torch.__version__}, {args.threads} thread(s), {unit}, best of {args.rounds} rounds")
    for name in args.parts or parts:
        parts[name](args)


if __name__ == "__main__":
    main()
