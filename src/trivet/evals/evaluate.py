"""Play held-out tasks with a policy and count. Nothing here enters the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trivet.agents import Attempt, Policy
from trivet.envs import Environment
from trivet.evals.passk import mean_interval, pass_at_k
from trivet.explorer import play, unscored_causes
from trivet.explorer.play import Warn
from trivet.recipe.schema import Explorer as ExplorerConfig
from trivet.types import IssueKey, Rollout, Task


class EvaluationError(RuntimeError):
    """An evaluation gave no number one could trust; the message says why."""


@dataclass(slots=True)
class Evaluation:
    """The result on one taskset. `metrics` are named as in metrics.jsonl, without `eval/<taskset>/`."""

    name: str
    metrics: dict[str, float]
    rollouts: list[Rollout] = field(default_factory=list)


def summarise(
    name: str, by_task: Mapping[str, Sequence[Rollout]], ks: Sequence[int], threshold: float
) -> Evaluation:
    """pass@k over tasks (each task's unscored attempts left out and counted), mean reward, lengths.

    A task with fewer scored attempts than k is left out of pass@k and counted in `short`. Raises
    EvaluationError when no task is left for some k.
    """
    rollouts = [r for group in by_task.values() for r in group]
    scores = {task: [r.score for r in group if r.score is not None] for task, group in by_task.items()}
    scored = [s for group in scores.values() for s in group]
    if not scored:
        causes = dict(unscored_causes(rollouts))
        raise EvaluationError(f"evaluation {name}: none of {len(rollouts)} rollouts has a score: {causes}")
    out: dict[str, float] = {
        "tasks": float(len(by_task)),
        "reward": float(np.mean(scored)),
        "unscored": 1 - len(scored) / len(rollouts),
        "length": float(np.mean([r.sampled_tokens for r in rollouts])),
        **{f"unscored/{cause}": n / len(rollouts) for cause, n in unscored_causes(rollouts).items()},
        "truncated": float(np.mean([r.termination.truncated for r in rollouts])),
    }
    for k in ks:
        passed = [
            pass_at_k(len(s), sum(x >= threshold for x in s), k) for s in scores.values() if len(s) >= k
        ]
        if not passed:
            raise EvaluationError(
                f"evaluation {name}: no task has {k} scored attempts, so there is no pass@{k}; "
                "raise eval.samples or lower eval.k"
            )
        low, high = mean_interval(np.asarray(passed))
        out |= {f"pass@{k}": float(np.mean(passed)), f"pass@{k}/low": low, f"pass@{k}/high": high}
        if len(passed) < len(scores):
            out[f"pass@{k}/short"] = float(len(scores) - len(passed))
    return Evaluation(name, out, rollouts)


async def evaluate(
    name: str,
    tasks: Sequence[Task],
    env: Environment,
    policy: Policy,
    config: ExplorerConfig,
    *,
    run: str,
    samples: int,
    ks: Sequence[int],
    threshold: float,
    warn: Warn,
    advance: Callable[[int], None] = lambda n: None,
) -> Evaluation:
    """Play each task `samples` times. Seeds depend on (`run`, task, attempt) only, so that checkpoints are
    compared on the same random numbers. Raises EvaluationError."""
    places = asyncio.Semaphore(config.concurrency)
    # Waves small enough that a deterministic engine can hold each whole.
    wave = max(1, config.concurrency // samples)
    by_task: dict[str, list[Rollout]] = {}

    async def one(task: Task, attempt: Attempt) -> list[Rollout]:
        try:
            async with places:
                return (await play(env, policy, task, attempt, config, warn)).rollouts
        finally:
            policy.engine.settle(attempt.session(policy.player))
            advance(1)

    for start in range(0, len(tasks), wave):
        attempts = [
            (
                task,
                Attempt(run, IssueKey(task.id, 0), f"eval/{name}/{task.id}", i, role="eval", order=start + n),
            )
            for n, task in enumerate(tasks[start : start + wave])
            for i in range(samples)
        ]
        policy.engine.expect([attempt.session(policy.player) for _, attempt in attempts])
        async with asyncio.TaskGroup() as group:
            jobs = [(task.id, group.create_task(one(task, attempt))) for task, attempt in attempts]
        for task_id, job in jobs:
            by_task.setdefault(task_id, []).extend(job.result())
    return summarise(name, by_task, ks, threshold)
