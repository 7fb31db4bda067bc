"""Generators: answers are right, ids differ, train and test never meet, seeds decide."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.recipe import schema
from trivet.rewards.answers import last_boxed
from trivet.rewards.constraints import check, describe
from trivet.rewards.math import MathVerifier
from trivet.tasks import TasksetError, load_tasks
from trivet.tasks.generated import generator_names
from trivet.tasks.generated.constraints import draw
from trivet.tasks.generated.numbers import addition
from trivet.types import Scored, Task

PLAIN = [name for name in generator_names() if name not in ("constraints", "programs")]


def load(name: str, split: str = "train", **args: Any) -> list[Task]:
    return load_tasks(schema.Tasks(source=f"generated:{name}", split=split, args=args)).tasks


def prompt(task: Task) -> str:
    return task.messages[0].text


def solve(name: str, text: str) -> str:
    """An independent solution of a prompt, from its text alone."""
    match name:
        case "addition" | "arithmetic":
            bare = re.sub(r"\b0+(?=\d)", "", text.rstrip("="))
            value = eval(bare)
            assert value == int(value)
            return str(int(value))
        case "sorting":
            return " ".join(map(str, sorted(int(n) for n in text.removeprefix("sort: ").split())))
        case "reversal":
            return "".join(reversed(text.removeprefix("reverse: ")))
        case "counting":
            found = re.fullmatch(r"count (.) in (\w+)", text)
            assert found
            return str(sum(char == found.group(1) for char in found.group(2)))
        case "transforms":
            steps, _, word = text.rpartition(": ")
            for step in steps.split(", "):
                word = transform(step, word)
            return word
    raise AssertionError(name)


def transform(step: str, word: str) -> str:
    letters = list(word)
    match step:
        case "reverse":
            letters.reverse()
        case "upper":
            letters = [chr(ord(c) - 32) if "a" <= c <= "z" else c for c in letters]
        case "double":
            letters = [c for char in letters for c in (char, char)]
        case "drop first":
            letters = letters[1:]
        case "drop last":
            letters.pop()
        case "rotate":
            letters.append(letters.pop(0))
        case "no vowels":
            letters = [c for c in letters if c not in "aeiouAEIOU"]
        case "sort":
            letters.sort()
        case "next letter":
            letters = [{"z": "a", "Z": "A"}.get(c, chr(ord(c) + 1)) for c in letters]
        case _:
            raise AssertionError(step)
    return "".join(letters)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PLAIN), st.integers(0, 10**6), st.data())
def test_answers_are_right_and_ids_differ(name: str, seed: int, data: st.DataObject) -> None:
    args: dict[str, Any] = {"size": 30, "seed": seed}
    if name == "addition":
        args["digits"] = data.draw(st.integers(1, 6))
        args["size"] = 20
    else:
        args["difficulty"] = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    tasks = load(name, **args)
    assert len({task.id for task in tasks}) == len(tasks) == args["size"]
    for task in tasks:
        answer = task.payload["answer"]
        mine = solve(name, prompt(task))
        assert (int(answer) == int(mine)) if name == "addition" else (answer == mine), prompt(task)
        assert last_boxed(task.payload["response"]) == answer
        assert set(prompt(task) + task.payload["response"]) <= set(schema.TinyModel().alphabet)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(PLAIN), st.integers(0, 1000), st.integers(0, 1000))
def test_splits_are_disjoint_whatever_the_seeds(name: str, first: int, second: int) -> None:
    args = {"digits": 1} if name == "addition" else {"difficulty": 1, "size": 60}
    small = {**args, "size": 5}
    train, test = load(name, "train", **args, seed=first), load(name, "test", **small, seed=second)
    assert not {prompt(t) for t in train} & {prompt(t) for t in test}


def test_seeds_and_order() -> None:
    def ids(seed: int, **more: Any) -> list[str]:
        config = schema.Tasks(source="generated:arithmetic", args={"size": 50, "seed": seed}, **more)
        return [task.id for task in load_tasks(config, seed=3).tasks]

    assert ids(0) == ids(0)
    assert ids(0) != ids(1)
    assert ids(0, shuffle=False) != ids(0)
    assert sorted(ids(0, shuffle=False)) == sorted(ids(0))
    assert ids(0, shuffle=False, limit=10) == ids(0, shuffle=False)[:10]
    assert ids(0, shuffle=False, skip=10, limit=10) == ids(0, shuffle=False)[10:20]


def test_two_digit_addition_is_whole() -> None:
    train, test = load("addition"), load("addition", "test")
    assert 8_900 < len(train) < 9_100  # nine tenths of all 10,000 sums
    assert len(test) == 1_000  # the default size of a test split
    assert all(re.fullmatch(r"\d\d\+\d\d=", prompt(task)) for task in train)
    assert all(re.fullmatch(r"\d{3}", task.payload["answer"]) for task in train)


@pytest.mark.parametrize(
    ("args", "asked", "response"),
    [
        ({}, "07+35=", r"\boxed{042}"),
        ({"form": "plain"}, "07+35=", "042"),
        ({"form": "worked"}, "07+35=", r"7+5=12 0+3+1=4 \boxed{042}"),
        ({"reverse": True, "form": "plain"}, "07+35=", "240"),
        ({"padded": False}, "7+35=", r"\boxed{42}"),
    ],
)
def test_forms_of_addition(args: dict[str, Any], asked: str, response: str) -> None:
    items = {item.key: item for item in addition(random.Random(0), **args)}
    assert len(items) == 10_000
    assert (items["2/7+35"].prompt, items["2/7+35"].response) == (asked, response)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("form", ["boxed", "plain", "worked"])
def test_responses_score_one_without_algebra(name: str, form: str) -> None:
    async def scores() -> list[float]:
        async with MathVerifier(fallback="number") as verifier:
            out = []
            for task in load(name, size=20, form=form):
                exact = task.payload.get("match") == "exact"
                text = task.payload["response"]
                if form == "plain" and exact:
                    text = f"\\boxed{{{text}}}"  # words cannot be told from text without a box
                reward = await verifier.verify(text, task.payload["answer"], exact=exact)
                assert isinstance(reward, Scored)
                out.append(reward.value)
            assert verifier.pool.alive() == []
            return out

    assert asyncio.run(scores()) == [1.0] * 20


def test_difficulty_is_tagged_and_grows() -> None:
    lengths = []
    for grade in range(1, 6):
        tasks = load("sorting", size=50, difficulty=grade)
        assert all(f"difficulty:{grade}" in task.tags for task in tasks)
        lengths.append(sum(len(prompt(task)) for task in tasks))
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("generated:additoin", {}, "did you mean 'addition'"),
        ("generated:addition", {"args": {"digit": 2}}, "did you mean 'digits'"),
        ("generated:addition", {"args": {"digits": 0}}, "from 1 to 12"),
        ("generated:addition", {"args": {"digits": "two"}}, "from 1 to 12"),
        ("generated:addition", {"args": {"form": "long"}}, "boxed, plain, worked"),
        ("generated:addition", {"args": {"size": 0}}, "whole number of at least 1"),
        ("generated:addition", {"args": {"digits": 1, "size": 1000}}, "only .. different items"),
        ("generated:addition", {"split": "tset"}, "did you mean 'test'"),
        ("generated:addition", {"args": {"test_share": 1.0}}, "between 0 and 1"),
        ("generated:addition", {"fields": {"prompt": "x"}}, "takes args"),
        ("generated:addition", {"args": {"digits": 1}, "skip": 1000}, "no task is left"),
        ("generated:sorting", {"args": {"difficulty": 9}}, "grades from 1 to 5"),
        ("generated:sorting", {"args": {"difficulty": []}}, "grades from 1 to 5"),
        ("generated:constraints", {}, "needs args.questions"),
        ("generated:constraints", {"args": {"questions": "/no/such.jsonl"}}, "no such file"),
    ],
)
def test_wrong_arguments(source: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TasksetError, match=words):
        load_tasks(schema.Tasks(source=source, **options))


# -- constraints ---------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is thing number {i}?"}) for i in range(200)))
    return str(path)


def test_constraints_pair_questions_with_checkable_instructions(questions: str) -> None:
    tasks = load("constraints", questions=questions, difficulty=[2], per_question=2)
    test = load("constraints", "test", questions=questions, difficulty=[2], per_question=2)
    assert len(tasks) + len(test) == 400

    def asked(tasks: list[Task]) -> set[str]:
        return {prompt(task).split("\n\n")[0] for task in tasks}

    assert not asked(tasks) & asked(test)
    for task in tasks:
        chosen = task.payload["constraints"]
        assert len(chosen) == 2
        assert len({c["kind"] for c in chosen}) == 2
        assert all(describe(constraint) in prompt(task) for constraint in chosen)
        assert "answer" not in task.payload
    assert len({json.dumps(t.payload) for t in tasks}) > 100


def comply(constraints: list[dict[str, Any]]) -> str:
    """An answer that keeps to all of the constraints, written from them alone."""
    by_kind = {c["kind"]: c for c in constraints}
    words = list(by_kind.get("required_words", {}).get("words", []))
    sentences = by_kind.get("sentence_count", {})
    count = sentences.get("at_least", sentences.get("at_most", 1)) if sentences else 1
    low = by_kind.get("word_count", {}).get("at_least", 0)
    start = by_kind.get("starts_with", {}).get("phrase", "")
    end = by_kind.get("ends_with", {}).get("phrase", "")
    body = ["zebra", *words, *(["9"] if "contains_number" in by_kind else [])]
    body += ["zebra"] * max(0, low - len(body) - len(start.split()) - len(end.split()))
    if "bullet_count" in by_kind:
        bullets = by_kind["bullet_count"]["count"]
        text = "\n".join("- " + " ".join(body[i::bullets] or ["zebra"]) for i in range(bullets))
        if sentences:
            text = "\n".join(["zebra."] * (count - 1) + ["- " + " ".join(body)] + ["- zebra"] * (bullets - 1))
    else:
        pieces = [start, *(["zebra."] * max(0, count - 1 - bool(end))), " ".join(body), end]
        text = " ".join(piece for piece in pieces if piece)
        if end and count > 1:
            text = text.replace(" ".join(body) + " " + end, " ".join(body) + ". " + end)
    if "quotation" in by_kind:
        text = f'"{text}"'
    if "upper_case" in by_kind:
        text = text.upper()
    return text.lower() if "lower_case" in by_kind else text


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 6))
def test_no_set_of_constraints_contradicts_itself(seed: int, count: int) -> None:
    chosen = draw(random.Random(seed), count)
    text = comply(chosen)
    assert [c for c in chosen if not check(c, text)] == [], text


def test_questions_without_text(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"other": "x"}\n')
    with pytest.raises(TasksetError, match=r"args.field \(columns: other\)"):
        load("constraints", questions=str(path))
    path.write_text('{"question": "x"}\n{"question": 3}\n')
    with pytest.raises(TasksetError, match=r"q.jsonl:2: column 'question' holds no text"):
        load("constraints", questions=str(path))
