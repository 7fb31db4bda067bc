"""Corrections by hand, against a plain reference, and their bounds whatever the sampler said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.algorithms import AlgorithmError, finalise, prepare, resolve, stream_loss
from trivet.algorithms.base import ObjectiveInputs
from trivet.algorithms.corrections import GeometricMask, IcePop, SequenceMIS, SequenceTIS, TokenTIS
from trivet.trainer.batch import collate

torch = pytest.importorskip("torch")


def inputs(ratio: Any, unit: Any = None) -> ObjectiveInputs:
    """A proximal policy at these ratios to the sampler."""
    log_ratio = torch.tensor(np.log(ratio), dtype=torch.float64)
    unit = np.zeros(len(ratio), int) if unit is None else np.asarray(unit)
    return ObjectiveInputs(
        logp_P=log_ratio - 1.0,
        weight_P=torch.ones_like(log_ratio),
        unit_P=torch.tensor(unit),
        units=int(unit.max()) + 1,
        behaviour_P=torch.full_like(log_ratio, -1.0),
        proximal_P=log_ratio - 1.0,
    )


def run(correction: Any, x: ObjectiveInputs) -> tuple[list[float], dict[str, float]]:
    factor, stats = correction(x)
    assert not factor.requires_grad
    whole = {f"pg/{name}": value for name, value in stats.items()}
    whole |= {"pg/tokens": torch.tensor(float(len(x.logp_P))), "pg/units": torch.tensor(float(x.units))}
    return factor.tolist(), {name.removeprefix("pg/"): v for name, v in finalise(whole).items()}


def test_token_tis_and_its_effective_sample_size():
    # factors 0.5, 0.6, 1.5, 2: sum 4.6, squares 0.25 + 0.36 + 2.25 + 4 = 6.86: 4.6^2 / (4 * 6.86)
    factor, stats = run(TokenTIS((0.5, 2.0)), inputs([0.1, 0.6, 1.5, 4.0]))
    assert factor == pytest.approx([0.5, 0.6, 1.5, 2.0])
    assert stats["tis_clipped"] == pytest.approx(0.5)
    assert stats["ess/tis_factor"] == pytest.approx(21.16 / 27.44)
    assert run(TokenTIS(), inputs([1.0] * 3))[1]["ess/tis_factor"] == pytest.approx(1.0)


def test_icepop_by_hand():
    # outside [0.5, 5]: 0.4 and 6 are out, the others keep their weight
    factor, stats = run(IcePop(), inputs([0.4, 0.6, 2.0, 6.0]))
    assert factor == pytest.approx([0, 0.6, 2.0, 0])
    assert stats["icepop_masked"] == pytest.approx(0.5)
    assert stats["ess/icepop_factor"] == pytest.approx(2.6**2 / (4 * 4.36))
    factor, stats = run(IcePop(weigh=False), inputs([0.4, 0.6, 2.0, 6.0]))
    assert factor == pytest.approx([0, 1, 1, 0])
    assert stats["ess/icepop_factor"] == pytest.approx(0.5)  # the share kept


def test_sequence_tis_by_hand():
    # products: 1.2 * 1.5 = 1.8; 3 * 2 = 6 -> 2; 0.1 -> 0.5. Each of a unit's tokens gets the unit's.
    # ess over units: (1.8 + 2 + 0.5)^2 / (3 (3.24 + 4 + 0.25)) = 18.49 / 22.47
    factor, stats = run(SequenceTIS((0.5, 2.0)), inputs([1.2, 1.5, 3, 2, 0.1], [0, 0, 1, 1, 2]))
    assert factor == pytest.approx([1.8, 1.8, 2, 2, 0.5])
    assert stats["sequence_clipped"] == pytest.approx(2 / 3)
    assert stats["ess/sequence_factor"] == pytest.approx(18.49 / 22.47)


def test_sequence_mis_by_hand():
    # products: 1.8 kept; 6 > 2 dropped; 2e-5 * 5e4 = 1 but one token is below 1e-4: vetoed
    x = inputs([1.2, 1.5, 3, 2, 2e-5, 5e4], [0, 0, 1, 1, 2, 2])
    factor, stats = run(SequenceMIS(), x)
    assert factor == pytest.approx([1.8, 1.8, 0, 0, 0, 0])
    assert stats["mis_masked"] == pytest.approx(2 / 3)
    assert stats["mis_vetoed"] == pytest.approx(1 / 3)
    assert stats["ess/mis_factor"] == pytest.approx(1 / 3)
    factor, _ = run(SequenceMIS(veto=None, weigh=False), x)
    assert factor == pytest.approx([1, 1, 0, 0, 1, 1])


def test_geometric_mask_by_hand():
    # means: sqrt(1.02 * 0.99) = 1.00489 kept; sqrt(1.02 * 1.02) = 1.02 out; 0.98 out;
    # (1e-5 * 1e5)^(1/2) = 1, vetoed
    x = inputs([1.02, 0.99, 1.02, 1.02, 0.98, 1e-5, 1e5], [0, 0, 1, 1, 2, 3, 3])
    factor, stats = run(GeometricMask(), x)
    assert factor == pytest.approx([1, 1, 0, 0, 0, 0, 0])
    assert stats["geometric_masked"] == pytest.approx(0.75)
    assert stats["geometric_vetoed"] == pytest.approx(0.25)
    assert stats["ess/geometric_kept"] == pytest.approx(0.25)
    assert stats["geometric_ratio"] == pytest.approx((math.sqrt(1.02 * 0.99) + 1.02 + 0.98 + 1) / 4)
    factor, _ = run(GeometricMask(veto=None), x)
    assert factor == pytest.approx([1, 1, 0, 0, 0, 1, 1])


def test_a_token_without_a_sampler_counts_as_on_policy():
    """NaN: nobody said how likely it was. Its factor is 1, and it moves no ratio and no mean of its unit."""
    for correction in (TokenTIS(), IcePop()):
        x = inputs([1.5, 1.5])
        x.behaviour_P[1] = math.nan
        assert run(correction, x)[0] == pytest.approx([1.5, 1.0])
    x = inputs([1.5, 1.7])
    x.behaviour_P[1] = math.nan
    assert run(SequenceTIS(), x)[0] == pytest.approx([1.5, 1.5])
    assert run(SequenceMIS(), x)[0] == pytest.approx([1.5, 1.5])
    # sqrt(1.5 * 1) = 1.2247
    factor, stats = run(GeometricMask((0.5, 1.3)), x)
    assert factor == [1.0, 1.0]
    assert stats["geometric_ratio"] == pytest.approx(math.sqrt(1.5))


ALL = [TokenTIS(), IcePop(), SequenceTIS(), SequenceMIS(), SequenceMIS(veto=None), GeometricMask()]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=8),
    st.sampled_from(ALL),
)
def test_factors_are_bounded_whatever_the_sampler_said(gaps, correction):
    x = inputs(np.ones(len(gaps)), np.arange(len(gaps)) // 2)
    x.behaviour_P = x.behaviour_P + torch.tensor(gaps, dtype=torch.float64)
    factor, stats = run(correction, x)
    high = correction.bounds[1]
    assert all(0 <= f <= high for f in factor)
    assert all(math.isfinite(v) for v in stats.values())
    assert all(0 <= stats[name] <= 1 + 1e-12 for name in stats if name.startswith("ess/"))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.sampled_from(ALL))
def test_order_does_not_matter(order, correction):
    ratio, unit = np.array([0.4, 1.5, 0.999, 1.002, 2.2, 1e-5]), np.array([0, 0, 1, 1, 2, 2])
    plain, stats = run(correction, inputs(ratio, unit))
    moved, moved_stats = run(correction, inputs(ratio[list(order)], unit[list(order)]))
    assert moved == pytest.approx([plain[i] for i in order])
    assert moved_stats == pytest.approx(stats)


@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        ({"kind": "sequence_tis", "bounds": [0.5, 2.0]}, lambda d: min(max(math.exp(d.sum()), 0.5), 2.0)),
        ({"kind": "sequence_mis"}, lambda d: math.exp(d.sum()) if d.sum() <= math.log(2) else 0.0),
        ({"kind": "geometric_mask", "bounds": [0.9, 1.1]}, lambda d: float(0.9 <= math.exp(d.mean()) <= 1.1)),
    ],
)
def test_in_a_batch_the_loss_scales_and_the_denominator_stays(make_rollout, make_group, spec, reference):
    rng = np.random.default_rng(4)
    rollouts = [make_rollout(float(a % 2), (3, 1 + a), attempt=a, rng=rng) for a in range(4)]
    batch = collate([make_group("g", rollouts)])
    shift = rng.normal(0, 0.3, batch.tokens)
    batch.annotations["proximal_logp"] = batch.logprob_T.astype(np.float64) + shift
    spec = {**spec, "unit": "rollout"}
    algorithm = resolve({"kind": "grpo", "clip": None, "corrections": [spec]})
    names = [part.name for part in algorithm.streams[0].corrections]
    weighs = spec["kind"] != "geometric_mask"
    assert names == ([spec["kind"]] if weighs else ["token_tis", spec["kind"]])
    prepared = prepare(batch, algorithm)
    stream = prepared.streams[0]
    index = np.flatnonzero(prepared.trained_T)
    now = torch.from_numpy(batch.annotations["proximal_logp"][index])
    loss, stats = stream_loss(prepared, stream, index, now)
    by_hand, factors = 0.0, []
    for n in range(4):
        at = index[batch.rollout_T[index] == n]
        factors.append(reference(shift[at]))
        own = np.ones(len(at)) if weighs else np.exp(shift[at]).clip(0.5, 2.0)
        by_hand -= float(factors[-1] * (own * stream.weight_T[at] * stream.columns["advantage"][at]).sum())
    assert loss.item() == pytest.approx(by_hand)
    assert len(set(factors)) > 1  # some units pass and some do not
    assert stream.weight_T.sum() == pytest.approx(1.0)
    assert 0 < next(v for name, v in finalise(stats).items() if name.startswith("pg/ess/")) <= 1


def test_two_weights_for_one_ratio_are_refused():
    def names(**options: Any) -> list[str]:
        return [part.name for part in resolve({"kind": "grpo", **options}).streams[0].corrections]

    assert names() == ["token_tis"]
    assert names(corrections=["icepop"]) == ["icepop"]
    assert names(corrections=[{"kind": "icepop", "weigh": False}]) == ["token_tis", "icepop"]
    assert names(corrections=["geometric_mask", "icepop"]) == ["geometric_mask", "icepop"]
    with pytest.raises(AlgorithmError, match="would weigh twice"):
        names(tis=[0.5, 2.0], corrections=["sequence_mis"])
    with pytest.raises(AlgorithmError, match="would weigh twice"):
        names(tis=None, corrections=["sequence_tis", "icepop"])


def test_bad_options_are_refused():
    for spec, why in [
        ({"kind": "icepop", "bounds": [1.5, 2.0]}, "low must lie in 0..1"),
        ({"kind": "sequence_tis", "bounds": [0.5, 0.9]}, "high be at least 1"),
        ({"kind": "sequence_mis", "veto": 0.0}, "veto"),
        ({"kind": "geometric_mask", "unit": "group"}, "unit"),
    ]:
        with pytest.raises(AlgorithmError, match=why):
            resolve({"kind": "grpo", "corrections": [spec]})
    with pytest.raises(AlgorithmError, match="which is 1 everywhere"):
        resolve({"kind": "grpo", "proximal": "behaviour", "corrections": ["icepop"]})
    with pytest.raises(AlgorithmError, match="mixes units"):
        resolve({"kind": "gspo", "corrections": [{"kind": "sequence_mis", "unit": "rollout"}]})
