"""Scoring answers that exist already: in parallel, in order, and going on where it stopped.

Any verifier will do: what is called is `judge(sample)`. Scores are kept in a journal as they come; the output
is written, in the samples' order, when all are there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from trivet.types import (
    Message,
    Pending,
    Reward,
    Scored,
    Task,
    Termination,
    Unscored,
    content_hash,
    reward_to_dict,
)

EARLY = 100  # scores after which too many unscored ones stop the scoring before its end
BINS = 10


class OfflineError(RuntimeError):
    """Scoring cannot go on: too many answers have no score, or the output holds something else."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a task, and how it ended. `place` is where it was read (file:line)."""

    task: Task
    message: Message
    termination: Termination = Termination.FINISHED
    place: str = ""

    def key(self, verifier: str) -> str:
        """What a stored score belongs to: task, answer and verifier."""
        task = self.task
        asked = [[one.to_dict() for one in task.messages], task.payload]
        return content_hash([verifier, asked, self.message.to_dict(), self.termination])


Judge = Callable[[Sample], Awaitable[Reward]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards by the samples' order, and how many of them a former run had left."""

    rewards: list[Reward]
    resumed: int = 0

    @property
    def values_N(self) -> np.ndarray:
        """The scored values, shape (_N,)."""
        return np.asarray([one.value for one in self.rewards if isinstance(one, Scored)], np.float64)

    def causes(self) -> Counter[str]:
        """Why the others have no score."""
        return Counter(_unscored(one).cause for one in self.rewards if not isinstance(one, Scored))

    def parts(self) -> dict[str, tuple[float, int]]:
        """Of each part its mean and how many scores have it."""
        found: dict[str, list[float]] = {}
        for one in self.rewards:
            if isinstance(one, Scored):
                for name, value in one.parts.items():
                    found.setdefault(name, []).append(float(value))
        return {name: (float(np.mean(values)), len(values)) for name, values in sorted(found.items())}


def _unscored(reward: Reward) -> Unscored:
    if isinstance(reward, Unscored):
        return reward
    return Unscored("pending", "the verifier promises a score for later")


# -- the journal -----------------------------------------------------------------------------------


def _journal(output: Path) -> Path:
    return output.with_name(output.name + ".part")


def _stored(output: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The lines of an earlier run, by (index, key): the finished output's and the journal's. A line that was
    cut off is left out. Raises OfflineError for a file that holds something else."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for path in (output, _journal(output)):
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                found[int(row["index"]), str(row["key"])] = row
            except (ValueError, KeyError, TypeError) as error:
                if path != output and number == len(lines):  # what a kill left of the last line
                    continue
                raise OfflineError(
                    f"{path}:{number} is no line of scores; name another output, or move it away"
                ) from error
    return found


def _line(index: int, key: str, sample: Sample, reward: Reward) -> str:
    if isinstance(reward, Pending):
        reward = _unscored(reward)
    row = {"index": index, "id": sample.task.id, "key": key, **reward_to_dict(reward)}
    row["length"] = len(sample.message.text)
    if sample.place:
        row["place"] = sample.place
    return json.dumps(row, ensure_ascii=True)


def _reward(row: Mapping[str, Any]) -> Reward | None:
    """A stored score; None for a line without one: it is tried again."""
    return Scored(row["value"], dict(row["parts"])) if row.get("kind") == "scored" else None


def _write(output: Path, lines: Iterable[str]) -> None:
    """The finished output in place of the journal, at once or not at all."""
    new = output.with_name(output.name + ".new")
    with open(new, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(output)
    _journal(output).unlink(missing_ok=True)


# -- scoring ---------------------------------------------------------------------------------------


async def score_samples(
    samples: Sequence[Sample],
    judge: Judge,
    *,
    verifier: str,
    parallel: int = 16,
    output: Path | None = None,
    max_unscored: float = 0.1,
    advance: Callable[[int], None] = lambda n: None,
) -> Scores:
    """Score all samples, `parallel` at a time.

    With `output`, scores are kept from the first on, and one that is there already, of the same sample and
    the same `verifier` (a text that names it and its arguments), is not made again; what had no score is
    tried again. `advance(n)` is told of each n that are done. Raises OfflineError as soon as more than the
    share `max_unscored` of them has no score (looked at from 100 on, and at the end).
    """
    if parallel < 1 or not 0 <= max_unscored <= 1:
        raise ValueError("parallel must be 1 or more, max_unscored in 0..1")
    keys = [sample.key(verifier) for sample in samples]
    stored = _stored(output) if output else {}
    if stored and not any((index, key) in stored for index, key in enumerate(keys)):
        raise OfflineError(
            f"{output} holds scores of other answers or of another verifier; name another output"
        )
    rewards: list[Reward | None] = [_reward(stored.get((index, key), {})) for index, key in enumerate(keys)]
    todo = [index for index, one in enumerate(rewards) if one is None]
    resumed = len(samples) - len(todo)
    advance(resumed)
    journal: TextIO | None = None
    if output and todo:
        output.parent.mkdir(parents=True, exist_ok=True)
        _mend(_journal(output))
        journal = open(_journal(output), "a", encoding="utf-8")  # noqa: SIM115 - closed below
    lost = done = 0
    waiting = iter(todo)

    async def work() -> None:
        nonlocal lost, done
        for index in waiting:
            reward = await _judged(judge, samples[index])
            rewards[index] = reward
            if journal is not None:
                journal.write(_line(index, keys[index], samples[index], reward) + "\n")
                journal.flush()
            done += 1
            lost += not isinstance(reward, Scored)
            advance(1)
            if done >= EARLY and lost > max_unscored * (done + resumed):
                raise _TooMany

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(parallel, len(todo))):
                group.create_task(work())
    except ExceptionGroup as group:
        if group.subgroup(_TooMany) is None:
            raise
        raise _too_many([one for one in rewards if one is not None], max_unscored, output) from None
    finally:
        if journal is not None:
            journal.close()
    scores = Scores([one for one in rewards if one is not None], resumed)
    if output:
        _write(output, (_line(i, keys[i], samples[i], one) for i, one in enumerate(scores.rewards)))
    return scores


class _TooMany(Exception):
    """The limit of unscored answers is passed: ends the work that is under way."""


async def _judged(judge: Judge, sample: Sample) -> Reward:
    reward = await judge(sample)
    return _unscored(reward) if isinstance(reward, Pending) else reward


def _mend(path: Path) -> None:
    """End the journal's last line, which a kill may have cut."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        whole = text.rfind(b"\n") + 1
        os.truncate(path, whole)


def _too_many(rewards: Sequence[Reward], limit: float, output: Path | None) -> OfflineError:
    lost = [one for one in rewards if not isinstance(one, Scored)]
    causes = Counter(_unscored(one).cause for one in lost)
    said = ", ".join(f"{cause} {n}" for cause, n in causes.most_common())
    example = _unscored(lost[0])
    kept = f" What was scored is kept: the same command goes on from {output}." if output else ""
    return OfflineError(
        f"{len(lost)} of {len(rewards)} answers have no score ({said}), more than the {limit:.0%} allowed. "
        f"One of them: {example.cause}: {example.detail}.{kept}"
    )


def check_unscored(scores: Scores, limit: float, output: Path | None = None) -> None:
    """Raises OfflineError where more than the share `limit` has no score."""
    lost = sum(not isinstance(one, Scored) for one in scores.rewards)
    if lost > limit * len(scores.rewards):
        raise _too_many(scores.rewards, limit, output)


# -- the report ------------------------------------------------------------------------------------


def histogram(values_N: np.ndarray) -> list[tuple[str, int]]:
    """(what a bin holds, how many), of each value where there are few, else of ten bins of one width."""
    distinct = np.unique(values_N)
    if len(distinct) <= BINS:
        return [(f"{value:.4g}", int(np.count_nonzero(values_N == value))) for value in distinct]
    low, high = float(values_N.min()), float(values_N.max())
    place = np.arange(BINS + 1) / BINS
    edges = low * (1 - place) + high * place  # the distance of two huge values is not finite
    if not np.all(edges[1:] > edges[:-1]):  # values that no ten bins can tell apart
        return [(f"{low:.6g} to {high:.6g}", len(values_N))]
    counts = np.histogram(values_N, edges)[0]
    return [(f"{a:.4g} to {b:.4g}", int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def mean(values_N: np.ndarray) -> float:
    """The mean; of values whose sum is not finite too."""
    if not len(values_N):
        return float("nan")
    largest = float(np.abs(values_N).max())
    if largest * len(values_N) < sys.float_info.max:
        return float(values_N.mean())
    return float((values_N / len(values_N)).sum())
