"""The losses of scalar outputs by hand, what combinations are refused, and what prepare makes of pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trivet.algorithms import AlgorithmError, prepare, resolve, stream_loss
from trivet.algorithms.base import Algorithm, ObjectiveInputs, StreamSpec
from trivet.algorithms.kinds.reward_model import last_trained
from trivet.algorithms.objectives import BradleyTerry, ValueLoss
from trivet.algorithms.registry import check, make_part
from trivet.recipe import plan
from trivet.recipe.schema import Recipe
from trivet.trainer.batch import collate
from trivet.types import Group, IssueKey

torch = pytest.importorskip("torch")


def inputs(now: Any, *, units: int = 0, unit: Any = None, weight: Any = None, **arrays: Any) -> Any:
    now_P = torch.tensor(now, dtype=torch.float64, requires_grad=True)

    def put(array: Any) -> Any:
        return torch.tensor(np.asarray(array), dtype=torch.float64)

    n = len(now_P)
    preference = put(arrays.pop("preference")) if "preference" in arrays else None
    return ObjectiveInputs(
        logp_P=put(np.full(n, np.nan)),
        weight_P=put(np.full(n, 1 / n) if weight is None else weight),
        unit_P=torch.tensor(unit if unit is not None else [0] * n),
        units=units,
        behaviour_P=put(np.full(n, np.nan)),
        value_P=now_P,
        preference_P=preference,
        columns={name.removesuffix("_"): put(a) for name, a in arrays.items()},
    )


def test_value_loss_by_hand():
    # clip 0.2, old 1.0, return 2.0 (rows 1-3) or 0.0 (row 4):
    # v 1.1: (0.9)^2 = 0.81, inside the clip: the same              -> 0.405, gradient v - R = -0.9
    # v 1.5: (0.5)^2 = 0.25; at 1.2: 0.64, the larger: clipped        -> 0.32,  gradient 0
    # v 0.5: (1.5)^2 = 2.25; at 0.8: 1.44, smaller: it moved away     -> 1.125, gradient -1.5
    # v 0.5, return 0: 0.25; at 0.8: 0.64: clipped                    -> 0.32,  gradient 0
    x = inputs([1.1, 1.5, 0.5, 0.5], return_=[2.0, 2.0, 2.0, 0.0], value=[1.0] * 4)
    terms, stats = ValueLoss(clip=0.2)(x)
    assert (4 * terms).tolist() == pytest.approx([0.405, 0.32, 1.125, 0.32])
    terms.sum().backward()
    assert (4 * x.value_P.grad).tolist() == pytest.approx([-0.9, 0.0, -1.5, 0.0])
    assert stats["clipped"].item() == 2
    assert stats["squared_error"].item() == pytest.approx(0.81 + 0.25 + 2.25 + 0.25)


def test_value_loss_without_a_clip():
    x = inputs([1.5, 0.0], return_=[2.0, 3.0], value=[-9.0, 9.0])
    terms, stats = ValueLoss(clip=None)(x)
    assert terms.tolist() == pytest.approx([0.0625, 2.25])
    assert stats["clipped"].item() == 0


def test_bradley_terry_by_hand():
    # pairs (1.0, 0.0) and (-1.0, 2.0): -log sigmoid(1) = 0.31326, -log sigmoid(-3) = 3.04859
    x = inputs([1.0, 0.0, -1.0, 2.0], units=2, unit=[0, 0, 1, 1], preference=[1, -1, 1, -1])
    terms, stats = BradleyTerry()(x)
    assert (2 * terms).tolist() == pytest.approx([0.31326, 3.04859], abs=1e-5)
    terms.sum().backward()
    # d/dr_chosen = -(1 - sigmoid(gap)) / 2 pairs: -0.13447, -0.47629; the rejected the opposite
    assert x.value_P.grad.tolist() == pytest.approx([-0.13447, 0.13447, -0.47629, 0.47629], abs=1e-5)
    assert stats["unit/accuracy"].item() == 1
    assert stats["unit/margin"].item() == pytest.approx(-2.0)


def test_the_margin_asks_for_more():
    x = inputs([1.0, 0.0], units=1, unit=[0, 0], preference=[1, -1])
    terms, _ = BradleyTerry(margin=1.0)(x)
    assert terms.tolist() == pytest.approx([math.log(2)])


def test_a_pairs_own_margin_comes_on_top():
    """Gaps 1 and 1, margins 0.5 + 0.5 and 0.5: -log sigmoid(0) and -log sigmoid(0.5) = 0.474077."""
    given = {"units": 2, "unit": [0, 0, 1, 1], "preference": [1, -1, 1, -1]}
    x = inputs([1.0, 0.0, 2.0, 1.0], **given, pair_margin=[0.5, 0.5, 0.0, 0.0])
    terms, _ = BradleyTerry(margin=0.5)(x)
    assert (2 * terms).tolist() == pytest.approx([math.log(2), 0.474077], abs=1e-6)


def test_equal_shifts_of_both_sides_change_nothing():
    base, moved = (
        BradleyTerry()(inputs([v + s for v in (0.3, -0.2)], units=1, unit=[0, 0], preference=[1, -1]))
        for s in (0.0, 7.0)
    )
    assert base[0].tolist() == pytest.approx(moved[0].tolist())


def test_a_group_of_several_and_one_that_lost_a_side():
    # mean of chosen (1 + 3) / 2 = 2 against 1: -log sigmoid(1); the second group has no rejected answer
    x = inputs(
        [1.0, 3.0, 1.0, 5.0],
        units=2,
        unit=[0, 0, 0, 1],
        preference=[1, 1, -1, 1],
        weight=[0.25] * 4,
    )
    terms, stats = BradleyTerry()(x)
    assert terms.tolist() == pytest.approx([0.75 * 0.313262, 0.0], abs=1e-6)
    terms.sum().backward()
    assert x.value_P.grad[3].item() == 0
    assert stats["sum/unpaired"].item() == 1


def preference(make_rollout: Any, name: str, **chosen: Any) -> Group:
    rollouts = [
        make_rollout(None, (2, 1), attempt=0, preference="chosen", **chosen),
        make_rollout(None, (3,), attempt=1, preference="rejected"),
    ]
    return Group(name, IssueKey(name, 0), rollouts, "preference")


def test_pairs_are_read_at_the_answers_ends_and_weigh_alike(make_rollout):
    batch = collate([preference(make_rollout, "a"), preference(make_rollout, "b")])
    prepared = prepare(batch, resolve("reward_model"))
    [stream] = prepared.streams
    ends = [int(np.flatnonzero((batch.rollout_T == n) & (batch.train_T > 0))[-1]) for n in range(4)]
    assert np.flatnonzero(last_trained(batch)).tolist() == ends
    assert np.flatnonzero(stream.active_T).tolist() == ends
    assert stream.weight_T[ends].tolist() == [0.25] * 4
    values = torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss, _ = stream_loss(prepared, stream, np.asarray(ends), values)
    assert loss.item() == pytest.approx((0.31326 + 3.04859) / 2, abs=1e-5)


def test_impossible_combinations_are_refused():
    value = StreamSpec("value", make_part("objective", "value"), make_part("aggregation", "token_mean"))
    policy = StreamSpec("pg", make_part("objective", "ppo_clip"), make_part("aggregation", "token_mean"))
    with pytest.raises(AlgorithmError, match="trains a critic only, and nothing for the policy"):
        check(Algorithm("mine", (value,)))
    with pytest.raises(AlgorithmError, match=r"column 'return'.*'group_normalised'\) does not"):
        resolve({"kind": "ppo", "credit": {"kind": "group_normalised"}})
    both = Algorithm(
        "mine", (value, policy), make_part("credit", "gae"), proximal="recompute", produces="reward_model"
    )
    with pytest.raises(AlgorithmError, match="trains a reward model, but has an objective of the policy"):
        check(both)


def test_ppo_from_a_recipes_words():
    algorithm = resolve(
        {"kind": "ppo", "credit": {"lam": 1.0, "kl": 0.05}, "value": {"clip": None}, "clip": 0.1}
    )
    assert algorithm.critic
    assert algorithm.annotations(1) == {"value", "ref_logp", "proximal_logp"}
    assert resolve("ppo").annotations(1) == {"value"}
    assert dict(algorithm.streams[-1].objective.options) == {"clip": None}


def stage(**more: Any) -> Recipe:
    tasks = [{"source": "generated:addition"}]
    return Recipe.model_validate({"stages": [{"name": "a", "tasks": tasks, "steps": 2, **more}]})


def test_planning_says_what_a_credit_lacks_and_what_a_critic_costs():
    recipe = stage(algorithm={"kind": "grpo", "credit": "gae"})
    [problem] = plan(recipe, algorithms={"a": resolve(recipe.stages[0].algorithm)}).problems
    assert "credit gae) needs value: it trains no critic; take algorithm ppo" in problem
    recipe = stage(algorithm="ppo", batch={"group": 1})
    made = plan(recipe, algorithms={"a": resolve("ppo")}).check()
    memory = made.stage("a").memory
    assert memory["trainer: critic, its gradients and moments"] == 16 * (made.parameters or 0)


def test_a_bench_stage_plays_policies_only():
    tasks = [{"source": "generated:addition"}]
    train = {"tasks": tasks, "steps": 2}
    stages = [
        {"name": "a", "mode": "train", "algorithm": "sft", **train},
        {"name": "b", "mode": "train", "algorithm": "reward_model", **train},
        {"name": "c", "mode": "bench", "eval": {"tasks": [{**tasks[0], "split": "test"}]}},
    ]
    recipe = Recipe.model_validate({"stages": stages})
    made = plan(recipe, algorithms={"a": resolve("sft"), "b": resolve("reward_model")})
    assert made.stage("c").evaluations == 2  # the start and a


def test_planning_refuses_an_evaluation_of_a_reward_model():
    held = {"tasks": [{"source": "generated:addition", "split": "test"}]}
    recipe = stage(algorithm="reward_model", mode="train", eval=held)
    problems = plan(recipe, algorithms={"a": resolve("reward_model")}).problems
    assert any("scores and answers nothing: take out eval.tasks" in p for p in problems)
