"""The environments of questions with a short answer, puzzles, instructions and chat."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards import judge_server as srv

from trivet.envs import EnvError, SingleTurn, judge_group, make_env
from trivet.envs.chat import Chat
from trivet.envs.puzzle import final_answer
from trivet.recipe import schema
from trivet.rewards.chat_api import ChatReply
from trivet.rewards.judge import Judge
from trivet.rewards.ranking import order_of, rank, rank_rewards
from trivet.tasks import TasksetError, load_tasks
from trivet.types import (
    Group,
    IssueKey,
    Message,
    Reward,
    Scored,
    Task,
    Termination,
    Unscored,
)

ASKED = (Message("user", "the opposite of hot?"),)


def score(
    env: str | SingleTurn, text: str, payload: dict[str, Any], ended: Any = Termination.FINISHED, **args: Any
) -> Reward:
    async def run() -> Reward:
        made = make_env(env, **args) if isinstance(env, str) else env
        assert isinstance(made, SingleTurn)
        async with made:
            task = Task("x", ASKED, payload)
            return (await made.verdict(task, Message("assistant", text), ended)).reward

    return asyncio.run(run())


def cause(reward: Reward) -> str:
    assert isinstance(reward, Unscored), reward
    return reward.cause


# -- qa --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "payload", "args", "value"),
    [
        ("The Cold!", {"answer": "cold"}, {}, 1.0),
        ("Cold", {"answer": "cold"}, {"match": "exact"}, 0.0),
        ("so: \\boxed{cold}", {"answer": ["icy", "cold"]}, {"read": "box"}, 1.0),
        ("coldd", {"answer": "cold"}, {"match": "fuzzy", "threshold": 0.8}, 1.0),
        ("about 3.1", {"answer": 3}, {"match": "number", "relative": 0.05}, 1.0),
        ("about 3.2", {"answer": 3}, {"match": "number", "relative": 0.05}, 0.0),
        ("(B)", {"answer": "B", "choices": ["hot", "cold"], "match": "choice"}, {}, 1.0),
        ("cold", {"answer": "B", "choices": ["hot", "cold"], "match": "choice"}, {}, 1.0),
        ("Answer: A", {"answer": "B", "choices": ["hot", "cold"], "match": "choice"}, {}, 0.0),
    ],
)
def test_qa(text: str, payload: dict[str, Any], args: dict[str, Any], value: float) -> None:
    reward = score("qa", text, payload, **args)
    assert isinstance(reward, Scored) and reward.value == value


def test_qa_reports_format_and_refuses_nonsense() -> None:
    reward = score("qa", "\\boxed{cold}", {"answer": "cold"}, read="box", format=["box", "think"])
    assert isinstance(reward, Scored)
    assert (reward.parts["format/box"], reward.parts["format/think"]) == (1.0, 1.0)
    assert cause(score("qa", "x", {})) == "no_gold"
    assert cause(score("qa", "x", {"answer": "y", "match": "by feel"})) == "bad_match"
    assert cause(score("qa", "x", {"answer": "y", "match": ["exact"]})) == "bad_match"
    assert cause(score("qa", "x", {"answer": "A", "match": "choice", "choices": 3})) == "bad_choices"
    for args in ({"match": "no"}, {"read": "no"}, {"threshold": 2.0}, {"format": ["no"]}):
        with pytest.raises(EnvError, match="refuses its arguments"):
            make_env("qa", **args)


# -- instruct --------------------------------------------------------------------------------------


def test_instructions_of_ifeval() -> None:
    payload = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert score("instruct", "no commas", payload) == Scored(1.0, {"punctuation:no_comma": 1.0, "held": 1.0})
    assert getattr(score("instruct", "one, two", payload), "value", None) == 0.0
    both = {**payload, "constraints": [{"kind": "lower_case"}]}
    assert getattr(score("instruct", "No commas", both, partial=0.5), "value", None) == 0.25
    cut = score("instruct", "no commas", payload, ended=Termination.LENGTH)
    assert isinstance(cut, Scored) and (cut.value, cut.parts["cut"]) == (0.0, 1.0)
    repeat = {
        "instruction_id_list": ["combination:repeat_prompt"],
        "kwargs": [{"prompt_to_repeat": ASKED[0].text}],
    }
    assert getattr(score("instruct", f"{ASKED[0].text} Cold.", repeat), "value", None) == 1.0
    assert (
        cause(score("instruct", "x", {"instruction_id_list": ["no:such"], "kwargs": [{}]}))
        == "bad_constraints"
    )
    loose = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    text = 'Sure:\n"cold"'
    assert getattr(score("instruct", text, loose), "value", None) == 0.0
    assert getattr(score("instruct", text, loose, mode="loose"), "value", None) == 1.0
    with pytest.raises(EnvError, match="mode"):
        make_env("instruct", mode="lax")


# -- puzzle ----------------------------------------------------------------------------------------


def test_where_an_answer_stands() -> None:
    assert final_answer("<answer>1</answer> then <answer> 2 </answer>", "auto") == "2"
    assert final_answer("<answer>1 <answer>2</answer>", "tag") == "2"
    assert final_answer("\\boxed{3}", "auto") == "3"
    assert final_answer(" four ", "auto") == "four"
    assert final_answer("four", "tag") is None and final_answer("four", "box") is None
    assert final_answer(" ", "auto") is None


@given(st.text(alphabet="<>/answer\\boxed{} 12", max_size=200))
def test_reading_an_answer_ends(text: str) -> None:
    found = final_answer(text, "auto")
    assert found is None or len(found) <= len(text)


def test_puzzles_of_the_library() -> None:
    pytest.importorskip("reasoning_gym")
    train, test = (
        load_tasks(
            schema.Tasks(
                source="reasoning_gym:chain_sum", split=split, env="puzzle", args={"size": 30, "seed": seed}
            )
        )
        for split, seed in (("train", 0), ("test", 5))
    )
    assert (train.layout, train.layout_env, len(train), len(test)) == ("reasoning_gym", "puzzle", 30, 30)
    assert not {task.messages for task in train.tasks} & {task.messages for task in test.tasks}
    again = load_tasks(schema.Tasks(source="reasoning_gym:chain_sum", env="puzzle", args={"size": 30}))
    assert again.fingerprint == train.fingerprint

    async def run() -> list[Reward]:
        env = make_env("puzzle")
        assert isinstance(env, SingleTurn)
        out = []
        async with env:
            task = train.tasks[0]
            answer = task.payload["answer"]
            for text in (f"<answer>{answer}</answer>", "<answer>0.5</answer>", "", "x" * 200_000):
                out.append((await env.verdict(task, Message("assistant", text))).reward)
            odd = {**task.payload["puzzle"], "question": "other"}
            for puzzle in (odd, {**odd, "name": "nothing"}, {"kind": "riddle"}, None):
                asked = Task("puzzle", task.messages, {"puzzle": puzzle})
                out.append((await env.verdict(asked, Message("assistant", answer))).reward)
        return out

    right, wrong, empty, long, *odd = asyncio.run(run())
    assert right == Scored(1.0, {"answered": 1.0})
    assert isinstance(wrong, Scored) and wrong.value < 1
    assert empty == Scored(0.0, {"answered": 0.0})
    assert long == Scored(0.0, {"answered": 1.0, "too_long": 1.0})
    assert [cause(one) for one in odd] == ["puzzle_changed", "verifier_raised", "no_puzzle", "no_puzzle"]
    task = train.tasks[0]
    strict = score("puzzle", task.payload["answer"], task.payload, threshold=1.0)
    assert strict == Scored(1.0, {"answered": 1.0, "value": 1.0})


def test_tasksets_of_the_library_are_checked() -> None:
    pytest.importorskip("reasoning_gym")
    for source, options, said in (
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"args": {"colour": 3}}, "refuses 'chain_sum'"),
        ("chain_sum", {"args": {"size": 0}}, "whole number"),
        ("chain_sum", {"split": "dev"}, "train and test"),
        (
            "chain_sum",
            {"args": {"size": 900, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
            "different puzzles",
        ),
    ):
        with pytest.raises(TasksetError, match=said):
            load_tasks(schema.Tasks(source=f"reasoning_gym:{source}", **options))


# -- chat ------------------------------------------------------------------------------------------


async def longest(messages: Any, *, seed: int) -> ChatReply:
    """A judge that likes long answers, whatever their place in the list."""
    text = messages[0]["content"]
    found = re.findall(r"Answer (\d+):\nBEGIN \w+\n(.*?)\nEND ", text, re.DOTALL)
    order = [int(number) for number, _ in sorted(found, key=lambda one: -len(one[1]))]
    return ChatReply(f"I looked. {json.dumps({'ranking': order})}", 10, 5)


def members(*texts: str) -> Group:
    task = Task("chat", ASKED)
    rollouts = []

    async def run() -> None:
        env = Chat("ranking", judge=Judge(longest))
        for text in texts:
            rollouts.append(await env.verdict(task, Message("assistant", text)))

    asyncio.run(run())
    return Group("g", IssueKey(task.id, 0), rollouts)


def ranked(group: Group, judge: Judge) -> list[Reward]:
    asyncio.run(judge_group(Chat("ranking", judge=judge), group))
    return [rollout.reward for rollout in group.rollouts]


def test_a_group_is_ranked_as_a_whole() -> None:
    judge = Judge(longest, votes=3)
    found = ranked(members("cold", "cold and icy", "c", "cold"), judge)
    assert [getattr(one, "value", None) for one in found] == [0.5, 1.0, 0.0, 0.5]
    assert isinstance(found[0], Scored) and found[0].parts == {"votes": 3.0, "spread": 0.0}
    assert (judge.counters.asked, judge.counters.prompt_tokens) == (3, 30)
    assert ranked(members("same", "same"), judge) == [Scored(0.5, {"votes": 0.0, "spread": 0.0})] * 2
    (alone,) = ranked(members("cold"), judge)
    assert cause(alone) == "nothing_to_rank"


def test_a_ranking_that_fails_is_no_zero() -> None:
    async def nonsense(messages: Any, *, seed: int) -> str:
        return 'the best is {"ranking": [1, 1]}'

    async def down(messages: Any, *, seed: int) -> str:
        raise OSError("no route")

    async def slow(messages: Any, *, seed: int) -> str:
        await asyncio.sleep(60)
        return ""

    for generate, why in (
        (nonsense, "judge_unreadable"),
        (down, "judge_unavailable"),
        (slow, "judge_timeout"),
    ):
        found = ranked(members("a", "bb"), Judge(generate, deadline_s=0.3))
        assert [cause(one) for one in found] == [why, why]


def test_rankings_are_read_strictly() -> None:
    assert order_of([2, 1, 3], 3) == [1, 0, 2]
    for odd in ([1, 2], [1, 1, 2], [0, 1, 2], ["1", 2, 3], [True, 2, 3], "123", None):
        assert order_of(odd, 3) is None
    assert rank_rewards([[0, 1, 2], [2, 1, 0]], 3) == [0.5, 0.5, 0.5]


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=2, max_size=8), st.integers(1, 3))
def test_no_place_in_the_list_is_an_advantage(texts: list[str], votes: int) -> None:
    rewards = asyncio.run(rank(Judge(longest, votes=votes), ASKED, texts))
    for one, text in zip(rewards, texts, strict=True):
        assert isinstance(one, Scored) and 0 <= one.value <= 1
        longer = [
            r.value
            for r, t in zip(rewards, texts, strict=True)
            if len(t) > len(text) and isinstance(r, Scored)
        ]
        assert all(value > one.value for value in longer)


def test_a_group_whose_scoring_raises_is_unscored() -> None:
    class Broken:
        async def score_group(self, group: Group) -> None:
            raise RuntimeError("no")

    class Wrong:
        async def score_group(self, group: Group) -> None:
            group.rollouts[0].reward = 1.0  # type: ignore[assignment]

    class Slow:
        async def score_group(self, group: Group) -> None:
            await asyncio.sleep(60)

    group = members("a", "b")
    asyncio.run(judge_group(Wrong(), group))  # type: ignore[arg-type]
    assert [cause(r.reward) for r in group.rollouts] == ["verifier_invalid", "not_scored"]
    asyncio.run(judge_group(Slow(), group, 0.05))  # type: ignore[arg-type]
    assert {cause(r.reward) for r in group.rollouts} == {"verifier_timeout"}
    asyncio.run(judge_group(Broken(), group))  # type: ignore[arg-type]
    assert {cause(r.reward) for r in group.rollouts} == {"verifier_crashed"}


def test_a_judge_behind_an_api() -> None:
    with srv.serving(srv.always(200, srv.verdict("yes"))) as server:
        url = server.url
        settings = {"base_url": url, "model": "m", "key_env": "", "question": "Is it right?"}
        reward = score("chat", "cold", {"reference": "cold it is"}, judge=settings)
        assert isinstance(reward, Scored) and reward.value == 1.0
        asked = server.requests[0]["messages"][0]["content"]
        assert "Is it right?" in asked and "cold it is" in asked and ASKED[0].text in asked
    with srv.serving(srv.always(200, srv.verdict(7))) as server:
        url = server.url
        reward = score(
            "chat", "cold", {}, judge={"base_url": url, "model": "m", "key_env": "", "scale": [1, 10]}
        )
        assert isinstance(reward, Scored) and reward.value == pytest.approx(2 / 3)


def test_a_rubric() -> None:
    rubric = [{"name": "short", "check": {"kind": "word_count", "at_most": 2}}]
    assert score("chat", "cold", {}, by="rubric", rubric=rubric) == Scored(1.0, {"short": 1.0, "held": 1.0})
    own = {"rubric": [{"name": "no_digits", "check": {"kind": "no_digits"}}]}
    assert getattr(score("chat", "c0ld", own, by="rubric"), "value", None) == 0.0
    assert cause(score("chat", "cold", {}, by="rubric")) == "no_rubric"
    assert cause(score("chat", "cold", {"rubric": [{}]}, by="rubric")) == "bad_rubric"


def test_a_reward_model_and_the_length_penalty(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    from trivet.render.tiny import make_tiny

    model = make_tiny(schema.TinyModel(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32), tmp_path / "rm")
    file = model / "model.safetensors"
    weights = load_file(file)
    for sign in (1.0, -1.0):
        weights["score.weight"] = sign * torch.ones(1, 16)
        save_file(weights, file, {"format": "pt"})
        raw = score("chat", "cold" * 9, {}, by="reward_model", model=str(model))
        less = score("chat", "cold" * 9, {}, by="reward_model", model=str(model), length_penalty=1.0)
        assert isinstance(raw, Scored) and isinstance(less, Scored)
        taken = min(36 / 1000, raw.value) if raw.value > 0 else 0.0
        assert less.value == pytest.approx(raw.value - taken)
        assert less.parts["raw"] == pytest.approx(raw.value)


def test_chat_refuses_what_makes_no_sense() -> None:
    api = {"base_url": "http://localhost:1/v1", "model": "m"}
    for args, said in (
        ({}, "needs a judge"),
        ({"by": "vote"}, "is not one of"),
        ({"by": "reward_model"}, "belong together"),
        ({"judge": api, "length_penalty": 1.0}, "length_penalty"),
        ({"judge": {"model": "m"}}, "base_url"),
        ({"judge": {**api, "colour": 1}}, "unknown"),
        ({"judge": {**api, "labels": {"yes": 1}}}, "two different words"),
        ({"judge": {**api, "labels": {"a": 1, "b": 0}, "scale": [1, 2]}}, "not both"),
        ({"by": "rubric", "rubric": [{"name": "x", "judge": "Good?"}]}, "asks a judge"),
        ({"by": "rubric", "rubric": []}, "rubric"),
    ):
        with pytest.raises(EnvError, match=said):
            make_env("chat", **args)


def test_what_the_judge_cost_can_be_read() -> None:
    env = Chat("ranking", judge=Judge(longest, prices=(1e6, 0.0)))
    group = members(*[str(random.Random(n).random()) for n in range(3)], "longest of all the answers here")
    asyncio.run(judge_group(env, group))
    assert env.counters()["cost"] == 10.0 and env.counters()["asked"] == 1.0
    assert Chat("rubric").counters() == {}


def test_rollouts_cut_by_the_deadline_are_not_ranked() -> None:
    group = members("a", "bb")
    env = Chat("ranking", judge=Judge(longest))
    late = asyncio.run(env.verdict(group.task, Message("assistant", "ccc"), Termination.DEADLINE))
    group.rollouts.append(late)
    found = ranked(group, Judge(longest))
    assert [getattr(one, "value", None) for one in found] == [0.0, 1.0, None]
    assert cause(found[2]) == "deadline"
