"""What a run of reinforcement learning logs: the whole list, each name explained, warnings said once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.runtime.support import metrics, recipe

from trivet.envs import SingleTurn
from trivet.monitor.alerts import RULES
from trivet.monitor.glossary import describe
from trivet.runtime import run_recipe
from trivet.runtime.stage import joined, reference_kl
from trivet.types import Message, Reward, Rollout, Scored, Task

HERE = Path(__file__)
STEPS = 8
ALWAYS = {
    *("reward/mean", "reward/solved", "reward/unscored", "reward/part/digits", "reward/part/length"),
    *("group/all_solved", "group/none_solved", "group/all_equal", "group/filtered", "explorer/lost"),
    *("train/entropy", "train/kl", "train/ref_kl", "train/gap", "train/pg/gap/0", "train/ess"),
    *("train/clipped", "train/grad_norm", "train/trained_share", "train/zero_advantage_share"),
    *("rollout/length_mean", "rollout/truncated", "conduct/answer_characters", "conduct/tool_calls"),
    *("conduct/losers/turns_p50", "conduct/losers/turns_p90", "conduct/losers/tool_calls_p50"),
}
"""In every step of the run below; what needs a solve is in some."""


class Tooled(SingleTurn):
    """Every second attempt solves its task, but for every fourth task, which nobody solves: whatever the
    policy says. Counts the tool calls of a policy that makes none."""

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        share = sum(c.isdigit() for c in message.text) / max(1, len(message.text))
        rollout.counters["tool_calls"] = 0.0
        solved = rollout.attempt % 2 == 0 and int(task.messages[-1].text[:2]) % 4 != 0
        return Scored(float(solved), {"digits": share, "length": float(len(message.text))})


def tooled(folder: Path, **stage: Any) -> Any:
    tasks = folder / "prompts.jsonl"
    given: dict[str, Any] = {
        "algorithm": {"kind": "grpo", "kl_weight": 0.01, "tis": [0.5, 2.0]},
        "tasks": [{"source": str(tasks), "env": f"{HERE}:Tooled", "fields": {"prompt": "prompt"}}],
        "batch": {"prompts": 6, "group": 6, "updates_per_batch": 2},
        "explorer": {"window": {"above": -1.0, "not_all_equal": True}},
        "epochs": None,
        "steps": STEPS,
    }
    return recipe(folder, **(given | stage))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitors")
    run_recipe(tooled(folder), quiet=True)
    return folder / "run"


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "train/loss" in line]


def test_the_whole_list_is_logged(run: Path) -> None:
    lines = steps(run)
    assert len(lines) == STEPS
    for line in lines:
        assert not ALWAYS - line.keys()
        assert all(value is None or math.isfinite(value) for key, value in line.items() if key != "stage")
    solved = [line for line in lines if "rollout/tokens_per_solve" in line]
    assert solved
    for line in solved:
        assert {"conduct/winners/turns_p50", "conduct/winners/tool_calls_p90"} <= line.keys()
        assert line["rollout/tokens_per_solve"] == pytest.approx(
            line["rollout/tokens"] / (line["reward/solved"] * line["rollout/count"])
        )


def test_the_numbers_agree_with_each_other(run: Path) -> None:
    for line in steps(run):
        played = line["explorer/accepted"] + line["explorer/filtered"]
        assert line["group/filtered"] == pytest.approx(line["explorer/filtered"] / played)
        assert line["group/all_equal"] == pytest.approx(
            line["group/filtered"]
        )  # that is what the window drops
        assert line["train/zero_advantage_share"] == 0  # and what is left has a signal
        assert line["train/trained_share"] == 1
        assert 0 < line["train/ess"] <= 1 + 1e-6
        assert line["train/gap"] == pytest.approx(line["train/pg/abs_log_diff"])
        assert line["train/pg/gap/0"] == pytest.approx(line["train/gap"], rel=0.2)
    assert any(line["explorer/filtered"] for line in steps(run))
    first, last = steps(run)[0], steps(run)[-1]
    assert first["train/ref_kl"] == pytest.approx(0, abs=1e-6)  # the reference is what the stage started from
    assert last["train/ref_kl"] > 1e-3


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "reinforce_plus_plus", "reward_kl": 0.01},
        {"kind": "grpo", "masks": ["truncated", "equal_rewards"], "entropy_weight": 0.01},
        *("ppo", "gspo", "topr", "dppo", "sapo", "gmpo", "remax"),
    ],
    ids=str,
)
def test_every_name_is_in_the_table(tmp_path: Path, algorithm: Any) -> None:
    run_recipe(tooled(tmp_path, algorithm=algorithm, steps=2), quiet=True)
    lines = metrics(tmp_path / "run")
    names = {name for line in lines for name in line} - {"stage", "step", "time", "warnings"}
    assert len(names) > 60
    assert sorted(name for name in names if describe(name) is None) == []
    if isinstance(algorithm, dict) and "reward_kl" in algorithm:
        assert all("train/ref_kl" in line for line in lines)  # the distance is in the reward, and still seen


def test_warnings_are_named_and_said_once(run: Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    said = [(e["cause"], e["step"]) for e in events if e["kind"] == "warning" and e["cause"] in RULES]
    assert said.count(("no_tool_calls", 3)) == 1  # it holds from the third step to the last
    assert [cause for cause, _ in said].count("no_tool_calls") == 1


def test_the_report_shows_them(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    for title in ("Entropy", "KL (nats a token)", "Gap to the sampler", "Effective sample size", "Groups"):
        assert title in page
    assert "to the reference" in page
    assert "no_tool_calls" in page


def test_gaps_of_several_updates_are_weighed_by_their_tokens() -> None:
    """0.2 over 10 tokens and 0.5 over 30: (2 + 15) / 40 = 0.425; the third update saw none of that age."""
    out = joined(
        [
            {"train/pg/gap/1": 0.2, "train/pg/aged/1": 10.0, "train/gap": 0.2},
            {"train/pg/gap/1": 0.5, "train/pg/aged/1": 30.0, "train/gap": 0.4},
            {"train/gap": 0.6},
        ]
    )
    assert out["train/pg/gap/1"] == pytest.approx(0.425)
    assert out["train/pg/aged/1"] == 40
    assert out["train/gap"] == pytest.approx(0.4)


def test_distance_to_the_reference() -> None:
    """d = 0 and ln 2: k3 is 0 and 1/2 - 1 + ln 2 = 0.1931, mean 0.0966. What is not trained (d = 5) and what
    nobody is known to have sampled do not count."""

    def part(logprob: list[float], reference: list[float], trained: list[bool]) -> Any:
        batch = SimpleNamespace(
            annotations={"ref_logp": np.asarray(reference)}, logprob_T=np.asarray(logprob, np.float32)
        )
        return SimpleNamespace(batch=batch, trained_T=np.asarray(trained))

    ln2 = math.log(2)
    parts = [part([-1.0, -1.0], [-1.0, -6.0], [True, False])]
    parts += [part([-1.0, np.nan], [-1.0 - ln2, -1.0], [True, True])]
    assert reference_kl(parts)["train/ref_kl"] == pytest.approx(0.0966, abs=1e-4)
    assert reference_kl([SimpleNamespace(batch=SimpleNamespace(annotations={}))]) == {}  # type: ignore[list-item]
    assert reference_kl([part([np.nan], [-1.0], [True])]) == {}
