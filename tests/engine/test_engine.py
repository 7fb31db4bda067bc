"""The asyncio face: continuous batching, prefixes, deadlines, cancellation, crashes, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from trivet.engine import EngineError, EngineTimeout, Generation, Sampling
from trivet.engine.torch import TorchEngine


def _slow(engine: TorchEngine, seconds: float) -> None:
    """Each decoding step takes at least this long."""
    decode = engine._model.decode

    def slowly(*args: Any) -> torch.Tensor:
        time.sleep(seconds)
        return decode(*args)

    engine._model.decode = slowly  # type: ignore[method-assign]


async def _until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.005)


# -- prefixes ------------------------------------------------------------------------------------


def test_a_groups_prompt_is_prefilled_once(models, engines, prompt, reference) -> None:
    engine = engines(models("qwen3"), slots=16)
    ids = prompt(41)

    async def group() -> list[Generation]:
        calls = [engine.generate(ids, Sampling(max_tokens=5, seed=i), session=f"g{i}") for i in range(16)]
        return await asyncio.gather(*calls)

    generations = asyncio.run(group())
    metrics = engine.metrics()
    assert metrics["prefilled_tokens"] == 40  # the last one is forwarded by each when it decodes
    assert metrics["reused_tokens"] == 15 * 40
    assert sorted(g.counters["prefilled"] for g in generations) == [0.0] * 15 + [40.0]
    assert len({tuple(g.ids_T.tolist()) for g in generations}) > 1
    for g in generations:
        expected = reference(models("qwen3"), np.concatenate([ids, g.ids_T]))[40:]
        assert np.abs(g.logprob_T - expected).max() < 1e-4


def test_a_groups_prompt_is_prefilled_once_with_few_slots(models, engines, prompt) -> None:
    """Members that come later take over what finished members left."""
    engine = engines(models("qwen3"), slots=3)
    ids = prompt(41)

    async def group() -> None:
        calls = [engine.generate(ids, Sampling(max_tokens=2 + i, seed=i), session=f"g{i}") for i in range(9)]
        await asyncio.gather(*calls)

    asyncio.run(group())
    assert engine.metrics()["prefilled_tokens"] == 40


def test_a_sessions_history_is_not_prefilled_twice(models, engines, prompt, reference) -> None:
    engine = engines(models("llama"))

    async def play(settle: bool) -> list[Generation]:
        out, history = [], prompt(30)
        for turn in range(3):
            sampling = Sampling(max_tokens=6, seed=turn)
            out.append(await engine.generate(history, sampling, session="talk"))
            history = np.concatenate([history, out[-1].ids_T, prompt(10, seed=turn)])
            if settle:
                engine.settle("talk")
        expected = reference(models("llama"), history)
        assert np.abs(out[0].logprob_T - expected[29:35]).max() < 1e-4
        assert np.abs(out[2].logprob_T - expected[29 + 32 : 35 + 32]).max() < 1e-4
        return out

    turns = asyncio.run(play(settle=False))
    # Prompts of 30, 46, 62 tokens; of a turn's 6 tokens the last was never forwarded.
    assert [t.counters["prefilled"] for t in turns] == [29, 45 - 35, 61 - 51]
    assert [t.counters["reused"] for t in turns] == [0, 35, 51]
    engine.settle("talk")
    turns = asyncio.run(play(settle=True))
    assert [t.counters["prefilled"] for t in turns] == [29, 45, 61]


def test_what_was_unused_longest_makes_room(models, engines, prompt) -> None:
    engine = engines(models("llama"), slots=2)

    async def ask(session: str, ids: np.ndarray) -> Generation:
        return await engine.generate(ids, Sampling(max_tokens=2, seed=0), session=session)

    async def play() -> list[float]:
        a, b, c = (prompt(20, seed=i) for i in range(3))
        await ask("a", a)
        await ask("b", b)
        again = await ask("a", a)  # a is now the younger of the two
        await ask("c", c)  # takes b's slot
        return [g.counters["reused"] for g in (again, await ask("a", a), await ask("b", b))]

    assert asyncio.run(play()) == [19, 19, 0]


# -- ends ----------------------------------------------------------------------------------------


def test_stop_length_and_context(models, engines, prompt) -> None:
    engine = engines(models("qwen3"), context=24)
    ids = prompt(20)

    async def ask(**settings: Any) -> Generation:
        return await engine.generate(ids, Sampling(seed=5, **settings), session="s")

    full = asyncio.run(ask(max_tokens=100))
    assert (full.finish, len(full.ids_T)) == ("context", 4)
    exact = asyncio.run(ask(max_tokens=4))
    assert (exact.finish, len(exact.ids_T)) == ("length", 4)
    stop = int(full.ids_T[2])
    first = full.ids_T.tolist().index(stop)
    stopped = asyncio.run(ask(max_tokens=100, stop_ids=(1000, stop)))
    assert (stopped.finish, stopped.ids_T.tolist()) == ("stop", full.ids_T[: first + 1].tolist())
    largest = asyncio.run(engine.generate(prompt(23), Sampling(max_tokens=9, seed=0), session="s"))
    assert (largest.finish, len(largest.ids_T)) == ("context", 1)


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        (np.zeros(0, np.int32), Sampling(max_tokens=1, seed=0), "non-empty"),
        (np.zeros(128, np.int32), Sampling(max_tokens=1, seed=0), "no room in a context of 128"),
        (np.array([3, 97]), Sampling(max_tokens=1, seed=0), "outside 0..96"),
        (np.array([3]), Sampling(max_tokens=0, seed=0), "max_tokens"),
        (np.array([3]), Sampling(max_tokens=1, seed=0, temperature=-1.0), "temperature"),
    ],
)
def test_what_cannot_be_generated_is_a_value_error(models, engines, ids, sampling, message) -> None:
    engine = engines(models("llama"))
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.generate(ids, sampling, session="s"))


def test_greedy_equals_transformers(models, engines, prompt) -> None:
    model, ids = models("llama"), prompt(12)
    sampling = Sampling(max_tokens=20, seed=0, temperature=0.0)
    got = asyncio.run(engines(model).generate(ids, sampling, session="s"))
    row = torch.from_numpy(ids.astype(np.int64))[None]
    expected = model.generate(row, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert got.ids_T.tolist() == expected[0, 12:].tolist()


def test_top_is_of_the_distribution_sampled_from(models, engines, prompt) -> None:
    engine = engines(models("llama"))

    async def both() -> tuple[Generation, Generation]:
        with_top = Sampling(max_tokens=8, seed=1, top=5)
        without = Sampling(max_tokens=8, seed=1)
        return tuple(
            await asyncio.gather(
                engine.generate(prompt(9), with_top, session="a"),
                engine.generate(prompt(9), without, session="b"),
            )
        )  # type: ignore[return-value]

    a, b = asyncio.run(both())
    assert np.array_equal(a.ids_T, b.ids_T)
    assert b.top is None
    assert a.top is not None
    assert len(a.top.offset_T) == 9
    for t in range(8):
        span = slice(int(a.top.offset_T[t]), int(a.top.offset_T[t + 1]))
        assert 1 <= span.stop - span.start <= 5
        assert (np.diff(a.top.logprob_K[span].astype(np.float32)) <= 0).all()
        assert np.exp(a.top.logprob_K[span].astype(np.float64)).sum() == pytest.approx(
            a.top.mass_T[t], abs=5e-3
        )
        where = np.flatnonzero(a.top.id_K[span] == a.ids_T[t])
        if len(where):
            assert a.top.logprob_K[span][where[0]] == pytest.approx(a.logprob_T[t], abs=5e-3)


# -- waiting -------------------------------------------------------------------------------------


def test_cancelling_frees_the_slot(models, engines, prompt) -> None:
    engine = engines(models("llama"), slots=1, context=1000)
    _slow(engine, 0.005)

    async def play() -> Generation:
        long = asyncio.create_task(
            engine.generate(prompt(9), Sampling(max_tokens=900, seed=0), session="long")
        )
        await _until(lambda: engine._scheduler.slots.size.max() > 12)
        next_one = asyncio.create_task(
            engine.generate(prompt(5), Sampling(max_tokens=3, seed=0), session="next")
        )
        await asyncio.sleep(0.02)
        assert not next_one.done()
        long.cancel()
        out = await asyncio.wait_for(next_one, 2.0)
        with pytest.raises(asyncio.CancelledError):
            await long
        return out

    assert len(asyncio.run(play()).ids_T) == 3


def test_a_cancelled_leader_leaves_its_group_alive(models, engines, prompt, monkeypatch) -> None:
    """The others were waiting for its prompt to be prefilled: one of them takes over."""
    monkeypatch.setattr("trivet.engine.torch.scheduler.CHUNK", 8)
    monkeypatch.setattr("trivet.engine.torch.scheduler.PREFILL_TOKENS", 8)
    engine = engines(models("llama"), slots=4)
    prefill = engine._model.prefill
    engine._model.prefill = lambda *a: (time.sleep(0.03), prefill(*a))[1]  # type: ignore[method-assign]

    async def play() -> list[Generation]:
        ids = prompt(100)
        tasks = [
            asyncio.create_task(engine.generate(ids, Sampling(max_tokens=3, seed=i), session=f"g{i}"))
            for i in range(4)
        ]
        await _until(lambda: engine._scheduler.slots.filled.max() > 8)
        tasks[0].cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks[1:]), 10.0)

    assert [len(g.ids_T) for g in asyncio.run(play())] == [3, 3, 3]
    metrics = engine.metrics()
    assert metrics["prefilled_tokens"] < 2 * 99  # the new leader even starts from what the old one had
    assert metrics["reused_tokens"] >= 2 * 99


def test_a_deadline_names_what_was_waited_for(models, engines, prompt) -> None:
    engine = engines(models("llama"), slots=1, context=1000, request_timeout_s=0.4)
    _slow(engine, 0.01)

    async def play() -> list[Any]:
        calls = [
            engine.generate(prompt(9), Sampling(max_tokens=900, seed=0), session=name) for name in ("a", "b")
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    running, queued = asyncio.run(play())
    assert isinstance(running, EngineTimeout)
    assert isinstance(queued, EngineTimeout)
    assert "session 'a' waited 0.4 s" in str(running)
    assert "tokens are there (prompt of 9 tokens, up to 900 more)" in str(running)
    assert "still queued, 1 of 1 slots are busy" in str(queued)


def test_a_crash_fails_everyone_with_the_cause(models, engines, prompt) -> None:
    engine = engines(models("llama"), slots=1)

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    engine._model.decode = broken  # type: ignore[method-assign]

    async def play() -> list[Any]:
        calls = [engine.generate(prompt(9), Sampling(max_tokens=9, seed=0), session=s) for s in "abc"]
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, EngineError)
        assert "out of luck" in str(error)
    with pytest.raises(EngineError, match=r"thread died.*out of luck"):
        asyncio.run(engine.generate(prompt(9), Sampling(max_tokens=9, seed=0), session="late"))
    with pytest.raises(EngineError, match=r"update to version 3.*out of luck"):
        engine.update({}, 3)
    engine.close()


def test_close_is_idempotent_and_fails_what_runs(models, engines, prompt) -> None:
    engine = engines(models("llama"), slots=1, context=1000)
    _slow(engine, 0.005)

    async def play() -> list[Any]:
        calls = [
            asyncio.create_task(engine.generate(prompt(9), Sampling(max_tokens=900, seed=0), session=s))
            for s in "ab"
        ]
        await _until(engine._scheduler.slots.busy.any)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, EngineError)
        assert "closed" in str(error)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate(prompt(9), Sampling(max_tokens=9, seed=0), session="late"))
    with pytest.raises(EngineError, match="closed"):
        engine.metrics()


def test_two_event_loops_share_an_engine(models, engines, prompt) -> None:
    engine = engines(models("llama"))
    results: dict[str, list[Generation]] = {}

    def loop(name: str) -> None:
        async def play() -> list[Generation]:
            calls = [
                engine.generate(prompt(9, seed=i), Sampling(max_tokens=9, seed=i), session=f"{name}{i}")
                for i in range(6)
            ]
            return await asyncio.gather(*calls)

        results[name] = asyncio.run(play())

    threads = [threading.Thread(target=loop, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for a, b in zip(results["a"], results["b"], strict=True):
        assert np.array_equal(a.ids_T, b.ids_T)


def test_nan_logits_are_an_error_and_leave_no_trace(models, engines, prompt, reference) -> None:
    model = models("llama")
    engine = engines(model)
    good = {name: t.clone() for name, t in model.state_dict().items()}
    bad = {name: torch.full_like(t, float("nan")) for name, t in good.items()}
    engine.update(bad, 1)
    with pytest.raises(EngineError, match="version 1 are not finite"):
        asyncio.run(engine.generate(prompt(60), Sampling(max_tokens=9, seed=0), session="s"))
    engine.update(good, 2)
    g = asyncio.run(engine.generate(prompt(9), Sampling(max_tokens=9, seed=0), session="s"))
    expected = reference(model, np.concatenate([prompt(9), g.ids_T]))[8:]
    assert np.abs(g.logprob_T - expected).max() < 1e-4


# -- numbers and memory --------------------------------------------------------------------------


def test_metrics_count_since_the_last_call(models, engines, prompt) -> None:
    engine = engines(models("llama"), deterministic=True)  # all requests are there before the first step

    async def play() -> None:
        engine.expect(f"{i}" for i in range(8))
        calls = [
            engine.generate(prompt(9, seed=i), Sampling(max_tokens=5, seed=i), session=f"{i}")
            for i in range(8)
        ]
        await asyncio.gather(*calls)

    asyncio.run(play())
    metrics = engine.metrics()
    assert metrics["decoded_tokens"] == 40
    assert metrics["prefilled_tokens"] == 64
    assert metrics["steps"] == 10
    assert metrics["occupancy"] == pytest.approx(1.0)
    assert metrics["busy_s"] >= metrics["decode_s"] >= metrics["forward_s"] + metrics["sample_s"] > 0
    assert metrics["decode_tokens_per_s"] > 0
    assert engine.metrics()["decoded_tokens"] == 0


def test_sleep_frees_the_caches_and_wake_brings_them_back(models, engines, prompt) -> None:
    for kind in ("qwen3", "gpt2"):
        engine = engines(models(kind))

        def ask(engine: TorchEngine = engine) -> Generation:
            sampling = Sampling(max_tokens=5, seed=0)
            return asyncio.run(engine.generate(prompt(9), sampling, session="s"))

        before = ask()
        assert engine.metrics()["cache_bytes"] > 0
        engine.sleep()
        metrics = engine.metrics()
        assert (metrics["cache_bytes"], metrics["asleep"]) == (0, 1)
        with pytest.raises(EngineError, match="asleep"):
            ask()
        engine.wake()
        engine.wake()
        assert engine.metrics()["asleep"] == 0
        after = ask()
        assert np.array_equal(before.logprob_T, after.logprob_T)
        assert after.counters["reused"] == 0
