"""A reward model's directory as a verifier: its scores, in batches, and how they may fail."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet.envs import EnvError, SingleTurn, make_env
from trivet.recipe.schema import TinyModel
from trivet.recipe.schema import Trainer as Config
from trivet.render.tiny import make_tiny
from trivet.rewards.reward_model import RewardModel, RewardModelError, Scorer
from trivet.trainer.scalar import RewardTrainer
from trivet.types import Message, Reward, Scored, Task, Unscored

TINY = TinyModel(hidden=16, layers=2, heads=2, kv_heads=1, mlp=32, context=64)
ASK = (Message("user", "2+3="),)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    start = make_tiny(TINY, folder / "tiny")
    trainer = RewardTrainer(str(start), Config(), device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        trainer.model.module.score.weight.normal_()
    return trainer.export(folder / "rm")


def ask(model: RewardModel, *answers: str) -> list[Reward]:
    async def all_of() -> list[Reward]:
        return await asyncio.gather(*(model.score(ASK, Message("assistant", text)) for text in answers))

    return asyncio.run(all_of())


def values(rewards: list[Reward]) -> list[float]:
    assert all(isinstance(reward, Scored) for reward in rewards), rewards
    return [reward.value for reward in rewards if isinstance(reward, Scored)]


def test_scores_are_the_classifiers_at_the_answers_end(directory: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from trivet.render import get_renderer, load_tokenizer

    plain = AutoModelForSequenceClassification.from_pretrained(directory)
    renderer = get_renderer(load_tokenizer(directory))
    expected = []
    for text in ("5", "abc def", ""):
        rendered = renderer.render([*ASK, Message("assistant", text)])
        stop = int(np.flatnonzero(rendered.mask_T())[-1]) + 1
        assert rendered.ids_T[stop - 1] in renderer.stop_ids
        ids = torch.from_numpy(rendered.ids_T[None, :stop].astype(np.int64))
        states = plain.model(input_ids=ids).last_hidden_state
        expected.append(plain.score(states)[0, -1, 0].item())
    model = RewardModel(directory)
    assert values(ask(model, "5", "abc def", "")) == pytest.approx(expected, abs=1e-4)
    model.close()


def test_a_score_does_not_depend_on_what_else_is_scored(directory: Path) -> None:
    alone, crowd = RewardModel(directory, batch=4), RewardModel(directory, batch=4)
    texts = ["1", "22", "333", "4", "55", "abcdefghijklmnopqrstuvwxyz", "6", "7"]
    one_by_one = [values(ask(alone, text))[0] for text in texts]
    assert values(ask(crowd, *texts[::-1]))[::-1] == one_by_one  # to the bit


def test_what_is_too_long_or_cannot_be_rendered_is_unscored(directory: Path) -> None:
    model = RewardModel(directory)
    good, long = ask(model, "5", "9" * 100)
    assert isinstance(good, Scored)
    assert isinstance(long, Unscored)
    assert long.cause == "verifier_invalid"
    assert "64 positions" in long.detail
    bad = asyncio.run(model.score(ASK, Message("user", "not an answer")))
    assert isinstance(bad, Unscored)
    assert "no answer to be scored" in bad.detail


def test_a_score_that_is_no_number_is_unscored(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scorer, "__call__", lambda self, rows: [float("nan")] * len(rows))
    [reward] = ask(RewardModel(directory), "5")
    assert isinstance(reward, Unscored)
    assert (reward.cause, reward.detail) == ("verifier_invalid", "rm gave nan")


def test_a_batch_that_fails_does_not_end_the_thread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RewardModel(directory)
    right = Scorer.__call__

    def wrong(self: Scorer, rows: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Scorer, "__call__", wrong)
    first = ask(model, "5", "abcdefghijklmnopqrstuvwxyz")
    assert [(r.cause, r.detail) for r in first if isinstance(r, Unscored)] == [
        ("verifier_raised", "RuntimeError: out of memory")
    ] * 2
    monkeypatch.setattr(Scorer, "__call__", right)
    assert isinstance(ask(model, "5")[0], Scored)


def test_a_model_that_hangs_leaves_answers_unscored(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def hang(self: Scorer, rows: Any) -> Any:
        stuck.wait(30)
        return [0.0] * len(rows)

    monkeypatch.setattr(Scorer, "__call__", hang)
    model = RewardModel(directory, limit_s=0.2)
    try:
        rewards = ask(model, "5", "6")
    finally:
        stuck.set()
    assert [r.cause for r in rewards if isinstance(r, Unscored)] == ["verifier_timeout"] * 2


def test_the_queue_before_a_batch_does_not_count(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes half the limit, the last one waits for six of them."""
    import time

    def slow(self: Scorer, rows: Any) -> Any:
        time.sleep(0.25)
        return [1.0] * len(rows)

    monkeypatch.setattr(Scorer, "__call__", slow)
    model = RewardModel(directory, limit_s=0.5, batch=1)
    asyncio.run(model.load())
    assert values(ask(model, *"1234567")) == [1.0] * 7


def test_a_directory_that_is_no_reward_model(directory: Path, tmp_path: Path) -> None:
    policy = make_tiny(TINY, tmp_path / "policy")
    with pytest.raises(RewardModelError, match=r"is no reward model: its safetensors have no score\.weight"):
        Scorer(policy)
    [reward] = ask(RewardModel(tmp_path / "nowhere"), "5")
    assert isinstance(reward, Unscored)
    assert "has no config.json" in reward.detail

    async def opened() -> None:
        async with make_env("reward_model", model=str(policy)):
            pass

    with pytest.raises(EnvError, match=r"environment 'reward_model': .* is no reward model"):
        asyncio.run(opened())


def test_a_classifier_of_others_is_read_at_its_last_token(directory: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(directory, other)
    (other / "reward_model.json").unlink()
    here, there = Scorer(directory), Scorer(other)
    conversation = [*ASK, Message("assistant", "5")]
    whole = there.ids_of(conversation)
    ends = here.ids_of(conversation)
    assert whole[: len(ends)].tolist() == ends.tolist()
    assert whole.tolist() == there.renderer.render(conversation).ids_T.tolist()
    assert (
        json.loads((directory / "reward_model.json").read_text())["class"] == "Qwen3ForSequenceClassification"
    )


def test_the_environment_scores_the_answer_in_its_conversation(directory: Path) -> None:
    task, answer = Task("reward_model", ASK), Message("assistant", "5")

    async def play() -> Reward:
        async with make_env("reward_model", model=str(directory), batch=2) as env:
            assert isinstance(env, SingleTurn)
            return await env.score(task, answer, None)  # type: ignore[arg-type]

    assert [asyncio.run(play())] == ask(RewardModel(directory, batch=2), "5")


@pytest.mark.parametrize("args", [{"batch": 0}, {"limit_s": 0.0}, {"dtype": "int8"}, {"modl": "x"}])
def test_arguments_are_checked(args: dict[str, Any]) -> None:
    with pytest.raises(EnvError):
        make_env("reward_model", **{"model": "x", **args})
