"""Public problems: their own solutions score 1, and solutions with one token changed are judged as Python's
own asserts judge them."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import random
import subprocess
import sys
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trivet.rewards.code import CodeVerifier
from trivet.rewards.code.answer import last_block
from trivet.tasks.layouts import Made, recognise
from trivet.types import Reward, Scored

FILES = {
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "mbpp": "mbpp/mbpp.jsonl",
    "mbpp_plus": "mbpp_plus/MbppPlus.jsonl",
}
SIZES = {"humaneval": 164, "mbpp": 974, "mbpp_plus": 378}
# These define classes of their own, which the tests make and hand over.
WEAK = {"mbpp/367", "mbpp/601", "mbpp/927"}


def rows(shared_dir: Path, name: str) -> list[Made]:
    path = shared_dir / "data" / "code" / FILES[name]
    if not path.exists():
        pytest.skip(f"no {path}")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = [json.loads(line) for line in data.splitlines()]
    layout = recognise(found[0])
    assert layout is not None and layout.make is not None
    return [layout.make(row) for row in found]


def judged(programs: list[tuple[Made, str]], **limits: Any) -> list[Reward]:
    async def run() -> list[Reward]:
        async with CodeVerifier(**limits) as verifier:
            return await asyncio.gather(
                *(verifier.verify(answer, made.payload["tests"], made.id) for made, answer in programs)
            )

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_every_canonical_solution_scores_1(verifier: CodeVerifier, shared_dir: Path, name: str) -> None:
    made = rows(shared_dir, name)
    assert len(made) == SIZES[name]
    # Some of the references take seconds for their larger inputs.
    rewards = judged([(one, one.payload["response"]) for one in made], test_s=60.0, total_s=300.0)
    for one, reward in zip(made, rewards, strict=True):
        assert isinstance(reward, Scored) and reward.value == 1.0, (one.id, reward)
        assert ("weak" in reward.parts) == (one.id in WEAK), (one.id, reward)


# -- mutations -------------------------------------------------------------------------------------

_OTHER = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "/",
    "%": "//",
    "**": "*",
    "<": ">=",
    ">": "<=",
    "<=": ">",
    ">=": "<",
    "==": "!=",
    "!=": "==",
    "and": "or",
    "or": "and",
    "True": "False",
    "False": "True",
    "not": "",
    "break": "pass",
    "continue": "pass",
    "min": "max",
    "max": "min",
    "in": "not in",
}


def mutated(source: str, entry: str, random_: random.Random) -> str | None:
    """The source with one token from the function `entry` on changed, so that it still compiles; None where
    none can be. What stands before it may be helpers that the tests share."""
    before = source[: source.find(f"def {entry}") if entry in source else 0].count("\n")
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    places = [
        n
        for n, token in enumerate(tokens)
        if token.start[0] > before
        and (token.string in _OTHER or (token.type == tokenize.NUMBER and token.string.isdecimal()))
    ]
    random_.shuffle(places)
    for place in places:
        old = tokens[place]
        new = _OTHER[old.string] if old.string in _OTHER else str(int(old.string) + 1)
        lines = source.split("\n")
        row, column = old.start
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[old.end[1] :]
        try:
            compile("\n".join(lines), "mutant", "exec")
        except SyntaxError:
            continue
        return "\n".join(lines)
    return None


def passes_plainly(made: Made, program: str) -> bool:
    """What an interpreter says of program and asserts in one process."""
    tests = made.payload["tests"]
    parts = [tests.get("setup", ""), program] if "check" in tests else [program, tests.get("setup", "")]
    text = "\n".join([*parts, *tests.get("asserts", [])])
    if "check" in tests:
        text += f"\n{tests['check']}\ncheck({tests['entry_point']})\n"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-"], input=text.encode(), capture_output=True, timeout=6, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_mutants_are_judged_as_by_plain_asserts(verifier: CodeVerifier, shared_dir: Path, name: str) -> None:
    random_ = random.Random(5)
    pool = [one for one in rows(shared_dir, name) if one.id != "mbpp/123"]  # takes seconds as it stands
    mutants: list[tuple[Made, str]] = []
    for one in pool * 2 if name == "humaneval" else random_.sample(pool, 400):
        solution = last_block(one.payload["response"])
        assert solution is not None
        changed = mutated(solution, one.payload["tests"]["entry_point"], random_)
        if changed is not None:
            mutants.append((one, changed))
    assert len(mutants) >= 300
    with ThreadPoolExecutor(2) as threads:
        plain = list(threads.map(lambda pair: passes_plainly(*pair), mutants))
    answers = [(one, f"```python\n{source}\n```") for one, source in mutants]
    rewards = judged(answers, test_s=3.0, total_s=10.0)
    killable = [reward for reward, passed in zip(rewards, plain, strict=True) if not passed]
    survive = [reward for reward, passed in zip(rewards, plain, strict=True) if passed]
    killed = sum(isinstance(reward, Scored) and reward.value == 0.0 for reward in killable)
    kept = sum(isinstance(reward, Scored) and reward.value == 1.0 for reward in survive)
    print(f"{name}: {killed} of {len(killable)} killable mutants score 0, {kept} of {len(survive)} others 1")
    assert len(killable) >= 200
    assert killed >= 0.99 * len(killable)
    assert kept >= 0.99 * len(survive)
