"""What the named algorithms choose, that their options arrive; the REC family against a padded reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.algorithms.test_objectives_rl import branched, inputs, line_mean, logits_for, ours, padded, run

from trivet.algorithms import AlgorithmError, prepare, resolve
from trivet.algorithms.objectives import CISPO, DPPO, REC, SAPO

torch = pytest.importorskip("torch")

DEFAULTS: list[tuple[str, str, str, Any, dict[str, Any]]] = [
    # kind, credit, aggregation, proximal, options of the objective as the papers have them
    ("grpo", "group_normalised", "sequence_mean", "recompute", {"kind": "ppo_clip", "clip": (0.2, 0.2)}),
    ("dapo", "group_normalised", "token_mean", "recompute", {"kind": "ppo_clip", "clip": (0.2, 0.28)}),
    ("gspo", "group_normalised", "sequence_mean", "recompute", {"kind": "gspo", "clip": (3e-4, 4e-4)}),
    ("gmpo", "group_normalised", "sequence_mean", "recompute", {"kind": "gmpo", "clip": (0.4, 0.4)}),
    ("cispo", "group_normalised", "token_mean", "recompute", {"kind": "cispo", "bounds": (0.0, 5.0)}),
    ("sapo", "group_normalised", "sequence_mean", "recompute", {"positive": 1.0, "negative": 1.05}),
    ("dppo", "group_normalised", "token_mean", "behaviour", {"kind": "dppo", "divergence": "tv"}),
    ("topr", "mean_only", "sequence_sum", None, {"kind": "topr", "bounds": (0.0, 1.0), "unit": "row"}),
    ("sppo", "mean_only", "token_mean", "behaviour", {"kind": "sppo", "epsilon": 0.3}),
    ("is_reinforce", "mean_only", "sequence_sum", "behaviour", {"kind": "is_reinforce", "cap": None}),
    ("rec", "mean_only", "token_mean", "behaviour", {"mode": "one_side", "weight": "none", "over": "token"}),
]


@pytest.mark.parametrize(("kind", "credit", "aggregation", "proximal", "options"), DEFAULTS)
def test_what_a_name_stands_for(kind, credit, aggregation, proximal, options):
    algorithm = resolve(kind)
    stream = algorithm.streams[0]
    assert algorithm.credit is not None
    assert (algorithm.credit.name, stream.aggregation.name) == (credit, aggregation)
    assert algorithm.proximal == proximal
    expected = {name: value for name, value in options.items() if name != "kind"}
    assert stream.objective.name == options.get("kind", kind)
    assert {name: getattr(stream.objective.call, name) for name in expected} == expected
    # A ratio that starts at the sampler, or an objective with a weight of its own, needs no second weight.
    names = [part.name for part in stream.corrections]
    assert names == (["token_tis"] if proximal == "recompute" else [])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"kind": "dppo", "divergence": "kl", "bounds": [0.1, 0.2]}, DPPO("kl", (0.1, 0.2))),
        ({"kind": "cispo", "bounds": [0.5, 3.0]}, CISPO((0.5, 3.0))),
        ({"kind": "sapo", "positive": 2.0, "negative": 3.0}, SAPO(2.0, 3.0)),
        (
            {"kind": "rec", "mode": "ring", "weight": "advantage", "clip": 0.1, "temperature": 2.0},
            REC("ring", "advantage", (0.1, 0.1), temperature=2.0),
        ),
        (
            {"kind": "rec", "weight": "importance", "outer": [0.7, 3.0], "over": "row"},
            REC(weight="importance", outer=(0.7, 3.0), over="row"),
        ),
    ],
    ids=str,
)
def test_options_arrive_at_the_objective(spec, expected):
    assert resolve(spec).streams[0].objective.call == expected


def test_rec_over_answers_weighs_answers_alike():
    assert resolve({"kind": "rec", "over": "row"}).streams[0].aggregation.name == "sequence_mean"
    assert resolve({"kind": "rec", "over": "rollout"}).streams[0].unit == "rollout"


def test_defaults_of_the_objectives_themselves():
    # cispo: 6 is cut to 5. sapo, A = -1, rho 2: (4 / 1.05) sigmoid(1.05) = 3.809524 * 0.740775 = 2.822
    assert run(CISPO(), inputs([6.0], [1]))[1] == pytest.approx([-5.0])
    assert run(SAPO(), inputs([2.0], [-1]))[0] == pytest.approx([4 / 1.05 / (1 + math.exp(-1.05))])


def test_dppo_truncates_its_weight():
    # q 0.001 -> p 0.05: 0.049 away, inside 0.15; rho 50 is cut to 20, or to the 4 asked for
    x = inputs([50.0], [1], logp=np.log([0.05]))
    assert run(DPPO(), x)[1] == pytest.approx([-20.0])
    x = inputs([50.0], [1], logp=np.log([0.05]))
    assert run(DPPO(cap=4.0), x)[1] == pytest.approx([-4.0])


def test_rec_bounds_the_weight_of_an_advantage():
    # exp(30 / 1) is bounded at exp(20); exp(-30) at exp(-20)
    _, grad, _ = run(REC("none", "advantage"), inputs([1, 1], [30, -30]))
    assert grad == pytest.approx([-30 * math.exp(20), 30 * math.exp(-20)])


def test_topr_wants_to_know_the_sampler(make_group):
    batch = branched(make_group)
    trained = np.flatnonzero(batch.train_T > 0)
    batch.logprob_T[trained[0]] = np.nan
    with pytest.raises(AlgorithmError, match="1 trained tokens have no behaviour log-probability"):
        prepare(batch, resolve({"kind": "topr", "credit": {"kind": "reinforce", "baseline": -9.0}}))


# -- REC against the padded reference ------------------------------------------------------------


def rec(logp, old, mu, A, mask, *, keep, weight=lambda r, A: 1.0, over=False):
    d = (logp - old).detach()
    r = (line_mean(d, mask) if over else d).exp()
    return -(keep(r, A) * weight(r, A)) * A * logp


def one_side(r, A):
    return torch.where(A > 0, r <= 1.3, torch.where(A < 0, r >= 0.8, r < torch.inf)).double()


def two_side(r, A):
    return ((r >= 0.8) & (r <= 1.3)).double()


def ring(r, A):
    back = ((A > 0) & (r <= 0.5)) | ((A < 0) & (r >= 2.0))
    return (two_side(r, A).bool() | back).double()


def everywhere(r, A):
    return torch.ones_like(r * A)


FAMILY: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"mode": "none"}, {"keep": everywhere}, True),
    ({"mode": "one_side", "weight": "importance"}, {"keep": one_side, "weight": lambda r, A: r}, False),
    ({"mode": "two_side"}, {"keep": two_side}, False),
    ({"mode": "ring"}, {"keep": ring}, False),
    (
        {"mode": "none", "weight": "advantage", "temperature": 0.5},
        {"keep": everywhere, "weight": lambda r, A: (A / 0.5).exp()},
        True,
    ),
    (
        {"mode": "one_side", "weight": "importance", "over": "row"},
        {"keep": one_side, "weight": lambda r, A: r, "over": True},
        False,
    ),
    ({"mode": "one_side", "over": "rollout"}, {"keep": one_side, "over": True}, False),
]


@pytest.mark.parametrize(
    ("spec", "formula", "whole"), FAMILY, ids=lambda v: str(v) if "mode" in str(v) else ""
)
def test_rec_against_the_padded_reference(make_group, spec, formula, whole):
    batch = branched(make_group, seed=3)
    algorithm = resolve({"kind": "rec", "clip": [0.2, 0.3], "outer": [0.5, 1.0], **spec})
    prepared = prepare(batch, algorithm)
    logits, reference = logits_for(batch), logits_for(batch)
    loss, stats = ours(prepared, logits, [np.flatnonzero(prepared.trained_T)])
    rewards = batch.reward_N.reshape(2, 4)
    advantage_N = (rewards - rewards.mean(1, keepdims=True)).reshape(-1).tolist()
    over = spec.get("over", "token")
    how = {
        "proximal": "behaviour",
        "aggregation": "token_mean" if over == "token" else "sequence_mean",
        "unit": "rollout" if over == "rollout" else "row",
    }
    expected = padded(batch, reference, advantage_N, lambda *a: rec(*a, **formula), **how)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-9, atol=1e-13)
    assert logits.grad.abs().max() > 1e-3
    clipped = float(stats["pg/clipped"])
    assert clipped == 0 if whole else 0 < clipped < float(stats["pg/tokens"])
