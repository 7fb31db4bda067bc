"""The explorer against a real ledger and a real engine, with environments that fail in every way."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trivet.agents import Attempt, Policy
from trivet.buffer import Ledger, StageLedger
from trivet.engine.base import EngineError
from trivet.engine.torch import TorchEngine
from trivet.envs import SingleTurn
from trivet.explorer import Explorer, Filled, Game, TooManyUnscored
from trivet.recipe.schema import Explorer as Config
from trivet.recipe.schema import Sampling, TinyModel, Window
from trivet.render import Renderer, get_renderer, load_tokenizer
from trivet.render.tiny import make_tiny
from trivet.types import Group, Message, Reward, Rollout, Scored, Task, Termination, Unscored

TASKS = [Task("digits", (Message("user", f"{i}+{i}="),), id=f"t{i}") for i in range(6)]


class Digits(SingleTurn):
    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        return Scored(float(any(c.isdigit() for c in message.text)))


class Broken(Digits):
    """Raises for one task, after the policy has answered."""

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]:
        out = await super().rollout(task, policy, attempt)
        if task.id == "t1":
            raise RuntimeError("the world ended")
        return out


class Hanging(Digits):
    """Never comes back for one task."""

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]:
        if task.id == "t1":
            await asyncio.sleep(3600)
        return await super().rollout(task, policy, attempt)


class Flaky(Digits):
    """The engine is lost at the first try of every attempt (`always`: at all of them) of one task."""

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.seeds: set[int] = set()

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]:
        if task.id == "t1":
            self.seeds.add(attempt.seed("policy", 0))
            if self.always or attempt.retry == 0:
                raise EngineError("connection lost")
        return await super().rollout(task, policy, attempt)


class Ranks(SingleTurn):
    """Has no score for one answer: the first attempt of a group beats the second."""

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        return Unscored("not_scored")

    async def score_group(self, group: Group) -> None:
        if group.issue.task_id == "t1":
            raise RuntimeError("the judge is down")
        for rollout in group.rollouts:
            rollout.reward = Scored(1.0 - rollout.attempt)


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchEngine, Renderer]]:
    tiny = TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32, context=64)
    model = make_tiny(tiny, tmp_path_factory.mktemp("tiny") / "model")
    engine = TorchEngine(model, slots=8, context=32)
    yield engine, get_renderer(load_tokenizer(model))
    engine.close()


class Run:
    """One stage's explorer over six tasks, two rollouts each."""

    def __init__(self, player: tuple[TorchEngine, Renderer], env: SingleTurn, **config: Any) -> None:
        self.warnings: list[tuple[str, str]] = []
        self.ledger = Ledger(":memory:", owner="test")
        self.stage: StageLedger = self.ledger.stage("rl")
        self.stage.issue([task.id for task in TASKS], 1)
        policy = Policy(player[0], player[1], Sampling(max_tokens=4), context=32)
        self.explorer = Explorer(
            self.stage,
            {task.id: Game(task, env) for task in TASKS},
            policy,
            Config(**{"max_unscored": 1.0, **config}),
            run="test",
            group=2,
            deterministic=False,
            requeue=("failed", "surplus"),
            warn=lambda cause, text: self.warnings.append((cause, text)),
        )

    def fill(self, prompts: int = 6) -> Filled:
        return asyncio.run(self.explorer.fill(1, prompts, self.stage.claim))

    def counts(self) -> dict[str, int]:
        return {str(state): n for state, n in self.stage.counts().items() if n}


def test_groups_come_in_issue_order(player: tuple[TorchEngine, Renderer]) -> None:
    run = Run(player, Digits())
    filled = run.fill(4)
    assert not filled.exhausted
    assert [group.issue.task_id for group in filled.accepted] == ["t0", "t1", "t2", "t3"]
    assert all(len(group.rollouts) == 2 for group in filled.accepted)
    assert run.counts() == {"ready": 4, "issued": 2}
    assert run.fill(4).exhausted


def test_a_group_is_scored_as_a_whole(player: tuple[TorchEngine, Renderer]) -> None:
    groups = Run(player, Ranks()).fill().groups
    scores = {group.issue.task_id: [rollout.score for rollout in group.rollouts] for group in groups}
    assert scores == {f"t{i}": [1.0, 0.0] for i in range(6) if i != 1} | {"t1": [None, None]}
    lost = next(group for group in groups if group.issue.task_id == "t1")
    assert {getattr(one.reward, "cause", None) for one in lost.rollouts} == {"verifier_crashed"}


def test_an_environment_that_raises_costs_its_rollouts_only(player: tuple[TorchEngine, Renderer]) -> None:
    run = Run(player, Broken())
    filled = run.fill()
    assert run.counts() == {"ready": 5, "filtered": 1}
    ((lost, cause),) = filled.dropped
    assert cause == "unscored"
    assert {r.termination for r in lost.rollouts} == {Termination.ERROR}
    assert {r.reward for r in lost.rollouts} == {Unscored("environment", "RuntimeError: the world ended")}
    assert [cause for cause, _ in run.warnings] == ["environment", "environment"]
    assert "the world ended" in run.warnings[0][1]


def test_too_many_unscored_stops_the_run_with_the_cause(player: tuple[TorchEngine, Renderer]) -> None:
    run = Run(player, Broken(), max_unscored=0.1)
    with pytest.raises(TooManyUnscored, match=r"2 of 12 rollouts .*'environment': 2.* 10%.*the world ended"):
        run.fill()
    assert run.counts() == {"ready": 5, "filtered": 1}  # nothing is lost


def test_an_environment_that_hangs_is_given_up(
    player: tuple[TorchEngine, Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["trivet.explorer.play"], "GRACE_S", 0.1)
    run = Run(player, Hanging(), deadline_s=1.0)
    begin = time.monotonic()
    filled = run.fill()
    assert time.monotonic() - begin < 30
    assert filled.failed == 2  # it is issued once more
    assert "no result within" in run.warnings[0][1]
    assert run.counts() == {"ready": 5, "failed": 2}


def test_a_lost_engine_is_asked_again_with_another_seed(player: tuple[TorchEngine, Renderer]) -> None:
    env = Flaky()
    run = Run(player, env)
    filled = run.fill()
    assert run.counts() == {"ready": 6}
    assert filled.retried == 2
    assert len(env.seeds) == 4  # two attempts, two tries each
    assert all(r.score is not None for group in filled.accepted for r in group.rollouts)


def test_an_issue_that_cannot_be_played_fails_and_is_issued_once_more(
    player: tuple[TorchEngine, Renderer],
) -> None:
    env = Flaky(always=True)
    run = Run(player, env, retries=1)
    assert run.fill().failed == 2
    assert run.counts() == {"ready": 5, "failed": 2}  # not for ever
    assert len(env.seeds) == 8  # the second round samples anew


def test_a_window_refills_from_further_issues(player: tuple[TorchEngine, Renderer]) -> None:
    run = Run(player, Digits(), window=Window(above=2.0, upto=3.0, max_rounds=2))
    filled = run.fill(3)
    assert (len(filled.accepted), filled.rounds) == (0, 2)
    assert run.counts() == {"filtered": 6}
    assert run.warnings[-1][0] == "starved"
    assert "6 groups by mean reward" in run.warnings[-1][1]


def test_oversampling_drops_what_a_full_batch_does_not_need(player: tuple[TorchEngine, Renderer]) -> None:
    """Two groups are missing, 1.6 times as many, rounded up, are played: the last two in issue order are
    surplus and issued once more."""
    run = Run(player, Digits(), window=Window(above=-1.0, oversample=1.6))
    filled = run.fill(2)
    assert [group.issue.task_id for group in filled.accepted] == ["t0", "t1"]
    assert [(group.issue.task_id, cause) for group, cause in filled.dropped] == [
        ("t2", "surplus"),
        ("t3", "surplus"),
    ]
    assert run.counts() == {"ready": 2, "surplus": 2, "issued": 4}
    assert filled.metrics()["explorer/filtered/surplus"] == 2
    assert not run.warnings


def test_cancelling_gives_the_issues_back(player: tuple[TorchEngine, Renderer]) -> None:
    run = Run(player, Hanging(), deadline_s=600.0)

    async def main() -> None:
        job = asyncio.ensure_future(run.explorer.fill(1, 6, run.stage.claim))
        await asyncio.sleep(0.5)
        job.cancel()
        await asyncio.wait({job})
        assert job.cancelled()

    asyncio.run(main())
    assert run.counts() == {"issued": 6}
