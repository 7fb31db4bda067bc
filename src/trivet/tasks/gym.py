"""`reasoning_gym:NAME`: every generator of that library as a taskset."""

from __future__ import annotations

from typing import Any

from trivet.recipe import schema
from trivet.rewards import gym
from trivet.tasks.base import TasksetError, nearest, share_of
from trivet.types import Message, Task

PREFIX = "reasoning_gym:"
_SIZES = {"train": 500, "test": 100}
TEST_SHARE = 0.1
_STRIDE = 1_000_003
_PATIENCE = 2_000  # puzzles in a row that bring nothing new


def _whole(config: schema.Tasks, key: str, default: int, least: int) -> int:
    value = config.args.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TasksetError(f"args.{key}: {value!r} is not a whole number of at least {least}")
    return value


def generate_puzzles(config: schema.Tasks) -> list[Task]:
    """Puzzles in the generator's order. `args`: `size` (500 for train, 100 for test), `seed` (0),
    `test_share` (0.1), and the generator's own. A puzzle's question decides its split, whatever seed and
    size, so that train and test never share one. Raises TasksetError.
    """
    name = config.source.removeprefix(PREFIX)
    if config.split not in _SIZES:
        raise TasksetError(f"split {config.split!r}{nearest(config.split, _SIZES)}; there are train and test")
    size = _whole(config, "size", _SIZES[config.split], 1)
    seed = _whole(config, "seed", 0, 0)
    share = config.args.get("test_share", TEST_SHARE)
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        raise TasksetError(f"args.test_share: {share!r} must lie between 0 and 1")
    own = {key: value for key, value in config.args.items() if key not in ("size", "seed", "test_share")}
    try:
        known = gym.names()
        if name not in known:
            raise TasksetError(
                f"reasoning_gym has no {name!r}{nearest(name, known)} ({len(known)} are known)"
            )
        data = gym.data(name, seed, own)
    except gym.GymError as error:
        raise TasksetError(str(error)) from error
    tasks: list[Task] = []
    seen: set[str] = set()
    for index in range(gym.SIZE):
        if len(tasks) == size:
            break
        try:
            entry = data[index]
        except Exception as error:  # some generators give up on some seeds
            raise TasksetError(f"reasoning_gym {name!r} fails at item {index}: {error!r}") from error
        key = gym.digest(entry["question"])
        if key in seen or (share_of(key) < share) != (config.split == "test"):
            continue
        seen.add(key)
        tasks.append(_task(config, name, entry, {"seed": seed, "index": index, "args": own, "question": key}))
    if len(tasks) < size and "size" in config.args:
        raise TasksetError(
            f"reasoning_gym {name!r}: only {len(tasks)} different puzzles for split {config.split!r} among "
            f"{gym.SIZE:,}, size asks for {size}"
        )
    return tasks


def _task(config: schema.Tasks, name: str, entry: dict[str, Any], made: dict[str, Any]) -> Task:
    payload: dict[str, Any] = {"puzzle": {"kind": "reasoning_gym", "name": name, **made}}
    if isinstance(entry.get("answer"), str) and entry["answer"]:
        payload["answer"] = entry["answer"]  # one right answer, to look at: there may be others
    return Task(
        env=config.env,
        messages=(Message("user", config.template.replace("{prompt}", entry["question"])),),
        payload=payload,
        id=f"reasoning_gym/{name}/{made['question']}",
        tags=(name, *config.tags),
        source=config.source,
        licence=config.licence,
    )
