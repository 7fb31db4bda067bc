"""Deterministic mode: the same seeds give the same bits, however and whenever the requests arrive."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from trivet.engine import EngineTimeout, Generation, Sampling
from trivet.engine.torch import TorchEngine


async def _rollout(
    engine: TorchEngine, i: int, prompt: Any, turns: int, wild: random.Random
) -> list[Generation]:
    """A session of some turns; every wait is random."""
    out, history = [], prompt(12 + 7 * (i // 4), seed=i // 4)
    session = f"s{i}"
    for turn in range(turns):
        await asyncio.sleep(wild.random() * 0.03)
        sampling = Sampling(max_tokens=3 + (5 * i) % 13, seed=100 * i + turn, order=(i // 4, i % 4, turn))
        out.append(await engine.generate(history, sampling, session=session))
        history = np.concatenate([history, out[-1].ids_T, prompt(4, seed=turn)])
    await asyncio.sleep(wild.random() * 0.01)
    engine.settle(session)
    return out


def _run(engine: TorchEngine, prompt: Any, seed: int, n: int = 20) -> list[list[Generation]]:
    wild = random.Random(seed)

    async def play() -> list[list[Generation]]:
        engine.expect([f"s{i}" for i in range(n)])
        order = list(range(n))
        wild.shuffle(order)
        tasks = {}
        for i in order:
            tasks[i] = asyncio.create_task(_rollout(engine, i, prompt, 1 + i % 3, wild))
            if wild.random() < 0.5:
                await asyncio.sleep(wild.random() * 0.01)
        return [await tasks[i] for i in range(n)]

    return asyncio.run(play())


@pytest.mark.parametrize("grouped", [False, True])
def test_bits_do_not_depend_on_arrival(grouped: bool, models, engines, prompt, monkeypatch) -> None:
    if grouped:
        monkeypatch.setattr("trivet.engine.torch.scheduler.GROUP_BYTES", 1)
        monkeypatch.setattr("trivet.engine.torch.scheduler.GROUP_ROWS", 3)
    runs = []
    for seed in range(3):
        engine = engines(models("qwen3"), slots=6, deterministic=True)
        first = _run(engine, prompt, seed)
        engine.update({n: t.detach() for n, t in models("qwen3", seed=1).named_parameters()}, 1)
        runs.append(first + _run(engine, prompt, seed + 50))
        metrics = engine.metrics()
        assert metrics["reused_tokens"] > 0
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            for x, y in zip(a, b, strict=True):
                assert np.array_equal(x.ids_T, y.ids_T)
                assert x.logprob_T.tobytes() == y.logprob_T.tobytes()
                assert np.array_equal(x.version_T, y.version_T)


def test_a_round_waits_for_every_expected_session(models, engines, prompt) -> None:
    engine = engines(models("llama"), deterministic=True)

    async def play() -> None:
        engine.expect(["a", "b", "c"])
        a = asyncio.create_task(engine.generate(prompt(5), Sampling(max_tokens=2, seed=0), session="a"))
        b = asyncio.create_task(engine.generate(prompt(5), Sampling(max_tokens=2, seed=0), session="b"))
        await asyncio.sleep(0.1)
        assert not a.done()
        engine.settle("c")
        await asyncio.wait_for(asyncio.gather(a, b), 5.0)

    asyncio.run(play())


def test_a_round_that_cannot_begin_says_who_is_missing(models, engines, prompt) -> None:
    engine = engines(models("llama"), deterministic=True, request_timeout_s=0.2)

    async def play() -> None:
        engine.expect([f"s{i}" for i in range(8)])
        calls = [
            engine.generate(prompt(5), Sampling(max_tokens=2, seed=0), session=f"s{i}") for i in range(3)
        ]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, EngineTimeout)
        assert "3 of 8 expected sessions are there; missing: s3, s4, s5, s6, s7" in str(error)
        for i in range(8):
            engine.settle(f"s{i}")
        await engine.generate(prompt(5), Sampling(max_tokens=2, seed=0), session="later")

    asyncio.run(play())


def test_admission_follows_order(models, engines, prompt) -> None:
    """One slot: who is first in `order` is sampled first, whoever came first."""
    engine = engines(models("llama"), slots=1, deterministic=True)
    finished: list[int] = []

    async def one(i: int) -> None:
        await engine.generate(prompt(5), Sampling(max_tokens=2, seed=0, order=(i,)), session=f"s{i}")
        finished.append(i)

    async def play() -> None:
        engine.expect([f"s{i}" for i in range(5)])
        await asyncio.gather(*[one(i) for i in (3, 0, 4, 1, 2)])

    asyncio.run(play())
    assert finished == [0, 1, 2, 3, 4]
