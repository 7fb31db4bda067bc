"""Reward functions of all sorts, run in workers."""

from __future__ import annotations

import os
import time
from typing import Any

from trivet.types import Scored, Task, Unscored


def positional(a: Any, b: Any) -> float:
    return float(isinstance(a, Task) and b == "yes")


def by_name(text: str, answer: str) -> bool:
    return text == answer


def only_text(completion: str) -> int:
    return len(completion)


def everything(
    *, task: Task, text: str, payload: dict, prompt: str, bonus: float = 0.25, **rest: Any
) -> float:
    assert payload is not None
    assert rest["answer"] == task.payload["answer"]
    return bonus + float(text in prompt)


async def coroutine(task: Task, text: str) -> float:
    return 0.5


def needs(tolerance: float, text: str, other: str) -> float:
    return tolerance


def returns(task: Task, text: str) -> Any:
    import numpy as np

    return {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "string": "0.5",
        "list": [1.0],
        "bool": True,
        "int": 3,
        "huge": 10**400,
        "numpy": np.float32(0.5),
        "array": np.zeros(3),
        "zero_d": np.array(2.0),
        "parts": {"value": 0.5, "parts": {"a": 1}, "b": 2.0},
        "reward": {"reward": 1},
        "empty": {},
        "two": {"value": 1, "score": 2},
        "bad_part": {"value": 1, "a": "x"},
        "nan_part": {"value": 1, "a": float("nan")},
        "scored": Scored(0.75, {"x": 1.0}),
        "unscored": Unscored("judge_offline", "no judge"),
    }[text]


def misbehaves(task: Task, text: str) -> float:
    if text == "raise":
        return 1 / 0
    if text == "exit":
        os._exit(7)
    if text == "sleep":
        time.sleep(600)
    return 1.0
