"""A run small enough to be killed sixteen times: 64 prompts, batch 8, group 4, two epochs."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from trivet.buffer import Lease, StageLedger
from trivet.envs import SingleTurn
from trivet.recipe import Recipe, load_recipe
from trivet.types import Message, Reward, Rollout, Scored, Task

HERE = Path(__file__)
PROMPTS, BATCH, GROUP, EPOCHS = 64, 8, 4, 2
STEPS = PROMPTS * EPOCHS // BATCH
TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 32, "context": 64}
TIMES = ("time/", "engine/", "sync/")
SCHEDULING = {"explorer/rounds", "explorer/retried", "buffer/replayed", "train/tokens_per_s", "time"}


class Lively(SingleTurn):
    """Rewards digits: a policy from random weights earns something that differs within a group."""

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        text = message.text
        return Scored(sum(c.isdigit() for c in text) / max(1, len(text)))


def recipe(folder: Path, *overrides: str, **stage: Any) -> Recipe:
    """The recipe of the golden case in `folder`, with changes to its stage."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = folder / "prompts.jsonl"
    if not tasks.exists():
        rows = ({"id": f"p{i:02d}", "prompt": f"{i:02d}+{i * 7 % 64:02d}="} for i in range(PROMPTS))
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "name": "golden",
        "output": str(folder / "run"),
        "policy": {"model": TINY},
        "runtime": {"threads": 1},
        "monitor": {"plots": False, "samples_every": 0},
        "stages": [
            {
                "name": "rl",
                "mode": "both",
                "algorithm": "grpo",
                "tasks": [{"source": str(tasks), "env": f"{HERE}:Lively", "fields": {"prompt": "prompt"}}],
                "batch": {"prompts": BATCH, "group": GROUP},
                "sampling": {"max_tokens": 4},
                "trainer": {"lr": 1e-2},
                "checkpoints": {"every": 3},
                "epochs": EPOCHS,
            }
            | stage
        ],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path, list(overrides))


def trained(run: Path, stage: str = "rl") -> tuple[Counter[str], set[int], Counter[str]]:
    """From the ledger: how often each prompt was trained, at which steps, and all states."""
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        rows = ledger.execute("select task_id, state, step from issues where stage = ?", [stage]).fetchall()
    done = [row for row in rows if row[1] == "trained"]
    return Counter(r[0] for r in done), {r[2] for r in done}, Counter(r[1] for r in rows)


def numbers(run: Path) -> dict[tuple[str, int, bool], dict[str, float]]:
    """metrics.jsonl without times and without what describes scheduling, by (stage, step, is evaluation)."""
    out = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {
            key: value
            for key, value in record.items()
            if key not in SCHEDULING and not key.startswith(TIMES) and key not in ("stage", "step")
        }
        out[record["stage"], record["step"], any(k.startswith("eval/") for k in kept)] = kept
    return out


def weights(model: Path) -> dict[str, bytes]:
    """Every tensor of an exported model, as bytes."""
    from safetensors.numpy import load_file

    return {name: tensor.tobytes() for name, tensor in load_file(model / "model.safetensors").items()}


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, line by line."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """Stands for the death of the process: nothing handles it."""


def die() -> None:
    raise Killed


@contextlib.contextmanager
def at_ack(step: int, act: Callable[[], None], *, before: bool = False) -> Iterator[None]:
    """Call `act` right after the acknowledgement of `step` (or right before it), the first time only."""
    ack, done = StageLedger.ack, []

    def acting(ledger: StageLedger, lease: Lease, at: int) -> None:
        now = at == step and not done
        if now:
            done.append(at)
        if now and before:
            act()
        ack(ledger, lease, at)
        if now and not before:
            act()

    with mock.patch.object(StageLedger, "ack", acting):
        yield
    assert done, f"step {step} was never acknowledged"


@contextlib.contextmanager
def killed_at(step: int, *, before: bool = False) -> Iterator[None]:
    """What runs inside is killed at the acknowledgement of `step`."""
    try:
        with at_ack(step, die, before=before):
            yield
    except Killed:
        return
    raise AssertionError(f"the run went on after it was killed at step {step}")
