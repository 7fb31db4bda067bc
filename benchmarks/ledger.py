"""How fast the ledger is, and what batching its transactions brings.

    python benchmarks/ledger.py [--groups 512] [--group 8] [--tokens 256] [--threads 16] [--directory DIR]

Prints groups put per second by one thread, by many threads whose writes share transactions, and by the same
threads with one transaction each; the same for flushed writes (an ack's kind), where a transaction waits for
the disk; groups taken and read per second; and the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from trivet.buffer import Ledger, StageLedger
from trivet.buffer import store as storage
from trivet.types import Group, IssueKey, Message, Rollout, Scored, Task, Termination, Trace

REPEATS = 3


def make_group(key: IssueKey, n: int, tokens: int) -> Group:
    """`n` rollouts of `tokens` sampled tokens each, as random as real ones."""
    random = np.random.default_rng(abs(hash(key)) % 2**32)
    task = Task("math", (Message("user", "What is 6 times 7?" * 4),), {"answer": "42"}, key.task_id)
    rollouts = []
    for i in range(n):
        trace = Trace()
        root = trace.add(-1, random.integers(0, 150_000, 64))
        ids, logprobs = random.integers(0, 150_000, tokens), -random.random(tokens, np.float32)
        trace.add_sampled(root, ids, logprobs, 1)
        messages = [*task.messages, Message("assistant", "thinking " * (tokens // 2))]
        rollouts.append(
            Rollout(task, trace, Scored(float(i % 2)), Termination.FINISHED, i, messages=messages)
        )
    return Group("", key, rollouts)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def puts(directory: Path, arguments: argparse.Namespace, threads: int, batch: int) -> float:
    """Groups put per second."""
    storage._MAX_BATCH = batch  # 1: every write is its own transaction
    with Ledger(directory / "puts.sqlite", owner="benchmark") as ledger:
        stage = ledger.stage(f"s{time.time_ns()}")
        stage.issue([f"t{i}" for i in range(arguments.groups)], 1)
        keys = stage.claim(arguments.groups)
        groups = [make_group(key, arguments.group, arguments.tokens) for key in keys]
        with ThreadPoolExecutor(threads) as pool:
            return arguments.groups / timed(lambda: list(pool.map(stage.put, groups)))


def flushed(directory: Path, arguments: argparse.Namespace, threads: int, batch: int) -> float:
    """Flushed writes per second."""
    storage._MAX_BATCH = batch
    n = max(64, arguments.groups // 4)
    with (
        Ledger(directory / "flushed.sqlite", owner="benchmark") as ledger,
        ThreadPoolExecutor(threads) as pool,
    ):
        return n / timed(lambda: list(pool.map(ledger.new_version, range(n))))


def takes(directory: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Groups per second taken, read and acknowledged in batches of 32; and taken only."""
    with Ledger(directory / "takes.sqlite", owner="benchmark") as ledger:
        stage = ledger.stage(f"s{time.time_ns()}")
        keys = [IssueKey(f"t{i}", 1) for i in range(arguments.groups)]
        stage.put_examples((make_group(key, arguments.group, arguments.tokens) for key in keys), 1)
        bare = timed(lambda: _take_all(stage, read=False))
        stage.rewind(0)
        stage.unpin()
        return arguments.groups / timed(lambda: _take_all(stage, read=True)), arguments.groups / bare


def _take_all(stage: StageLedger, *, read: bool) -> None:
    step = 0
    while len(lease := stage.take(32)):
        step += 1
        if read:
            lease.groups()
        stage.ack(lease, step)


def medians(*measures: Callable[[], float]) -> list[float]:
    """Measured in turn, so that a busy neighbour disturbs all alike."""
    rounds = [[measure() for measure in measures] for _ in range(REPEATS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--group", type=int, default=8, help="rollouts per group")
    parser.add_argument("--tokens", type=int, default=256, help="sampled tokens per rollout")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--directory", type=Path, help="where the files go (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    usual = storage._MAX_BATCH
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        where = Path(folder)
        single, batched, apart = medians(
            lambda: puts(where, arguments, 1, usual),
            lambda: puts(where, arguments, arguments.threads, usual),
            lambda: puts(where, arguments, arguments.threads, 1),
        )
        disk, disk_apart = medians(
            lambda: flushed(where, arguments, arguments.threads, usual),
            lambda: flushed(where, arguments, arguments.threads, 1),
        )
        read, bare = takes(where, arguments)
    storage._MAX_BATCH = usual
    shape = f"{arguments.group} rollouts of {arguments.tokens} tokens"
    print(f"puts/s, 1 thread                       {single:9.0f}   groups of {shape}")
    print(f"puts/s, {arguments.threads} threads, batched            {batched:9.0f}")
    gain, gain_flushed = batched / apart, disk / disk_apart
    print(f"puts/s, {arguments.threads} threads, one by one         {apart:9.0f}   batched is {gain:.2f}x")
    print(f"flushed writes/s, batched              {disk:9.0f}")
    print(f"flushed writes/s, one by one           {disk_apart:9.0f}   batched is {gain_flushed:.2f}x")
    print(f"takes/s with reading and ack           {read:9.0f}   groups, batches of 32")
    print(f"takes/s with ack only                  {bare:9.0f}   groups, batches of 32")


if __name__ == "__main__":
    main()
