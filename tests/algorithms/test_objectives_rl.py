"""Policy-gradient objectives: numbers by hand, and value and gradient against a plain, slow reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, finalise, merge, prepare, resolve, stream_loss
from trivet.algorithms.base import Batch, ObjectiveInputs, PreparedBatch
from trivet.algorithms.objectives import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    REC,
    SAPO,
    SPPO,
    TOPR,
    ISReinforce,
    PPOClip,
)
from trivet.trainer.batch import collate
from trivet.types import Message, Rollout, Scored, Task, Termination, Trace

torch = pytest.importorskip("torch")


def inputs(
    ratio: Any, advantage: Any, *, unit: Any = None, logp: Any = None, behaviour: Any = None
) -> ObjectiveInputs:
    """log pi (-1 unless given) and a proximal policy at these ratios; every weight is 1."""
    now = np.full(len(ratio), -1.0) if logp is None else np.asarray(logp, float)
    proximal = now - np.log(ratio)

    def put(a: Any) -> Any:
        return torch.tensor(np.asarray(a), dtype=torch.float64)

    unit = np.zeros(len(ratio), int) if unit is None else np.asarray(unit)
    return ObjectiveInputs(
        logp_P=put(now).requires_grad_(),
        weight_P=put(np.ones(len(ratio))),
        unit_P=torch.tensor(unit),
        units=int(unit.max()) + 1,
        behaviour_P=put(proximal if behaviour is None else behaviour),
        proximal_P=put(proximal),
        advantage_P=put(advantage),
    )


def run(objective: Any, x: ObjectiveInputs) -> tuple[list[float], list[float], dict[str, float]]:
    terms, stats = objective(x)
    terms.sum().backward()
    assert x.logp_P.grad is not None
    return terms.tolist(), x.logp_P.grad.tolist(), {name: float(v) for name, v in stats.items()}


# -- by hand -------------------------------------------------------------------------------------


def test_dual_clip_by_hand():
    # A = -1: rho 2 -> min(-2, -1.2) = -2, above -3: loss 2; rho 4 -> -4 < -3: loss 3, no gradient.
    # A = +1: rho 4 -> clipped at 1.2 as ever. A = -1, rho 0.5 -> -0.8: the lower clip, no gradient.
    terms, grad, stats = run(PPOClip((0.2, 0.2), dual=3.0), inputs([2, 4, 4, 0.5], [-1, -1, 1, -1]))
    assert terms == pytest.approx([2.0, 3.0, -1.2, 0.8])
    assert grad == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert stats["dual_clipped"] == 1
    assert stats["clipped"] == 3


def test_gspo_by_hand():
    # Unit 0: ratios 1.1 and 1.21: s = 1.1^1.5 = 1.153690. A = +1, clip (0.1, 0.1): clipped at 1.1.
    # Unit 1: ratios 1.0 and 0.81: s = 0.9. A = +2: -1.8 a token; the clip is not reached from above.
    x = inputs([1.1, 1.21, 1.0, 0.81], [1, 1, 2, 2], unit=[0, 0, 1, 1])
    terms, grad, stats = run(GSPO((0.1, 0.1)), x)
    assert terms == pytest.approx([-1.1, -1.1, -1.8, -1.8])
    assert grad == pytest.approx([0.0, 0.0, -1.8, -1.8])
    assert stats["unit/ratio"] == pytest.approx(1.1**1.5 + 0.9)
    assert stats["clipped"] == 2


def test_cispo_by_hand():
    # log pi = -1: l = min(rho, 2) A; the gradient is -min(rho, 2) A, also where the weight is clipped.
    terms, grad, stats = run(CISPO((0.0, 2.0)), inputs([0.5, 4.0, 4.0], [1, 1, -1]))
    assert terms == pytest.approx([0.5, 2.0, -2.0])
    assert grad == pytest.approx([-0.5, -2.0, 2.0])
    assert stats["clipped"] == 2


def test_is_reinforce_by_hand():
    terms, grad, stats = run(ISReinforce(), inputs([0.5, 4.0], [1, -1]))
    assert terms == pytest.approx([0.5, -4.0])
    assert grad == pytest.approx([-0.5, 4.0])
    assert stats["clipped"] == 0
    terms, grad, stats = run(ISReinforce(cap=3.0), inputs([0.5, 4.0], [1, -1]))
    assert grad == pytest.approx([-0.5, 3.0])
    assert stats["clipped"] == 1


def test_sapo_by_hand():
    # rho 1: gate (4 / tau) / 2 = 2 / tau; gradient 4 s (1 - s) rho = 1 whatever tau.
    # rho 2, A = +1, tau 1: 4 sigmoid(1) = 2.924234; gradient 4 * 0.731059 * 0.268941 * 2 = 1.572895
    # rho 2, A = -1, tau 2: 2 sigmoid(2) = 1.761594; gradient 4 * 0.880797 * 0.119203 * 2 = 0.839948
    terms, grad, stats = run(SAPO(1.0, 2.0), inputs([1, 1, 2, 2], [1, -1, 1, -1]))
    assert terms == pytest.approx([-2.0, 1.0, -2.924234, 1.761594], abs=1e-6)
    assert grad == pytest.approx([-1.0, 1.0, -1.572895, 0.839948], abs=1e-5)
    assert stats["gate"] == pytest.approx(2 + 0.786448 + 0.419974, abs=1e-5)


def test_sppo_by_hand():
    # log 1.3 = 0.262364. Ratio 1.2: -A log 1.2, gradient -A; 2 and 0.5 lie outside: no gradient, either sign.
    terms, grad, stats = run(SPPO(0.3), inputs([1.2, 2.0, 0.5, 2.0], [1, 1, 1, -1]))
    assert terms == pytest.approx([-math.log(1.2), -0.262364, 0.262364, 0.262364], abs=1e-6)
    assert grad == pytest.approx([-1.0, 0.0, 0.0, 0.0])
    assert stats["clipped"] == 3


def test_topr_by_hand():
    # Unit 0 is good: weight 1 whatever its ratio. Unit 1 is bad, 0.5 * 0.8 = 0.4 as likely as it was: 0.4.
    # Unit 2 is bad and 2 * 1.5 = 3 times as likely: cut off at 1. log pi = -1: l = a A, gradient -a A.
    x = inputs([9, 9, 0.5, 0.8, 2, 1.5], [1, 1, -1, -1, -2, -2], unit=[0, 0, 1, 1, 2, 2])
    terms, grad, stats = run(TOPR(), x)
    assert terms == pytest.approx([1.0, 1.0, -0.4, -0.4, -2.0, -2.0])
    assert grad == pytest.approx([-1.0, -1.0, 0.4, 0.4, 2.0, 2.0])
    assert stats["unit/tapered"] == 2
    assert stats["taper"] == pytest.approx(2 + 0.8 + 2)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        # rho: 1.1, 1.5, 0.5, 4, 0.3 with A: 1, 1, -1, -1, 1; log pi = -1, so l = factor A
        (REC("none"), [1, 1, -1, -1, 1]),
        (REC("one_side"), [1, 0, 0, -1, 1]),
        (REC("two_side"), [1, 0, 0, 0, 0]),
        (REC("ring"), [1, 0, 0, -1, 1]),  # 4 >= 1 + 2 with A < 0, and 0.3 <= 1 - 0.6 with A > 0, come back
        (REC("ring", outer=(0.8, 4.0)), [1, 0, 0, 0, 0]),
        (REC("one_side", "importance"), [1.1, 0, 0, -4, 0.3]),
        (REC("none", "advantage", temperature=2.0), [1.648721, 1.648721, -0.606531, -0.606531, 1.648721]),
    ],
)
def test_rec_by_hand(objective, expected):
    terms, grad, stats = run(objective, inputs([1.1, 1.5, 0.5, 4, 0.3], [1, 1, -1, -1, 1]))
    assert terms == pytest.approx(expected, abs=1e-6)
    assert grad == pytest.approx([-e for e in expected], abs=1e-6)
    assert stats["clipped"] == sum(e == 0 for e in expected)


def test_rec_over_rows_takes_the_mean_ratio():
    # Row 0: 4 and 0.3: s = sqrt(1.2) = 1.0954, inside; row 1: 1.5 and 1.5, outside for A > 0.
    x = inputs([4, 0.3, 1.5, 1.5], [1, 1, 1, 1], unit=[0, 0, 1, 1])
    terms, _, stats = run(REC("one_side", "importance", over="row"), x)
    assert terms == pytest.approx([math.sqrt(1.2), math.sqrt(1.2), 0, 0])
    assert stats["clipped"] == 2


def test_gmpo_by_hand():
    # Unit 0, A = 1: logs 0.2 and 1.0, the latter cut to 0.4: exp(0.3) = 1.349859; d/d logp = -s / 2 for the
    # first token on each of the two terms: -s. Unit 1, A = -1: logs -1.0 (cut to -0.4) and 1.0 (not cut
    # where A < 0): exp(0.3); gradient +s for the second token only.
    x = inputs(np.exp([0.2, 1.0, -1.0, 1.0]), [1, 1, -1, -1], unit=[0, 0, 1, 1])
    terms, grad, stats = run(GMPO((0.4, 0.4)), x)
    s = math.exp(0.3)
    assert terms == pytest.approx([-s, -s, s, s])
    assert grad == pytest.approx([-s, 0.0, 0.0, s])
    assert stats["clipped"] == 2


def test_dppo_by_hand():
    # tv, bound 0.15. q -> p: 0.1 -> 0.3 with A = 1: 0.2 away, masked; with A = -1: pulled back, weight 3.
    # 0.001 -> 0.01: ratio 10 but only 0.009 away: kept (a ratio's clip would cut it).
    # 0.9 -> 0.7, A = -1: 0.2 away, masked, though the ratio 0.78 is near 1.
    q, p = np.array([0.1, 0.1, 0.001, 0.9]), np.array([0.3, 0.3, 0.01, 0.7])
    terms, grad, stats = run(DPPO(), inputs(p / q, [1, -1, 1, -1], logp=np.log(p)))
    assert grad == pytest.approx([0, 3, -10, 0])
    assert terms == pytest.approx([0, 3 * math.log(0.3), -10 * math.log(0.01), 0])
    assert stats["clipped"] == 2
    assert stats["divergence"] == pytest.approx(0.2 + 0.2 + 0.009 + 0.2)
    # kl of (0.1 | 0.3): 0.1 log(1/3) + 0.9 log(0.9/0.7) = -0.109861 + 0.226183 = 0.116322 > 0.05
    # (0.001 | 0.01): 0.001 log 0.1 + 0.999 log(0.999/0.99) = -0.002303 + 0.009041 = 0.006738
    # (0.9 | 0.7): 0.9 log(9/7) + 0.1 log(1/3) = 0.226183 - 0.109861 = 0.116322
    _, grad, stats = run(DPPO("kl"), inputs(p / q, [1, -1, 1, -1], logp=np.log(p)))
    assert grad == pytest.approx([0, 3, -10, 0])
    assert stats["divergence"] == pytest.approx(3 * 0.116322 + 0.006738, abs=2e-6)
    _, grad, _ = run(DPPO("kl", (0.2, 0.1)), inputs(p / q, [1, -1, 1, -1], logp=np.log(p)))
    assert grad == pytest.approx([0, 3, -10, 7 / 9])  # the lower bound is the one for A < 0


def test_bad_options_are_refused():
    for spec, why in [
        ({"kind": "ppo_clip", "clip": [1.5, 0.2]}, "lower part"),
        ({"kind": "ppo_clip", "dual": 1.0}, "greater than 1"),
        ({"kind": "ppo_clip", "clip": [0.2, 2.5], "dual": 3.0}, "dual 3.0 must lie above"),
        ({"kind": "cispo", "bounds": [0.0, 0.5]}, "high be at least 1"),
        ({"kind": "gspo", "unit": "group"}, "unit"),
        ({"kind": "gmpo", "clip": [-0.1, 0.4]}, "not negative"),
        ({"kind": "topr", "bounds": [2.0, 1.0]}, "the lower first"),
        ({"kind": "rec", "mode": "ring", "outer": [0.1, 2.0]}, "must lie around"),
        ({"kind": "sapo", "positive": 0}, "positive"),
        ({"kind": "dppo", "bounds": [0.1, -0.1]}, "bounds"),
    ]:
        with pytest.raises(AlgorithmError, match=why):
            resolve({"kind": "policy_gradient", "objective": spec})
    with pytest.raises(AlgorithmError, match="belong together"):
        resolve({"kind": "rec", "regulariser": "k2"})
    with pytest.raises(AlgorithmError, match="would weigh twice"):
        resolve({"kind": "grpo", "objective": "topr", "tis": [0.5, 2.0]})
    assert not resolve({"kind": "grpo", "objective": "topr"}).streams[0].corrections
    with pytest.raises(AlgorithmError, match="takes a ratio to the proximal policy"):
        resolve({"kind": "gspo", "proximal": None, "tis": None})


# -- against a plain, slow, padded reference -----------------------------------------------------


def branched(make_group: Any, seed: int = 0) -> Batch:
    """Two groups of four; every second rollout has two rows (a second branch), some several turns."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(2):
        rollouts = []
        for a in range(4):
            trace = Trace()
            node = trace.add(-1, [1, 2])
            for n in rng.integers(1, 4, 1 + a // 2):
                node = trace.add_sampled(node, rng.integers(4, 9, n), -rng.uniform(0.5, 2.5, n), 0)
                node = trace.add(node, [3])
            if a % 2:
                n = int(rng.integers(2, 5))
                root = trace.add(-1, [2, 1])
                trace.add_sampled(root, rng.integers(4, 9, n), -rng.uniform(0.5, 2.5, n), 0)
            score = Scored(float(a) - 0.5 * g * (a == 2))
            task = Task("test", (Message("user", "?"),))
            rollouts.append(Rollout(task, trace, score, Termination.FINISHED, attempt=a))
        groups.append(make_group(f"g{g}", rollouts))
    batch = collate(groups)
    batch.annotations["proximal_logp"] = -rng.uniform(0.5, 2.5, batch.tokens)
    batch.annotations["ref_logp"] = -rng.uniform(0.5, 2.5, batch.tokens)
    assert batch.rows > batch.rollouts
    return batch


def logp_of(batch: Batch, logits: Any, index: np.ndarray) -> Any:
    ids = torch.from_numpy(batch.ids_T[index].astype(np.int64))
    return torch.log_softmax(logits[index - 1], -1).gather(1, ids[:, None])[:, 0]


def logits_for(batch: Batch) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch.tokens, 9, generator=generator, dtype=torch.float64, requires_grad=True)


def ours(prepared: PreparedBatch, logits: Any, pieces: list[np.ndarray]) -> tuple[Any, dict[str, Any]]:
    total, stats = torch.zeros((), dtype=torch.float64), {}
    for index in pieces:
        for stream in prepared.streams:
            loss, more = stream_loss(prepared, stream, index, logp_of(prepared.batch, logits, index))
            total, stats = total + loss, merge(stats, more)
    return total, stats


def padded(
    batch: Batch, logits: Any, advantage_N: list[float], formula: Callable[..., Any], **how: Any
) -> Any:
    """One padded matrix per quantity, a line per unit; the loss of a line is a formula over its tokens."""
    unit_T = batch.row_T if how.get("unit", "row") == "row" else batch.rollout_T
    lines = [np.flatnonzero((unit_T == u) & (batch.train_T > 0)) for u in range(int(unit_T.max()) + 1)]
    longest = max(map(len, lines))
    logp, old, mu, mask, advantage, count = (
        torch.zeros(len(lines), longest, dtype=torch.float64) for _ in range(6)
    )
    n_N = [int(((batch.rollout_T == n) & (batch.train_T > 0)).sum()) for n in range(batch.rollouts)]
    for u, at in enumerate(lines):
        if not len(at):
            continue
        n = int(batch.rollout_T[at[0]])
        logp[u, : len(at)] = logp_of(batch, logits, at)
        mu[u, : len(at)] = torch.from_numpy(batch.logprob_T[at].astype(np.float64))
        old[u, : len(at)] = torch.from_numpy(batch.annotations["proximal_logp"][at])
        mask[u, : len(at)], advantage[u], count[u] = 1, advantage_N[n], n_N[n]
    if how["proximal"] == "behaviour":
        old = mu
    loss = formula(logp, old, mu, advantage, mask) * mask
    total = {
        "token_mean": mask.sum(),
        "sequence_mean": count.clamp(min=1) * batch.rollouts,
        "sequence_sum": batch.rollouts,
    }[how["aggregation"]]
    return (loss / total).sum()


def ppo(logp, old, mu, A, mask, low=0.2, high=0.2, dual=None):
    r = (logp - old).exp()
    loss = torch.maximum(-r * A, -r.clip(1 - low, 1 + high) * A)
    return loss if dual is None else torch.where(A < 0, torch.minimum(loss, -dual * A), loss)


def line_mean(values, mask):
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None]


def gspo(logp, old, mu, A, mask):
    s = line_mean(logp - old, mask).exp()
    return torch.maximum(-s * A, -s.clip(0.9, 1.1) * A).expand_as(logp)


def gmpo(logp, old, mu, A, mask):
    d = logp - old
    d = torch.where(A > 0, d.clip(max=0.3), d.clip(min=-0.2))
    return -A * line_mean(d, mask).exp()


def topr(logp, old, mu, A, mask):
    ratio = ((logp - mu) * mask).sum(1, keepdim=True).exp()
    return -torch.where(A > 0, 1.0, ratio.clip(0, 1)).detach() * A * logp


def cispo(logp, old, mu, A, mask):
    return -(logp - old).exp().clip(0.0, 1.5).detach() * A * logp


def is_reinforce(logp, old, mu, A, mask):
    return -(logp - old).exp() * A  # the surrogate whose gradient it has


def sapo(logp, old, mu, A, mask):
    tau = 1.0 + 0.05 * (A < 0).double()
    return -4 / tau / (1 + (-tau * ((logp - old).exp() - 1)).exp()) * A


def sppo(logp, old, mu, A, mask):
    return -A * (logp - old).exp().clip(1 / 1.3, 1.3).log()


def dppo(logp, old, mu, A, mask):
    p, q = logp.exp(), old.exp()
    leaves = ((A > 0) & (p - q > 0.05)) | ((A < 0) & (q - p > 0.05))
    return -torch.where(leaves, 0.0, (p / q).detach()) * A * logp


def rec(logp, old, mu, A, mask):
    r = (logp - old).exp().detach()
    return -A * torch.where(A > 0, r <= 1.2, r >= 0.8) * logp


CASES: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
    ({"kind": "dapo"}, lambda *a: ppo(*a, high=0.28), {"aggregation": "token_mean"}),
    ({"kind": "grpo", "objective": {"dual": 1.5}}, lambda *a: ppo(*a, dual=1.5), {}),
    ({"kind": "gspo", "clip": 0.1}, gspo, {}),
    ({"kind": "gspo", "clip": 0.1, "unit": "rollout"}, gspo, {"unit": "rollout"}),
    ({"kind": "gmpo", "clip": [0.2, 0.3]}, gmpo, {}),
    ({"kind": "gmpo", "clip": [0.2, 0.3], "unit": "rollout"}, gmpo, {"unit": "rollout"}),
    ({"kind": "cispo", "bounds": [0.0, 1.5]}, cispo, {"aggregation": "token_mean"}),
    ({"kind": "sapo"}, sapo, {}),
    ({"kind": "topr"}, topr, {"aggregation": "sequence_sum", "proximal": None}),
    ({"kind": "topr", "unit": "rollout"}, topr, {"aggregation": "sequence_sum", "unit": "rollout"}),
    ({"kind": "sppo"}, sppo, {"aggregation": "token_mean", "proximal": "behaviour"}),
    ({"kind": "rec"}, rec, {"aggregation": "token_mean", "proximal": "behaviour"}),
    (
        {"kind": "dppo", "bounds": [0.05, 0.05]},
        dppo,
        {"aggregation": "token_mean", "proximal": "behaviour"},
    ),
    ({"kind": "is_reinforce"}, is_reinforce, {"aggregation": "sequence_sum", "proximal": "behaviour"}),
]


@pytest.mark.parametrize(
    ("spec", "formula", "how"), CASES, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_against_the_padded_reference(make_group, spec, formula, how):
    batch = branched(make_group)
    how = {"aggregation": "sequence_mean", "proximal": "recompute", **how}
    algorithm = resolve({**spec, "credit": "mean_only", "tis": None})
    prepared = prepare(batch, algorithm)
    logits, reference = logits_for(batch), logits_for(batch)
    everything = [np.flatnonzero(prepared.trained_T)]
    loss, stats = ours(prepared, logits, everything)
    rewards = batch.reward_N.reshape(2, 4)
    advantage_N = (rewards - rewards.mean(1, keepdims=True)).reshape(-1).tolist()
    expected = padded(batch, reference, advantage_N, formula, **how)
    loss.backward()
    expected.backward()
    if spec["kind"] != "is_reinforce":  # its value is another's, its gradient that of the surrogate
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-9, atol=1e-13)
    assert logits.grad.abs().max() > 1e-3
    assert 0 <= finalise(stats).get("pg/clipped", 0.5) <= 1


@pytest.mark.parametrize("spec", [case[0] for case in CASES], ids=str)
def test_the_cut_does_not_matter(make_group, spec):
    """Unit level: a piece per rollout; token level: any three pieces."""
    batch = branched(make_group)
    prepared = prepare(batch, resolve({**spec, "tis": None}))
    whole, cut = logits_for(batch), logits_for(batch)
    index = np.flatnonzero(prepared.trained_T)
    by_unit = [index[batch.rollout_T[index] == n] for n in range(batch.rollouts)]
    pieces = by_unit if prepared.streams[0].level == "unit" else np.array_split(index, 3)
    first, first_stats = ours(prepared, whole, [index])
    second, second_stats = ours(prepared, cut, pieces)
    first.backward()
    second.backward()
    torch.testing.assert_close(whole.grad, cut.grad, rtol=1e-9, atol=1e-13)
    assert finalise(first_stats) == pytest.approx(finalise(second_stats), abs=1e-12)


SIMPLE = [
    PPOClip(),
    PPOClip(dual=3.0),
    GSPO(),
    GMPO(),
    CISPO(),
    ISReinforce(),
    SAPO(),
    DPPO(),
    DPPO("kl"),
    TOPR(),
]


@pytest.mark.parametrize("objective", SIMPLE, ids=repr)
def test_on_policy_every_gradient_is_the_policy_gradient(objective):
    """At ratio 1 nothing is clipped: the gradient of a unit is -A, token by token."""
    x = inputs([1.0] * 4, [1, 1, -2, -2], unit=[0, 0, 1, 1])
    _, grad, stats = run(objective, x)
    assert grad == pytest.approx([-1, -1, 2, 2])
    assert stats.get("clipped", 0) == 0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-300, 300), min_size=2, max_size=6),
    st.lists(st.floats(-5, 5), min_size=6, max_size=6),
    st.sampled_from([*SIMPLE, SPPO(), REC(), REC("ring"), REC("none", "advantage", temperature=0.01)]),
)
def test_no_ratio_makes_a_loss_infinite(gaps, advantage, objective):
    logp = np.linspace(-0.001, -9, len(gaps))
    x = inputs(np.ones(len(gaps)), advantage[: len(gaps)], logp=logp, behaviour=logp - np.asarray(gaps))
    assert x.proximal_P is not None
    x.proximal_P = x.proximal_P - torch.tensor(gaps, dtype=torch.float64)
    terms, grad, stats = run(objective, x)
    assert np.isfinite(terms).all()
    assert np.isfinite(grad).all()
    assert all(math.isfinite(v) for v in stats.values())


def test_broken_weights_show():
    """A log-probability that is no number must reach the loss: the trainer refuses such an update."""
    x = inputs([1.0, 1.0], [1, 1])
    x.logp_P = torch.tensor([math.nan, -1.0], dtype=torch.float64)
    for objective in (*SIMPLE, SPPO(), REC()):
        assert torch.isnan(objective(x)[0]).any(), objective


def test_rec_with_a_regulariser(make_group):
    """k2 to the sampler: weight times the mean of d^2 / 2, also where the advantage is 0."""
    batch = branched(make_group)
    batch.reward_N[:] = 1.0
    spec = {"kind": "rec", "regulariser": "k2", "regulariser_weight": 0.3}
    prepared = prepare(batch, resolve(spec))
    index = np.flatnonzero(prepared.trained_T)
    assert len(index) == (batch.train_T > 0).sum()
    logits = logits_for(batch)
    loss, _ = ours(prepared, logits, [index])
    d = logp_of(batch, logits, index).detach().numpy() - batch.logprob_T[index].astype(np.float64)
    assert loss.item() == pytest.approx(0.3 * (d**2).mean() / 2)
    forward = prepare(batch, resolve({**spec, "regulariser": "forward_kl"}))
    loss, _ = ours(forward, logits, [index])
    assert loss.item() == pytest.approx(-0.3 * logp_of(batch, logits, index).detach().numpy().mean())
