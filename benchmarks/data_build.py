"""How fast is a whole build without tokens? Megabytes of JSON per second and core, and its memory.

    python benchmarks/data_build.py [--mb 64] [--times 1] [--workers 1] [--render MODEL]

Conversations of about 2 KB (`--times 5`: 10 KB) from a made-up vocabulary, half OpenAI messages and half
ShareGPT, one in twenty a copy, screened against 1,500 made-up benchmark items (30,000 phrases), deduplicated
and written. The same file is read by `json.loads` alone for the ratio. With `--render` a model's directory
also renders and packs.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = 30_000
ITEMS = 1_500


def vocabulary(rng: random.Random) -> list[str]:
    letters = "etaoinshrdlcumwfgypbvk"
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(WORDS)]


def conversations(megabytes: float, words: list[str], rng: random.Random, times: int = 1) -> Iterator[str]:
    size, last = 0, ""
    while size < megabytes * 1e6:
        if last and rng.random() < 0.05:
            line = last
        else:
            turns = []
            for _ in range(rng.randint(1, 3)):
                turns.append(" ".join(rng.choices(words, k=times * rng.randint(20, 60))) + "?")
                turns.append(" ".join(rng.choices(words, k=times * rng.randint(60, 160))) + ".")
            line = json.dumps(_row(turns, rng.random() < 0.5))
        size += len(line) + 1
        last = line
        yield line + "\n"


def _row(turns: list[str], openai: bool) -> dict[str, Any]:
    if openai:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": t} for i, t in enumerate(turns)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mb", type=float, default=64.0, help="megabytes of JSON lines")
    parser.add_argument("--times", type=int, default=1, help="messages so many times as long")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--render", metavar="MODEL", help="render and pack with this model's tokenizer")
    args = parser.parse_args()
    rng = random.Random(0)
    words = vocabulary(rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "chats.jsonl", "w") as file:
            file.writelines(conversations(args.mb, words, rng, args.times))
        with open(folder / "items.jsonl", "w") as file:
            for _ in range(ITEMS):
                file.write(json.dumps({"question": " ".join(rng.choices(words, k=60))}) + "\n")
        measure(folder, args.workers, args.render)


def measure(folder: Path, workers: int, model: str | None) -> None:
    from trivet.data.build import build
    from trivet.recipe import Recipe

    data = {
        "output": str(folder / "out"),
        "sources": [{"source": str(folder / "chats.jsonl")}],
        "decontaminate": {
            "benchmarks": [{"name": "made up", "source": str(folder / "items.jsonl"), "fields": ["question"]}]
        },
        "render": model is not None,
        "pack": {"length": 8192} if model else None,
        "workers": workers,
        "piece_mb": 16,
    }
    recipe = Recipe.model_validate(
        {"name": "bench", "data": data} | ({"policy": {"model": model}} if model else {})
    )
    size = (folder / "chats.jsonl").stat().st_size / 1e6
    times = {"json.loads alone": _timed(lambda: _parse(folder / "chats.jsonl"))}
    times["the whole build"] = _timed(lambda: build(recipe))
    for what, (wall, cpu) in times.items():
        print(f"{what:20s} {size / wall:8.1f} MB/s by the clock, {size / cpu:8.1f} MB/s per core", flush=True)
    ratio = times["json.loads alone"][1] / times["the whole build"][1]
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"ratio of processor time {ratio:.3f}; peak memory {peak / 1024:.0f} MB; {size:.0f} MB read")


def _parse(path: Path) -> None:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)


def _timed(function: Any) -> tuple[float, float]:
    """(seconds by the clock, seconds of processors, children's included)."""
    wall, cpu = time.perf_counter(), _cpu()
    function()
    return time.perf_counter() - wall, _cpu() - cpu


def _cpu() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


if __name__ == "__main__":
    main()
