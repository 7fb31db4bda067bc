"""Losses and gradients against a plain, slow, padded reference; the cut must not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from trivet.algorithms import (
    AlgorithmError,
    finalise,
    merge,
    prepare,
    register_correction,
    register_objective,
    resolve,
    stream_loss,
)
from trivet.algorithms.base import ObjectiveInputs, StreamSpec
from trivet.algorithms.corrections import TokenTIS
from trivet.algorithms.objectives import PPOClip
from trivet.algorithms.registry import make_part
from trivet.trainer.batch import collate, split

torch = pytest.importorskip("torch")


def inputs(logp, **arrays):
    logp = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    filled = {"weight_P": np.full(len(logp), 1 / len(logp)), "behaviour_P": logp.detach().numpy(), **arrays}
    tensors = {name: torch.tensor(np.asarray(a), dtype=torch.float64) for name, a in filled.items()}
    return ObjectiveInputs(logp_P=logp, unit_P=torch.zeros(len(logp), dtype=torch.int64), units=0, **tensors)


def test_log_probabilities_at_a_temperature():
    """log softmax of logits / T, not logits, nor raw log-probabilities divided by T."""
    logits = torch.tensor([1.0, 0.0, -1.0, -2.0], dtype=torch.float64)
    logp = torch.log_softmax(logits / 0.6, -1)
    assert logp[0].item() == pytest.approx(-0.2081, abs=5e-5)
    assert logp[3].item() == pytest.approx(-5.2081, abs=5e-5)
    # The sampler said the same: on unchanged weights the ratio is 1 and nothing is clipped or corrected.
    x = inputs(logp.tolist(), advantage_P=np.ones(4), proximal_P=np.round(logp.numpy(), 4))
    _, stats = PPOClip()(x)
    assert stats["ratio"].item() / 4 == pytest.approx(1.0, abs=1e-3)
    assert stats["clipped"].item() == 0


def test_ppo_clip_by_hand():
    ratio = [1.0, 1.5, 1.5, 0.5, 0.5]
    advantage = [1.0, 1.0, -1.0, 1.0, -1.0]
    x = inputs(
        np.log(ratio).tolist(), advantage_P=advantage, proximal_P=np.zeros(5), weight_P=np.full(5, 0.2)
    )
    terms, stats = PPOClip((0.2, 0.2))(x)
    assert (terms / 0.2).tolist() == pytest.approx([-1.0, -1.2, 1.5, -0.5, 0.8])
    terms.sum().backward()
    # d(-w rho A)/d logp = -w rho A where it is not clipped, 0 where it is.
    assert x.logp_P.grad is not None
    assert x.logp_P.grad.tolist() == pytest.approx([-0.2, 0.0, 0.3, -0.1, 0.0])
    assert stats["clipped"].item() == 2
    unclipped, stats = PPOClip(None)(x)
    assert (unclipped / 0.2).tolist() == pytest.approx([-1.0, -1.5, 1.5, -0.5, 0.5])
    assert stats["clipped"].item() == 0


def test_unequal_bounds():
    x = inputs(np.log([1.25, 1.35]).tolist(), advantage_P=[1.0, 1.0], proximal_P=np.zeros(2))
    terms, stats = PPOClip((0.2, 0.28))(x)
    assert (terms * 2).tolist() == pytest.approx([-1.25, -1.28])
    assert stats["clipped"].item() == 1


def test_token_tis_by_hand():
    x = inputs([0.0] * 4, proximal_P=np.log([0.1, 0.5, 1.5, 4.0]), behaviour_P=np.zeros(4))
    factor, stats = TokenTIS((0.5, 2.0))(x)
    assert factor.tolist() == pytest.approx([0.5, 0.5, 1.5, 2.0])
    assert not factor.requires_grad
    assert stats["tis_clipped"].item() == 2
    assert stats["tis_factor"].item() == pytest.approx(4.5)


def test_ratios_without_bound_stay_finite():
    x = inputs([-0.1, -500.0], advantage_P=[-1.0, 1.0], proximal_P=[-900.0, -0.1])
    terms, stats = PPOClip()(x)
    assert torch.isfinite(terms).all()
    assert all(math.isfinite(float(v)) for v in stats.values())


def test_mismatch_statistics():
    x = inputs([-1.0, -2.0, -3.0], advantage_P=np.ones(3), proximal_P=[-1.0, -2.0, -3.0])
    x.behaviour_P = torch.tensor([-1.5, -1.0, math.nan], dtype=torch.float64)
    _, stats = PPOClip()(x)
    assert stats["abs_log_diff"].item() == pytest.approx(1.5)
    assert stats["max/abs_log_diff"].item() == pytest.approx(1.0)
    assert stats["kl_k1"].item() == pytest.approx(-0.5 + 1.0)
    assert stats["kl_k3"].item() == pytest.approx((math.exp(0.5) - 1.5) + math.exp(-1))


# -- against a padded reference ------------------------------------------------------------------


def make_batch(make_rollout, make_group, seed=0):
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(3):
        rollouts = [
            make_rollout(
                None if (g, a) == (1, 2) else float(rng.integers(0, 3)),
                rng.integers(1, 5, rng.integers(1, 4)).tolist(),
                attempt=a,
                rng=rng,
            )
            for a in range(4)
        ]
        groups.append(make_group(f"g{g}", rollouts))
    return collate(groups)


def logits_of(batch, seed=1, vocabulary=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.tokens, vocabulary, generator=generator, dtype=torch.float64, requires_grad=True)


def logp_of(batch, logits, index):
    """Token t is predicted at t - 1 of its row."""
    ids = torch.from_numpy(batch.ids_T[index].astype(np.int64))
    return torch.log_softmax(logits[index - 1], -1).gather(1, ids[:, None])[:, 0]


def ours(prepared, logits, cuts=1):
    total, stats = torch.zeros((), dtype=torch.float64), {}
    for index in np.array_split(np.flatnonzero(prepared.trained_T), cuts):
        logp = logp_of(prepared.batch, logits, index)
        for stream in prepared.streams:
            loss, more = stream_loss(prepared, stream, index, logp)
            total, stats = total + loss, merge(stats, more)
    return total, stats


def padded_grpo(batch, logits, *, aggregation, clip, tis, proximal):
    """GRPO as one would write it first: loops over groups and rollouts, one padded matrix per quantity."""
    sequences = []
    for n in range(batch.rollouts):
        at = np.flatnonzero((batch.rollout_T == n) & (batch.train_T > 0))
        sequences.append(at)
    longest = max(len(s) for s in sequences)
    shape = (batch.rollouts, longest)
    logp, old, behaviour = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(shape, dtype=torch.float64)
    for n, at in enumerate(sequences):
        logp[n, : len(at)] = logp_of(batch, logits, at)
        behaviour[n, : len(at)] = torch.from_numpy(batch.logprob_T[at].astype(np.float64))
        mask[n, : len(at)] = 1
    old = (behaviour if proximal == "behaviour" else logp).detach().clone()
    if "proximal_logp" in batch.annotations:
        for n, at in enumerate(sequences):
            old[n, : len(at)] = torch.from_numpy(batch.annotations["proximal_logp"][at])
    advantage = torch.zeros(batch.rollouts, dtype=torch.float64)
    for g in range(batch.groups):
        members = [n for n in range(batch.rollouts) if batch.group_N[n] == g]
        scored = [n for n in members if not np.isnan(batch.reward_N[n])]
        rewards = torch.tensor([batch.reward_N[n] for n in scored], dtype=torch.float64)
        for n in members:
            if n not in scored:
                mask[n] = 0
        if len(set(rewards.tolist())) > 1:
            for n, reward in zip(scored, rewards, strict=True):
                advantage[n] = (reward - rewards.mean()) / rewards.std()
    ratio = torch.exp(logp - old)
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    factor = torch.exp(old - behaviour).clamp(*tis).detach() if tis else torch.ones_like(gain)
    token_loss = -gain * factor * mask
    if aggregation == "token_mean":
        return token_loss.sum() / mask.sum()
    per_sequence = token_loss.sum(1) / mask.sum(1).clamp(min=1)
    return per_sequence.sum() / (mask.sum(1) > 0).sum()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    ("proximal", "tis", "annotated"),
    [("recompute", (0.5, 2.0), False), ("recompute", (0.8, 1.1), True), ("behaviour", None, False)],
)
def test_grpo_against_the_padded_reference(make_rollout, make_group, aggregation, proximal, tis, annotated):
    batch = make_batch(make_rollout, make_group)
    if annotated:
        rng = np.random.default_rng(3)
        batch.annotations["proximal_logp"] = -rng.uniform(0.2, 3.0, batch.tokens)
    algorithm = resolve({"kind": "grpo", "aggregation": aggregation, "proximal": proximal, "tis": tis})
    logits, reference = logits_of(batch), logits_of(batch)
    loss, stats = ours(prepare(batch, algorithm), logits)
    expected = padded_grpo(batch, reference, aggregation=aggregation, clip=0.2, tis=tis, proximal=proximal)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-10, atol=1e-13)
    assert logits.grad.abs().max() > 1e-3
    assert finalise(stats)["pg/loss"] == pytest.approx(loss.item())


def test_sft_against_torch_cross_entropy(make_group):
    from trivet.types import Message, Rollout, Task, Termination, Trace, Unscored

    rng = np.random.default_rng(5)
    groups = []
    for i, n in enumerate((3, 6, 1)):
        trace = Trace()
        trace.add(trace.add(-1, [1, 2]), rng.integers(0, 9, n), train=1.0)
        task = Task("sft", (Message("user", str(i)),))
        groups.append(make_group(f"s{i}", [Rollout(task, trace, Unscored("-"), Termination.FINISHED)], "sft"))
    batch = collate(groups)
    logits, reference = logits_of(batch), logits_of(batch)
    loss, stats = ours(prepare(batch, resolve("sft")), logits)
    labels = torch.where(
        torch.from_numpy(batch.train_T > 0), torch.from_numpy(batch.ids_T.astype(np.int64)), -100
    )
    expected = torch.nn.functional.cross_entropy(reference[:-1], labels[1:], ignore_index=-100)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-10, atol=1e-13)
    assert finalise(stats) == pytest.approx({"ce/loss": loss.item(), "ce/nll": loss.item(), "ce/tokens": 10})


@pytest.mark.parametrize("cuts", [2, 3, 7, 1000])
def test_the_cut_does_not_matter(make_rollout, make_group, cuts):
    batch = make_batch(make_rollout, make_group)
    prepared = prepare(batch, resolve({"kind": "grpo", "tis": [0.9, 1.1]}))
    whole, cut = logits_of(batch), logits_of(batch)
    first, first_stats = ours(prepared, whole)
    second, second_stats = ours(prepared, cut, cuts)
    first.backward()
    second.backward()
    assert first.item() == pytest.approx(second.item(), abs=1e-12)
    torch.testing.assert_close(whole.grad, cut.grad, rtol=1e-9, atol=1e-13)
    assert finalise(first_stats) == pytest.approx(finalise(second_stats), abs=1e-12)
    assert first_stats.keys() == second_stats.keys()


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_one_and_three_tokens(make_rollout, make_group, cuts):
    """Advantages +1 and -1, ratio 1, token mean: -(1 * 1 - 1 * 3) / 4 = 0.5 however it is cut."""
    batch = collate([make_group("g", [make_rollout(2.0, (1,)), make_rollout(0.0, (3,), attempt=1)])])
    spec = {"kind": "grpo", "credit": "mean_only", "aggregation": "token_mean", "tis": None}
    logits = logits_of(batch)
    loss, stats = ours(prepare(batch, resolve(spec)), logits, cuts)
    assert loss.item() == pytest.approx(0.5, abs=1e-15)
    assert finalise(stats)["pg/ratio"] == pytest.approx(1.0)


def test_fully_masked_rollout_leaves_the_other_alone_and_both_masked_is_skipped(make_rollout, make_group):
    from trivet.algorithms import NothingToTrain
    from trivet.types import Termination

    cut = {"termination": Termination.LENGTH}
    spec = {"kind": "grpo", "credit": "mean_only", "aggregation": "token_mean", "tis": None}
    spec["masks"] = ["truncated"]
    one = collate([make_group("g", [make_rollout(2.0, (1,)), make_rollout(0.0, (3,), attempt=1, **cut)])])
    loss, _ = ours(prepare(one, resolve(spec)), logits_of(one))
    assert loss.item() == pytest.approx(-1.0)  # its token's -A, as if alone
    both = collate(
        [make_group("g", [make_rollout(2.0, (1,), **cut), make_rollout(0.0, (3,), attempt=1, **cut)])]
    )
    with pytest.raises(NothingToTrain):
        prepare(both, resolve(spec))


def test_clipping_never_moves_the_denominator(make_rollout, make_group):
    batch = make_batch(make_rollout, make_group)
    # The update starts far below the current policy: every ratio is at the bound and above.
    batch.annotations["proximal_logp"] = np.full(batch.tokens, -18.0)
    algorithm = resolve({"kind": "grpo", "tis": None})
    prepared = prepare(batch, algorithm)
    logits = logits_of(batch)
    loss, stats = ours(prepared, logits)
    index = np.flatnonzero(prepared.trained_T)
    weight, advantage = prepared.streams[0].weight_T[index], prepared.streams[0].columns["advantage"][index]
    ratio = np.exp(logp_of(batch, logits, index).detach().numpy() + 18.0)
    by_hand = np.where(advantage > 0, -weight * 1.2 * advantage, -weight * ratio * advantage)
    assert loss.item() == pytest.approx(by_hand.sum())
    assert finalise(stats)["pg/clipped"] == pytest.approx((advantage > 0).mean())
    n_N = batch.length_N[batch.rollout_T[index]]
    assert weight == pytest.approx(1 / (11 * n_N))  # 12 rollouts, one of them unscored


def test_several_updates_want_the_proximal_policy_first(make_rollout, make_group):
    batch = make_batch(make_rollout, make_group)
    parts = split(prepare(batch, resolve("grpo")), 2)
    with pytest.raises(AlgorithmError, match="2 updates per batch proximal_logp"):
        ours(parts[0], logits_of(parts[0].batch))


def test_positions_outside_a_stream_give_zero_with_a_graph(make_rollout, make_group):
    prepared = prepare(make_batch(make_rollout, make_group), resolve("grpo"))
    index = np.flatnonzero(~prepared.trained_T & (prepared.batch.position_T > 0))[:3]
    logits = logits_of(prepared.batch)
    loss, stats = stream_loss(prepared, prepared.streams[0], index, logp_of(prepared.batch, logits, index))
    loss.backward()
    assert loss.item() == 0
    assert stats == {}
    assert not logits.grad.any()


def test_float32_stays_float32(make_rollout, make_group):
    prepared = prepare(make_batch(make_rollout, make_group), resolve("grpo"))
    index = np.flatnonzero(prepared.trained_T)
    logp = logp_of(prepared.batch, logits_of(prepared.batch), index).float()
    loss, stats = stream_loss(prepared, prepared.streams[0], index, logp)
    assert loss.dtype is torch.float32
    assert {v.dtype for k, v in stats.items() if not k.endswith("clipped")} == {torch.float32}


# -- unit level: what a sequence-level objective will rely on ------------------------------------


@register_objective("test_sequence_ratio", level="unit", unit="rollout", advantage=True, ratio=True)
def sequence_ratio(x: ObjectiveInputs):
    """-w_u A_u exp(mean log ratio): a unit's weight is the sum of its tokens' weights."""
    zeros = x.logp_P.new_zeros(x.units)
    count = zeros.index_add(0, x.unit_P, torch.ones_like(x.logp_P))
    weight = zeros.index_add(0, x.unit_P, x.weight_P)
    advantage = zeros.index_add(0, x.unit_P, x.advantage_P) / count
    ratio = torch.exp(zeros.index_add(0, x.unit_P, x.logp_P - x.proximal_P) / count)
    return -weight * advantage * ratio, {"unit/ratio": ratio.detach().sum()}


@register_correction("test_row_veto", level="unit", unit="row")
def row_veto(x: ObjectiveInputs):
    return torch.ones_like(x.weight_P), {}


def sequence_algorithm():
    from dataclasses import replace

    base = resolve({"kind": "grpo", "tis": None})
    stream = StreamSpec("seq", make_part("objective", "test_sequence_ratio"), base.streams[0].aggregation)
    return replace(base, streams=(stream,))


def test_units_are_handed_over_whole(make_rollout, make_group):
    batch = make_batch(make_rollout, make_group)
    prepared = prepare(batch, sequence_algorithm())
    stream = prepared.streams[0]
    index = np.flatnonzero(prepared.trained_T)
    rng = np.random.default_rng(0)
    logp = torch.from_numpy(-rng.uniform(0.1, 1.0, batch.tokens))
    loss, stats = stream_loss(prepared, stream, index, logp[torch.from_numpy(index)])
    by_hand = 0.0
    for n in np.unique(batch.rollout_T[index]):
        at = index[batch.rollout_T[index] == n]
        by_hand -= stream.weight_T[at].sum() * stream.columns["advantage"][at][0]
    assert loss.item() == pytest.approx(by_hand)  # ratio 1: proximal is the current policy
    metrics = finalise(stats)
    assert metrics["seq/ratio"] == pytest.approx(1.0)
    assert metrics["seq/units"] == len(np.unique(batch.rollout_T[index]))
    with pytest.raises(AlgorithmError, match="handed over in parts"):
        stream_loss(prepared, stream, index[1:], logp[torch.from_numpy(index[1:])])


def test_a_stream_has_one_unit(make_rollout, make_group):
    from dataclasses import replace

    from trivet.algorithms.registry import check

    algorithm = sequence_algorithm()
    mixed = replace(algorithm.streams[0], corrections=(make_part("correction", "test_row_veto"),))
    with pytest.raises(AlgorithmError, match=r"mixes units \['rollout', 'row'\]"):
        check(replace(algorithm, streams=(mixed,)))


def test_merge_and_finalise():
    one = {"pg/tokens": torch.tensor(2.0), "pg/x": torch.tensor(3.0), "max/pg/y": torch.tensor(1.0)}
    two = {"pg/tokens": torch.tensor(4.0), "pg/x": torch.tensor(9.0), "max/pg/y": torch.tensor(5.0)}
    total = merge(merge({}, one), {**two, "sum/pg/loss": torch.tensor(0.25)})
    assert finalise(total) == {"pg/tokens": 6.0, "pg/x": 2.0, "pg/y_max": 5.0, "pg/loss": 0.25}


@pytest.mark.parametrize(
    ("gives", "match"),
    [
        (lambda x: -x.weight_P * x.logp_P, "return the loss terms and a dictionary"),
        (lambda x: ((-x.weight_P * x.logp_P).detach(), {}), "no gradient"),
        (lambda x: (-x.logp_P.sum()[None].expand(2), {}), "one per position"),
        (lambda x: (-x.weight_P * x.logp_P, {"a": x.logp_P.detach()}), "statistic 'a'"),
    ],
)
def test_what_an_objective_of_ones_own_returns_is_checked(batch_of, gives, match):
    prepared = prepare(batch_of([1.0, 0.0, 0.0]), resolve("grpo"))
    stream = prepared.streams[0]
    part = replace(stream.spec.objective, name="mine", call=gives)
    stream = replace(stream, spec=replace(stream.spec, objective=part))
    index = np.flatnonzero(prepared.trained_T)
    logp = torch.full((len(index),), -1.0, requires_grad=True)
    with pytest.raises(AlgorithmError, match=f"objective 'mine'.*{match}"):
        stream_loss(prepared, stream, index, logp)
