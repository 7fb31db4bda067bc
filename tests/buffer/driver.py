"""A small run on the real ledger: explorer, trainer and checkpoints without weights.

What an optimiser would have seen is kept in a list that is saved with every checkpoint and restored on
resume, as weights are: at the end it must hold every prompt exactly once an epoch. Also a program (to be
killed): `python driver.py LEDGER TASKS BATCH EPOCHS GROUP EVERY`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from trivet.buffer import Ledger, StageLedger
from trivet.types import (
    Group,
    IssueKey,
    Message,
    Reward,
    Rollout,
    Scored,
    Task,
    Termination,
    Trace,
)


def make_group(
    key: IssueKey,
    n: int = 2,
    *,
    version: int = 1,
    reward: Callable[[int], Reward] = lambda i: Scored(float(i)),
    kind: str = "rollout",
) -> Group:
    """A played group of `n` rollouts; token ids depend on key and attempt, so that mix-ups show."""
    task = Task("math", (Message("user", f"question {key.task_id}"),), {"answer": "2"}, key.task_id)
    rollouts = []
    for i in range(n):
        trace = Trace()
        root = trace.add(-1, [1, 2, 3])
        trace.add_sampled(root, [4, key.epoch, i], [-0.1, -0.2, -0.3], version)
        messages = [*task.messages, Message("assistant", f"answer {i}")]
        rollouts.append(Rollout(task, trace, reward(i), Termination.FINISHED, attempt=i, messages=messages))
    return Group("", key, rollouts, kind)  # type: ignore[arg-type]


def explore(stage: StageLedger, ids: list[str], epochs: int, group: int, want: int, version: int) -> None:
    """Play until `want` groups are ready or nothing is left; issues an epoch when the last is used up."""
    while (ready := stage.counts()["ready"]) < want:
        keys = stage.claim(want - ready)
        if not keys:
            epoch = next((e for e in range(1, epochs + 1) if not sum(stage.counts(e).values())), None)
            if epoch is None:
                return
            stage.issue(ids, epoch)
        for key in keys:
            stage.put(make_group(key, group, version=version))


def run(
    ledger: Ledger,
    *,
    tasks: int = 64,
    batch: int = 8,
    epochs: int = 2,
    group: int = 4,
    every: int = 3,
    depth: int = 2,
    told: Callable[[int, list[str]], None] = lambda step, keys: None,
) -> list[str]:
    """Resume from the last checkpoint (or start) and go to the end; all keys trained, in order."""
    stage = ledger.stage("rl", fingerprint="data")
    last = max(stage.checkpoints(), default=0)
    weights: list[str] = list(stage.state(last)) if last else []
    stage.rewind(last)
    ids = [f"p{i}" for i in range(tasks)]
    for step in range(last + 1, tasks * epochs // batch + 1):
        newest = ledger.version()
        version = ledger.new_version(step - 1, parent=newest.version if newest else None, stage="rl")
        if not stage.pinned():
            explore(stage, ids, epochs, group, depth * batch, version)
        lease = stage.take(batch, step=step)
        assert not lease.short, f"step {step}: {lease}"
        groups = lease.groups()
        assert all(len(g.rollouts) == group for g in groups)
        weights += [str(g.issue) for g in groups]
        stage.ack(lease, step)
        told(step, [str(g.issue) for g in groups])
        if step % every == 0:
            stage.checkpoint(step, weights)
            told(-step, [])
    stage.checkpoint(tasks * epochs // batch, weights)
    return weights


def main() -> None:
    path, *numbers = sys.argv[1:]
    tasks, batch, epochs, group, every = map(int, numbers)

    def told(step: int, keys: list[str]) -> None:
        print(step, *keys, flush=True)

    with Ledger(path, owner="driver") as ledger:
        run(ledger, tasks=tasks, batch=batch, epochs=epochs, group=group, every=every, told=told)
    print("done", flush=True)


if __name__ == "__main__":
    main()
