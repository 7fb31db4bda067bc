"""How fast the embedded engine samples, as ratios on the machine it runs on.

    python benchmarks/engine.py             # everything; a quarter of an hour on two cores
    python benchmarks/engine.py --quick     # the same questions, smaller: a minute or two
    python benchmarks/engine.py ragged tiny # some of them

ragged     log-uniform lengths, prompts in groups of 8, against `model.generate` in batches of `slots` in
           order of arrival (it has no other way with ragged lengths), and against the machine's peaks
uniform    the same with equal lengths: what is left when there is nothing to schedule
tiny       the quick start's model, where Python's overhead per step is what counts
neighbour  decoding beside a busy process at nice 19 and at normal priority

The two arms of a comparison are interleaved (half of B, A, the other half of B), because other load on the
machine drifts; the ratio of CPU seconds is given too, which such load disturbs less. Tokens per second count
wanted tokens only; prefill is included in both arms.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trivet.engine import Sampling
from trivet.engine.torch import TorchEngine

GROUP = 8


def smollm2(layers: int) -> Any:
    """The shape of SmolLM2-135M (30 layers), random weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


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
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


class Work:
    """Prompts in groups of 8 and forced lengths."""

    def __init__(self, requests: int, prompt: int, low: int, high: int, vocab: int) -> None:
        rng = np.random.default_rng(0)
        drawn = np.exp(rng.uniform(np.log(low), np.log(high + 1), requests))
        self.lengths = np.minimum(drawn.astype(int), high)
        prompts = rng.integers(5, vocab, (-(-requests // GROUP), prompt)).astype(np.int32)
        self.prompts = np.repeat(prompts, GROUP, 0)[:requests]

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class Clock:
    """Wall and CPU seconds of this process, summed over the blocks it is entered for."""

    wall = cpu = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._begun[0]
        self.cpu += time.process_time() - self._begun[1]


def run_engine(engine: TorchEngine, work: Work) -> None:
    """All requests at once; the engine schedules them."""

    async def play() -> None:
        calls = [
            engine.generate(p, Sampling(max_tokens=int(n), seed=i, order=(i,)), session=f"r{i}")
            for i, (p, n) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        for generation, n in zip(await asyncio.gather(*calls), work.lengths, strict=True):
            assert len(generation.ids_T) == n

    asyncio.run(play())
    for i in range(len(work.prompts)):
        engine.settle(f"r{i}")


def run_generate(model: Any, work: Work, batch: int, part: slice) -> None:
    """`model.generate` over a part of the batches; each runs to its longest row."""
    starts = range(0, len(work.prompts), batch)
    for start in starts[part]:
        ids = torch.from_numpy(work.prompts[start : start + batch].astype(np.int64))
        longest = int(work.lengths[start : start + batch].max())
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + longest


def peaks() -> tuple[float, float]:
    """(GFLOP/s of a float32 matrix product, GB/s of reading memory) with torch's threads."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    flops = 2 * 2048**3 / _best(lambda: a @ b)
    big = torch.randn(1 << 26)
    return flops / 1e9, big.numel() * 4 / _best(big.sum) / 1e9


def _best(call: Callable[[], Any], n: int = 6) -> float:
    times = []
    for _ in range(n):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def show_split(engine: TorchEngine, model: Any, work: Work) -> None:
    """Where a run's time went, and how near its decoding came to the machine's peaks."""
    m = engine.metrics()
    steps, rows = max(1.0, m["steps"]), m["decoded_tokens"] / max(1.0, m["steps"])
    print(
        f"  engine: {m['steps']:.0f} steps of {rows:.1f} rows; a step {m['decode_s'] / steps * 1e3:.2f} ms = "
        f"forward {m['forward_s'] / steps * 1e3:.2f} + sampling {m['sample_s'] / steps * 1e3:.2f} + rest "
        f"{(m['decode_s'] - m['forward_s'] - m['sample_s']) / steps * 1e3:.2f}; prefill {m['prefill_s']:.2f} "
        f"of {m['busy_s']:.2f} s; occupancy {m['occupancy']:.0%}; prefilled {m['prefilled_tokens']:.0f}, "
        f"reused {m['reused_tokens']:.0f} tokens; {m['moved_rows']:.0f} rows moved"
    )
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    head = config.vocab_size * config.hidden_size
    touched = weights + (0 if config.tie_word_embeddings else -head)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4
    start = work.prompts.shape[1]
    context = float((work.lengths * (start + work.lengths / 2)).sum())  # cached positions read by all tokens
    flops, bandwidth = peaks()
    matmul = 2 * touched * m["decoded_tokens"] / m["forward_s"] / 1e9
    read = (touched * 4 * steps + context * entry) / m["forward_s"] / 1e9
    print(
        f"  decoding used {matmul:.0f} of {flops:.0f} GFLOP/s ({matmul / flops:.0%}, matrix products) and "
        f"{read:.1f} of {bandwidth:.1f} GB/s ({read / bandwidth:.0%}; weights and cache read once a step)"
    )


def compare(title: str, model: Any, work: Work, slots: int, deterministic: bool = False) -> None:
    context = work.prompts.shape[1] + int(work.lengths.max())
    engine = TorchEngine(model, slots=slots, context=context, device="cpu", deterministic=deterministic)
    try:
        small = Work(slots, work.prompts.shape[1], 2, 2, model.config.vocab_size)
        run_engine(engine, small)  # first-touch of memory and of every code path
        run_generate(model, small, slots, slice(None))
        engine.metrics()
        half = -(-len(work.prompts) // slots) // 2
        ours, theirs = Clock(), Clock()
        with theirs:
            run_generate(model, work, slots, slice(0, half))
        with ours:
            run_engine(engine, work)
        with theirs:
            run_generate(model, work, slots, slice(half, None))
        print(
            f"{title}: {work.tokens / ours.wall:.0f} tokens/s, generate {work.tokens / theirs.wall:.0f}: "
            f"{theirs.wall / ours.wall:.2f}x ({theirs.cpu / ours.cpu:.2f}x in CPU seconds; "
            f"load {os.getloadavg()[0]:.1f})"
        )
        show_split(engine, model, work)
    finally:
        engine.close()


@contextmanager
def busy(nice: int | None) -> Iterator[None]:
    """A neighbour process that computes all the time; None: no neighbour."""
    if nice is None:
        yield
        return
    code = f"import os; os.nice({nice})\nx = 1\nwhile True: x = (x * 1103515245 + 12345) % 2147483648"
    child = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(0.3)
    try:
        yield
    finally:
        child.kill()
        child.wait()


def neighbour(model: Any, work: Work, slots: int, rounds: int) -> None:
    """Decode rate alone, beside one process a core at nice 19, and beside the same at normal priority."""
    engine = TorchEngine(
        model, slots=slots, context=work.prompts.shape[1] + int(work.lengths.max()), device="cpu"
    )
    kinds: dict[str, int | None] = {"alone": None, "beside nice 19": 19, "beside nice 0": 0}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    try:
        run_engine(engine, work)
        for _ in range(rounds):
            for name, nice in kinds.items():
                with busy(nice):
                    engine.metrics()
                    run_engine(engine, work)
                    rates[name].append(engine.metrics()["decode_tokens_per_s"])
    finally:
        engine.close()
    alone = float(np.median(rates["alone"]))
    for name, values in rates.items():
        print(f"neighbour: {name}: {np.median(values):.0f} tokens/s decoded, {np.median(values) / alone:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="ragged, uniform, tiny, neighbour; default: all")
    parser.add_argument("--quick", action="store_true", help="6 layers and shorter answers")
    parser.add_argument("--requests", type=int, help="of the ragged part; default 256, with --quick 128")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    parts = args.parts or ["ragged", "uniform", "tiny", "neighbour"]
    torch.set_num_threads(args.threads)
    flops, bandwidth = peaks()
    print(
        f"{args.threads} threads, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; peaks now: "
        f"{flops:.0f} GFLOP/s, {bandwidth:.1f} GB/s; torch {torch.__version__}"
    )
    layers, requests, high = (6, 128, 96) if args.quick else (30, 256, 256)
    requests = args.requests or requests
    vocab = 49152
    large = smollm2(layers) if {"ragged", "uniform", "neighbour"} & set(parts) else None
    if "ragged" in parts:
        work = Work(requests, 64, 8, high, vocab)
        compare(f"ragged: {requests} requests of 8..{high} tokens", large, work, args.slots)
    if "uniform" in parts:
        length = 24 if args.quick else 64
        work = Work(2 * args.slots, 64, length, length, vocab)
        compare(f"uniform: {2 * args.slots} requests of {length} tokens", large, work, args.slots)
    if "tiny" in parts:
        tiny, scale = quickstart(), 1 if args.quick else 4
        for deterministic in (False, True):
            name = "tiny, deterministic" if deterministic else "tiny"
            work = Work(256 * scale, 20, 4, 12, 90)
            compare(f"{name}: answers of 4..12 tokens", tiny, work, args.slots, deterministic)
        work = Work(128 * scale, 20, 64, 64, 90)
        compare("tiny: answers of 64 tokens", tiny, work, args.slots)
    if "neighbour" in parts:
        work = Work(args.slots, 64, 16, 16, vocab)
        neighbour(large, work, args.slots, rounds=2 if args.quick else 3)


if __name__ == "__main__":
    main()
