"""One-line programs: the worked answer passes its own tests, and a wrong operator does not."""

from __future__ import annotations

import asyncio
import re

import pytest

from trivet.recipe.schema import Tasks
from trivet.sandbox import report
from trivet.tasks import TasksetError, load_tasks
from trivet.types import Scored


def test_the_worked_answer_prints_what_is_wanted() -> None:
    tasks = load_tasks(Tasks(source="generated:programs", env="code", args={"size": 60}), seed=0).tasks
    for task in tasks:
        word, a, b = task.messages[0].text.split()
        value = {"sum": int(a) + int(b), "difference": int(a) - int(b), "product": int(a) * int(b)}[word]
        assert task.payload["tests"]["cases"] == [{"input": "", "output": f"{value}\n"}]
        assert task.tags == (word,)
    assert {task.tags[0] for task in tasks} == {"sum", "difference", "product"}
    with pytest.raises(TasksetError, match="whole number from 1 to 6"):
        load_tasks(Tasks(source="generated:programs", args={"digits": 0}), seed=0)


def test_programs_are_run() -> None:
    if not {name: holds for name, holds, _ in report()}["bubblewrap"]:
        pytest.skip("no bubblewrap here")
    from trivet.rewards.code import CodeVerifier

    tasks = load_tasks(Tasks(source="generated:programs", env="code", args={"size": 8}), seed=0).tasks

    async def judge() -> list[float]:
        verifier = CodeVerifier(workers=1)
        try:
            out = []
            for task in tasks:
                right = str(task.payload["response"])
                wrong = re.sub(r"[+*-](?=\d)", "//", right)
                for text in (right, wrong):
                    reward = await verifier.verify(text, task.payload["tests"], task.id)
                    assert isinstance(reward, Scored), reward
                    out.append(reward.value)
            return out
        finally:
            await verifier.close()

    values = asyncio.run(judge())
    assert values[::2] == [1.0] * 8
    assert sum(values[1::2]) <= 1  # a quotient may meet the value by chance
