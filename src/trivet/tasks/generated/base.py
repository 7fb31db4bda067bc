"""What all generators share: arguments, size, splits, uniqueness."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trivet.recipe import schema
from trivet.tasks.base import TasksetError, nearest, share_of
from trivet.types import Message, Task

TEST_SHARE = 0.1
_SIZES = {"train": 10_000, "test": 1_000}
_PATIENCE = 20_000  # draws in a row that bring nothing new


@dataclass(frozen=True, slots=True)
class Item:
    """One generated question. `key` names it in the taskset: equal keys are one item.

    The split goes by `group` (default: the key), so that variants of one question stay together. `exact`
    answers are compared letter by letter, others as mathematics.
    """

    key: str
    prompt: str
    answer: str
    response: str
    exact: bool = False
    group: str = ""
    tags: tuple[str, ...] = ()
    payload: Mapping[str, Any] = field(default_factory=dict)


Generator = Callable[..., Iterator[Item]]
"""Called with a random.Random and the taskset's args; yields items, without end or until there are none."""

_HOMES = {
    "addition": "numbers",
    "arithmetic": "numbers",
    "counting": "words",
    "reversal": "words",
    "sorting": "words",
    "transforms": "words",
    "constraints": "constraints",
    "programs": "programs",
}
_REGISTERED: dict[str, Generator] = {}


def register_generator(name: str) -> Callable[[Generator], Generator]:
    """Decorator: makes `generated:name` a source."""

    def register(generator: Generator) -> Generator:
        _REGISTERED[name] = generator
        return generator

    return register


def generator_names() -> list[str]:
    return sorted({*_HOMES, *_REGISTERED})


def _find(name: str) -> Generator:
    if name not in _REGISTERED and name in _HOMES:
        importlib.import_module(f"trivet.tasks.generated.{_HOMES[name]}")
    if name not in _REGISTERED:
        raise TasksetError(
            f"no generator {name!r}{nearest(name, generator_names())} (known: {', '.join(generator_names())})"
        )
    return _REGISTERED[name]


def final(answer: str, form: str, worked: str = "") -> str:
    """The answer as a response: `boxed`, `plain`, or `worked` (steps, then the box)."""
    if form == "plain":
        return answer
    boxed = f"\\boxed{{{answer}}}"
    if form == "boxed":
        return boxed
    if form == "worked":
        return f"{worked} {boxed}" if worked else boxed
    raise TasksetError(f"args.form: {form!r} is not one of boxed, plain, worked")


def grades(difficulty: Any, top: int) -> list[int]:
    """`difficulty` (a grade or a list of grades, 1 to `top`) as a list."""
    wanted = list(difficulty) if isinstance(difficulty, list | tuple) else [difficulty]
    wrong = [g for g in wanted if not isinstance(g, int) or isinstance(g, bool) or not 1 <= g <= top]
    if wrong or not wanted:
        raise TasksetError(f"args.difficulty: {difficulty!r}; give grades from 1 to {top}")
    return wanted


def _checked_args(name: str, generator: Generator, args: Mapping[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(generator)
    known = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in args:
        if key not in (*known, "size", "seed", "test_share"):
            every = [*known, "size", "seed", "test_share"]
            raise TasksetError(
                f"generated:{name} takes no {key!r}{nearest(key, every)} (args: {', '.join(every)})"
            )
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in args:
            raise TasksetError(f"generated:{name} needs args.{p.name}")
    return {key: value for key, value in args.items() if key in known}


def _whole(args: Mapping[str, Any], key: str, least: int) -> int | None:
    value = args.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TasksetError(f"args.{key}: {value!r} is not a whole number of at least {least}")
    return value


def generate(config: schema.Tasks) -> list[Task]:
    """The taskset `generated:NAME`, in an order that depends on args.seed alone.

    Shared args: `size` (default: all there are, at most 10,000 for train and 1,000 for test), `seed` (0),
    `test_share` (0.1). An item belongs to a split by the hash of its key, so that no seed or size lets the
    two overlap. Raises TasksetError.
    """
    name = config.source.removeprefix("generated:")
    generator = _find(name)
    if config.split not in _SIZES:
        raise TasksetError(
            f"split {config.split!r}{nearest(config.split, _SIZES)}; generated tasks have train and test"
        )
    own = _checked_args(name, generator, config.args)
    size, seed = _whole(config.args, "size", 1), _whole(config.args, "seed", 0) or 0
    share = config.args.get("test_share", TEST_SHARE)
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise TasksetError(f"args.test_share: {share!r} must lie between 0 and 1")
    rng = random.Random(f"{name}/{seed}")
    wanted = size or _SIZES[config.split]
    items = _draw(generator(rng, **own), wanted, config.split, share)
    if size is not None and len(items) < size:
        raise TasksetError(
            f"generated:{name}: only {len(items)} different items for split {config.split!r}, "
            f"size asks for {size}"
        )
    return [_task(name, item, config) for item in items]


def _draw(stream: Iterator[Item], wanted: int, split: str, share: float) -> list[Item]:
    seen: set[str] = set()
    out: list[Item] = []
    barren = 0
    for item in stream:
        if item.key not in seen and (share_of(item.group or item.key) < share) == (split == "test"):
            seen.add(item.key)
            out.append(item)
            barren = 0
        else:
            barren += 1
        if len(out) == wanted or barren == _PATIENCE:
            break
    return out


def _task(name: str, item: Item, config: schema.Tasks) -> Task:
    prompt = config.template.replace("{prompt}", item.prompt)
    payload = {"answer": item.answer, "response": item.response, **item.payload}
    if item.exact:
        payload["match"] = "exact"
    return Task(
        env=config.env,
        messages=(Message("user", prompt),),
        payload={key: value for key, value in payload.items() if value != ""},
        id=f"{name}/{item.key}",
        tags=(*item.tags, *config.tags),
        source=config.source,
        licence=config.licence,
    )
