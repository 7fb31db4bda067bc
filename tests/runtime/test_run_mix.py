"""Worked examples beside rollouts in a whole run; a killed one goes on bit by bit."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.support import PROMPTS, Lively, killed_at, metrics, numbers, recipe, weights

from trivet.agents import Attempt, Policy
from trivet.recipe import RecipeError
from trivet.render import supervised_trace
from trivet.runtime import run_recipe
from trivet.runtime.build import SetupError
from trivet.types import Message, Rollout, Scored, Task, Termination

EXAMPLES = 10


class Guided(Lively):
    """Beside its first attempt, an expert's answer to the same task."""

    async def rollout(self, task: Task, policy: Policy, attempt: Attempt) -> list[Rollout]:
        played = await super().rollout(task, policy, attempt)
        if attempt.index:
            return played
        messages = [*task.messages, Message("assistant", "77")]
        trace = supervised_trace(policy.renderer, messages)
        expert = Rollout(task, trace, Scored(2.0), Termination.FINISHED, attempt=99, source="expert")
        return [*played, expert]


def mix(folder: Path, algorithm: Any = "mix", *overrides: str, **more: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "examples.jsonl"
    rows = ({"id": f"p{n:02d}", "prompt": f"{n:02d}+1=", "response": str(n + 1)} for n in range(EXAMPLES))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {
        "algorithm": algorithm,
        "expert": {"tasks": [{"source": str(file)}], "prompts": 4},
        "batch": {"prompts": 8, "group": 2},
        "checkpoints": {"every": 2},
        "epochs": None,
        "steps": 5,
    }
    return recipe(folder, *overrides, **(stage | more))


def states(run: Path, stage: str) -> list[tuple[str, int, str, int]]:
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        query = "select task_id, epoch, state, step from issues where stage = ? order by 1, 2"
        return ledger.execute(query, [stage]).fetchall()


def test_both_terms_are_trained(tmp_path: Path) -> None:
    """Five steps of four examples: two epochs of ten; rewards and groups are the rollouts' alone."""
    run_recipe(mix(tmp_path), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(lines) == 5
    assert all(line["train/imitate/nll"] > 0 and line["rollout/count"] == 16 for line in lines)
    assert all(line["train/prompts"] == 8 and line["reward/unscored"] == 0 for line in lines)
    assert lines[-1]["train/imitate/nll"] < lines[0]["train/imitate/nll"]
    read = states(tmp_path / "run", "rl.expert")
    assert len(read) == 20
    assert all(state == "trained" for _, _, state, _ in read)


@pytest.mark.parametrize(
    "algorithm", ["mix", {"kind": "mix", "schedule": "alternate"}, {"kind": "chord", "steps": 4}]
)
def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path, algorithm: Any) -> None:
    run_recipe(mix(tmp_path / "whole", algorithm), quiet=True)
    with killed_at(3):
        run_recipe(mix(tmp_path / "cut", algorithm), quiet=True)
    run_recipe(mix(tmp_path / "cut", algorithm), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    assert states(one, "rl.expert") == states(two, "rl.expert")


def guided(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    rows = ({"id": f"p{i:02d}", "prompt": f"{i:02d}+1="} for i in range(PROMPTS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"source": str(folder / "prompts.jsonl"), "env": f"{__file__}:Guided"}]
    algorithm = {"kind": "mix", "imitate": "in_loss"}
    return recipe(folder, algorithm=algorithm, tasks=tasks, epochs=None, steps=8, checkpoints={"every": 2})


def test_an_expert_in_the_groups_is_learned_from(tmp_path: Path) -> None:
    """It is the best of each group, and its answer becomes likely; a killed run goes on bit by bit."""
    run_recipe(guided(tmp_path / "whole"), quiet=True)
    with killed_at(3):
        run_recipe(guided(tmp_path / "cut"), quiet=True)
    run_recipe(guided(tmp_path / "cut"), quiet=True)
    one, two = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert numbers(one) == numbers(two)
    assert weights(one / "rl" / "model") == weights(two / "rl" / "model")
    lines = [line for line in metrics(one) if "train/loss" in line]
    assert all(line["train/expert/tokens"] == 8 * 3 for line in lines)  # "77" and the end of the turn
    assert all(line["rollout/count"] == 8 * 4 and line["reward/mean"] <= 1 for line in lines)  # its own
    early, late = (sum(line["reward/mean"] for line in part) for part in (lines[:2], lines[-2:]))
    assert late > early


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="makes no use of worked examples"):
        run_recipe(mix(tmp_path, "grpo"), quiet=True)
    with pytest.raises(RecipeError, match=r"give the stage expert"):
        run_recipe(mix(tmp_path, "mix", expert=None), quiet=True)
    held = [{"source": str(tmp_path / "examples.jsonl"), "name": "held", "env": "math"}]
    with pytest.raises(SetupError, match="also trained on"):
        run_recipe(mix(tmp_path, "mix", eval={"tasks": held}), quiet=True)


def test_a_worked_answer_joins_its_group(tmp_path: Path) -> None:
    """`demonstrate`: each task's own answer is scored by the verifier and learned from; 0 of the policy's own
    attempts are right at first."""
    rows = ({"prompt": f"{i}+1=", "answer": "7", "response": r"\boxed{7}"} for i in range(16))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"source": str(tmp_path / "p.jsonl"), "env": "math", "env_args": {"demonstrate": True}}]
    algorithm = {"kind": "mix", "imitate": "in_loss"}
    more: dict[str, Any] = {"epochs": None, "steps": 4, "sampling": {"max_tokens": 12}}
    run_recipe(recipe(tmp_path, algorithm=algorithm, tasks=tasks, **more), quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert all(line["train/expert/tokens"] == 8 * 10 for line in lines)  # the box and the end of the turn
    assert lines[0]["reward/mean"] == 0  # the policy's own
    assert all(line["rollout/count"] == 8 * 4 for line in lines)
