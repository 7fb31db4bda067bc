"""Environments: found by name, checked, and sound whatever their verifier does."""

from __future__ import annotations

import asyncio
import importlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trivet.agents import Attempt, Policy
from trivet.engine.base import EngineError, Generation, Sampling
from trivet.envs import EnvError, Environment, SingleTurn, environment_names, make_env
from trivet.recipe import schema
from trivet.render import Renderer, get_renderer
from trivet.render.tiny import make_tiny, tiny_tokenizer
from trivet.tasks import load_tasks
from trivet.types import (
    IssueKey,
    Message,
    Pending,
    Reward,
    Rollout,
    Scored,
    Task,
    Termination,
    Tokens,
    Unscored,
)

MY_ENV = str(Path(__file__).with_name("my_env.py"))


class Says:
    """An engine that always gives the same answer, and remembers the order of things."""

    version = 0

    def __init__(self, renderer: Renderer, answer: str | BaseException) -> None:
        self.answer = answer
        self.events: list[str] = []
        if isinstance(answer, str):
            rendered = renderer.render((Message("user", "x"), Message("assistant", answer)))
            self.ids = rendered.ids_T[rendered.mask_T()]

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, media: Any = None
    ) -> Generation:
        if isinstance(self.answer, BaseException):
            raise self.answer
        ids = self.ids[: sampling.max_tokens]
        n = len(ids)
        finish = "stop" if n == len(self.ids) else "length"
        return Generation(ids, np.full(n, -1, np.float32), np.zeros(n, np.int32), finish)

    def settle(self, session: str) -> None:
        self.events.append("settled")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return get_renderer(tiny_tokenizer(schema.TinyModel(alphabet=schema.TinyModel().alphabet + "^")))


TASK = Task("math", (Message("user", "12+35="),), {"answer": "47"}, id="sum")


def play(
    env: Environment,
    renderer: Renderer,
    answer: str | BaseException,
    task: Task = TASK,
    max_tokens: int = 100,
) -> Rollout:
    engine = Says(renderer, answer)
    policy = Policy(engine, renderer, schema.Sampling(max_tokens=max_tokens), context=256)  # type: ignore[arg-type]

    async def run() -> list[Rollout]:
        async with env:
            return await env.rollout(task, policy, Attempt("r", IssueKey("sum", 1), "g", 0))

    (rollout,) = asyncio.run(run())
    assert engine.events == ["settled"]
    return rollout


def test_math(renderer: Renderer) -> None:
    right = play(make_env("math"), renderer, "\\boxed{47}")
    assert right.reward == Scored(1.0, {"answered": 1.0})
    assert right.termination is Termination.FINISHED
    assert right.timings["score_s"] >= 0
    assert play(make_env("math"), renderer, "\\boxed{48}").score == 0.0
    assert play(make_env("math"), renderer, "47").reward == Scored(0.0, {"answered": 0.0})
    assert play(make_env("math", fallback="number"), renderer, "47").score == 1.0
    cut = play(make_env("math"), renderer, "\\boxed{47}", max_tokens=5)
    assert cut.termination is Termination.LENGTH
    assert cut.reward == Scored(0.0, {"answered": 0.0})
    missing = play(make_env("math"), renderer, "\\boxed{47}", Task("math", TASK.messages))
    assert getattr(missing.reward, "cause", None) == "no_gold"


def test_exact_answers_are_compared_letter_by_letter(renderer: Renderer) -> None:
    words = Task("math", TASK.messages, {"answer": "1 3 4", "match": "exact"})
    assert play(make_env("math"), renderer, "\\boxed{1  3 4}", words).score == 1.0
    assert play(make_env("math"), renderer, "\\boxed{4 3 1}", words).score == 0.0
    assert play(make_env("math"), renderer, "\\boxed{134}", words).score == 0.0


def test_a_users_environment(renderer: Renderer) -> None:
    assert play(make_env(f"{MY_ENV}:Shout"), renderer, "YES").score == 1.0
    assert play(make_env(f"{MY_ENV}:Shout", worth=3.0), renderer, "YES").score == 3.0
    assert "loud" in environment_names()  # loading the file registered it
    assert play(make_env("loud"), renderer, "no").score == 0.0


def test_one_file_may_be_imported_and_named(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`imports: [module]` and `env: module.py:Class` load one file under two modules' names."""
    text = Path(MY_ENV).read_text().replace('"loud"', '"loud_twice"')
    (tmp_path / "imported_and_named.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_and_named")
    assert play(make_env(f"{tmp_path}/imported_and_named.py:Shout"), renderer, "YES").score == 1.0
    assert play(make_env("loud_twice"), renderer, "YES").score == 1.0
    (tmp_path / "another.py").write_text(text)
    with pytest.raises(EnvError, match="'loud_twice' is taken"):
        make_env(f"{tmp_path}/another.py:Shout")


def test_callable(renderer: Renderer) -> None:
    assert play(make_env("callable", function=f"{MY_ENV}:digits"), renderer, "12ab").score == 0.5
    lengths = make_env("callable", function=len)
    assert play(lengths, renderer, "four").score == 4.0
    with pytest.raises(EnvError, match="did you mean 'digits'"):
        play(make_env("callable", function=f"{MY_ENV}:digts"), renderer, "12ab")


def test_instruct(renderer: Renderer) -> None:
    task = Task(
        "instruct",
        (Message("user", "say a thing"),),
        {"constraints": [{"kind": "lower_case"}, {"kind": "word_count", "at_least": 3}]},
    )
    good = play(make_env("instruct"), renderer, "three small words", task)
    assert good.reward == Scored(1.0, {"lower_case": 1.0, "word_count": 1.0, "held": 1.0})
    half = play(make_env("instruct", partial=0.5), renderer, "Three Large Words", task)
    assert half.score == 0.25
    cut = play(make_env("instruct"), renderer, "three small words and more", task, max_tokens=20)
    assert cut.score == 0.0
    assert isinstance(cut.reward, Scored)
    assert cut.reward.parts["cut"] == 1.0
    for payload, cause in (({}, "no_constraints"), ({"constraints": [{"kind": "no"}]}, "bad_constraints")):
        odd = play(make_env("instruct"), renderer, "x", Task("instruct", TASK.messages, payload))
        assert getattr(odd.reward, "cause", None) == cause


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("maht", {}, "did you mean 'math'"),
        ("nothing_like_it", {}, "known: "),
        ("math", {"worker": 3}, "did you mean 'workers'"),
        ("math", {"fallback": "guess"}, "not one of none, phrase, number"),
        ("math", {"workers": 0}, "workers >= 1"),
        ("callable", {}, "needs env_args \\['function'\\]"),
        ("instruct", {"partial": 1.5}, "below 1"),
        ("no.such.module:Env", {}, "importing 'no.such.module' failed"),
        ("no_such_file.py:Env", {}, "no such file"),
        (f"{MY_ENV}:Shuot", {}, "did you mean 'Shout'"),
        (f"{MY_ENV}:Incomplete", {}, "score"),
        (f"{MY_ENV}:digits", {}, "needs env_args"),
        ("collections:OrderedDict", {}, "no signature"),
        ("trivet.types:IssueKey", {"task_id": "a", "epoch": 1}, "no `async def rollout"),
    ],
)
def test_what_cannot_be_made(name: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        make_env(name, **args)


def scorer(action: Any, limit_s: float = 5.0) -> SingleTurn:
    class Scorer(SingleTurn):
        score_limit_s = limit_s

        async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
            value = action()
            return await value if asyncio.iscoroutine(value) else value

    return Scorer()


def fail() -> Reward:
    raise KeyError("answer")


def test_a_verifier_that_fails_leaves_the_rollout_unscored(renderer: Renderer) -> None:
    cases: list[tuple[SingleTurn, str, str]] = [
        (scorer(fail), "verifier_crashed", "KeyError: 'answer'"),
        (scorer(lambda: 1.0), "verifier_invalid", "returned float"),
        (scorer(lambda: None), "verifier_invalid", "returned NoneType"),
        (scorer(lambda: asyncio.sleep(60), 0.1), "verifier_timeout", "over 0.1 s"),
    ]
    for env, cause, words in cases:
        rollout = play(env, renderer, "x")
        assert isinstance(rollout.reward, Unscored)
        assert rollout.reward.cause == cause
        assert words in rollout.reward.detail
        assert rollout.sampled_tokens > 0
    until = time.time() + 60
    assert play(scorer(lambda: Pending(until)), renderer, "x").reward == Pending(until)


def test_engine_errors_propagate_and_settle(renderer: Renderer) -> None:
    engine = Says(renderer, EngineError("gone"))
    policy = Policy(engine, renderer, schema.Sampling(), context=256)  # type: ignore[arg-type]
    env = make_env("math")
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(env.rollout(TASK, policy, Attempt("r", IssueKey("sum", 1), "g", 0)))
    assert engine.events == ["settled"]


def test_a_rollout_cut_by_its_deadline_is_unscored(renderer: Renderer) -> None:
    engine = Says(renderer, "x")
    policy = Policy(engine, renderer, schema.Sampling(), context=256)  # type: ignore[arg-type]
    attempt = Attempt("r", IssueKey("sum", 1), "g", 0, deadline=time.monotonic() - 1)
    (rollout,) = asyncio.run(make_env("math").rollout(TASK, policy, attempt))
    assert rollout.termination is Termination.DEADLINE
    assert getattr(rollout.reward, "cause", None) == "deadline"


def test_verification_overlaps_with_generation(renderer: Renderer) -> None:
    """While one answer hangs in its verifier, others are generated and scored."""
    env = make_env("math", limit_s=2.0, workers=1)
    engine = Says(renderer, "\\boxed{(a+b+c+d)^{300}}")
    other = Says(renderer, "\\boxed{47}")

    async def run() -> tuple[float, Rollout, Rollout]:
        async with env:
            sampling = schema.Sampling(max_tokens=100)
            slow = Policy(engine, renderer, sampling, context=256)  # type: ignore[arg-type]
            fast = Policy(other, renderer, sampling, context=256)  # type: ignore[arg-type]
            algebra = Task("math", TASK.messages, {"answer": "x+1"})
            hanging = asyncio.ensure_future(
                env.rollout(algebra, slow, Attempt("r", IssueKey("sum", 1), "g", 0))
            )
            await asyncio.sleep(0.05)
            begin = time.monotonic()
            (quick,) = await env.rollout(TASK, fast, Attempt("r", IssueKey("sum", 1), "g", 1))
            seconds = time.monotonic() - begin
            assert not hanging.done()
            (late,) = await hanging
            return seconds, quick, late

    seconds, quick, late = asyncio.run(run())
    assert quick.score == 1.0
    assert seconds < 1.5
    assert getattr(late.reward, "cause", None) == "verifier_timeout"


def test_with_the_real_engine(tmp_path: Path) -> None:
    """A tiny random model plays sums: its trace holds what the engine reports, and seeds decide the text."""
    from trivet.engine.torch import TorchEngine
    from trivet.render import load_tokenizer

    folder = make_tiny(schema.TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32), tmp_path / "tiny")
    renderer = get_renderer(load_tokenizer(folder))
    tasks = load_tasks(schema.Tasks(source="generated:addition", args={"size": 4})).tasks
    engine = TorchEngine(folder, slots=4, context=64)
    policy = Policy(engine, renderer, schema.Sampling(max_tokens=8), context=64)  # type: ignore[arg-type]

    async def run() -> list[Rollout]:
        async with make_env("math") as env:
            attempts = [(t, Attempt("r", IssueKey(t.id, 1), t.id, i)) for t in tasks for i in range(2)]
            played = await asyncio.gather(*(env.rollout(t, policy, a) for t, a in attempts))
            return [rollout for (rollout,) in played]

    try:
        first, second = asyncio.run(run()), asyncio.run(run())
    finally:
        engine.close()
    assert all(isinstance(r.reward, Scored) for r in first)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.trace.column("id"), b.trace.column("id"))
        assert 1 <= a.sampled_tokens <= 8
        (row,) = a.trace.rows()
        assert a.messages[-1].role == "assistant"
        assert np.isfinite(row.logprob_T[row.sampled_T]).all()
    assert len({r.trace.column("id").tobytes() for r in first}) == len(first)
