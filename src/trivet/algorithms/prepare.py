"""From a batch to an update: credit, masks, weights, streams; and what was left out, counted by cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from trivet.algorithms.base import (
    KINDS,
    ROLES,
    Algorithm,
    AlgorithmError,
    Batch,
    NothingToTrain,
    PreparedBatch,
    Stream,
    StreamSpec,
)
from trivet.algorithms.credit.group import ROUNDING
from trivet.algorithms.masks import staleness_T


def prepare(
    batch: Batch,
    algorithm: Algorithm,
    *,
    current_version: int | None = None,
    max_staleness: int | None = None,
    distance: Callable[[int], int] | None = None,
    scales: Mapping[str, float] | None = None,
) -> PreparedBatch:
    """The whole batch as one update (`trainer.batch.split` makes several of it).

    `current_version` is the policy's version before the update; turns older than `max_staleness` publications
    are not trained. `distance(version)` counts publications along the line (default: version numbers are
    consecutive). `scales`: where controls have moved the streams' scales to, by stream. What shaping and
    credit read (`algorithm.credit_needs`) must be in `batch.annotations`.

    Raises AlgorithmError for data the algorithm cannot train on, NothingToTrain when no token can teach.
    """
    _check(batch, algorithm, current_version, max_staleness)
    counters = _counts(batch, algorithm)
    batch = _shape(batch, algorithm, counters)
    columns = _credit(batch, algorithm)
    mask_T = batch.train_T.astype(np.float64)
    keeps = [
        ("aborted", ~batch.aborted_N[batch.rollout_T]),
        ("baseline", (batch.role_N != ROLES.index("baseline"))[batch.rollout_T]),
    ]
    age_T = None
    if current_version is not None:
        age_T = staleness_T(batch, current_version, distance)
        counters |= _staleness_counters(age_T[(mask_T > 0) & batch.sampled_T])
        if max_staleness is not None:
            keeps.append(("stale", age_T <= max_staleness))
    keeps += [(part.name, _keep(batch, part(batch), f"mask {part.name!r}")) for part in algorithm.masks]
    if algorithm.consumes == {"preference"} and algorithm.compares:
        keeps.append(("lone_side", _paired(batch, mask_T, [keep_T for _, keep_T in keeps])))
    for cause, keep_T in keeps:  # a name may come twice: one part with different options
        kept_T = np.where(keep_T, mask_T, 0.0)
        for name, number in _lost(batch, cause, mask_T, kept_T).items():
            counters[name] = counters.get(name, 0.0) + number
        mask_T = kept_T
    prepared = assemble(batch, algorithm, mask_T, columns, counters, scales=scales)
    prepared.age_T = age_T
    prepared.counters |= _unused(prepared)
    if prepared.empty:
        raise _nothing(prepared)
    return prepared


def _paired(batch: Batch, mask_T: np.ndarray, keeps: list[np.ndarray]) -> np.ndarray:
    """keep_T: pairs of which both answers still have a trained token. Half a pair compares nothing."""
    left_T = np.logical_and.reduce([mask_T > 0, *keeps])
    group_T = batch.group_N[batch.rollout_T]
    side_T = batch.preference_N[batch.rollout_T]
    chosen_G, rejected_G = (
        np.bincount(group_T[left_T & (side_T == side)], minlength=batch.groups) > 0 for side in (1, -1)
    )
    return (chosen_G & rejected_G)[group_T]


def _lost(batch: Batch, cause: str, before_T: np.ndarray, after_T: np.ndarray) -> dict[str, float]:
    """Tokens that `cause` took, and rollouts it took the last token of."""
    rollout_T = batch.rollout_T
    before_N = np.bincount(rollout_T[before_T > 0], minlength=batch.rollouts) > 0
    after_N = np.bincount(rollout_T[after_T > 0], minlength=batch.rollouts) > 0
    return {
        f"masked_tokens/{cause}": float(np.count_nonzero((before_T > 0) & ~(after_T > 0))),
        f"masked_rollouts/{cause}": float(np.count_nonzero(before_N & ~after_N)),
    }


def _unused(prepared: PreparedBatch) -> dict[str, float]:
    """Tokens the masks left that no stream weighs: they have no advantage, or no stream selects them."""
    batch, mask_T = prepared.batch, prepared.mask_T
    used_T = np.zeros(batch.tokens, bool)
    for stream in prepared.streams:
        used_T |= stream.weight_T != 0
    out: dict[str, float] = {}
    if "advantage" in prepared.columns:
        missing_T = np.isnan(prepared.columns["advantage"]) & ~used_T
        unscored_T = missing_T & ~np.isfinite(batch.reward_N)[batch.rollout_T]
        for cause, gone_T in (("unscored", unscored_T), ("no_advantage", missing_T & ~unscored_T)):
            out |= _lost(batch, cause, mask_T, np.where(gone_T, 0.0, mask_T))
            mask_T = np.where(gone_T, 0.0, mask_T)
    return out | _lost(batch, "no_stream", mask_T, np.where(used_T, mask_T, 0.0))


def _check(batch: Batch, algorithm: Algorithm, version: int | None, max_staleness: int | None) -> None:
    wrong = [i for i, k in enumerate(batch.kind_G) if KINDS[k] not in algorithm.consumes]
    if wrong:
        raise AlgorithmError(
            f"group {batch.group_ids[wrong[0]]!r} is of kind {KINDS[batch.kind_G[wrong[0]]]!r}, but "
            f"algorithm {algorithm.kind!r} trains on {sorted(algorithm.consumes)} "
            f"({len(wrong)} such groups in the batch)"
        )
    missing = sorted(algorithm.credit_needs - set(batch.annotations))
    if missing:
        raise AlgorithmError(
            f"credit of {algorithm.kind!r} reads {missing}: annotate the batch before prepare"
        )
    if max_staleness is not None and version is None:
        raise AlgorithmError("max_staleness needs current_version to measure from")


def _lift(batch: Batch, values: np.ndarray, what: str) -> np.ndarray:
    """(_N,) -> (_T,); (_T,) stays. Where both sizes are equal the values are taken per rollout."""
    values = np.asarray(values)
    if values.shape == (batch.rollouts,):
        return values[batch.rollout_T]
    if values.shape != (batch.tokens,):
        raise AlgorithmError(
            f"{what} returned shape {values.shape}; expected one value per rollout ({batch.rollouts},) "
            f"or per token ({batch.tokens},)"
        )
    return values


def _keep(batch: Batch, values: np.ndarray, what: str) -> np.ndarray:
    """bool (_T,) from a mask's (_N,) or (_T,)."""
    keep_T = _lift(batch, values, what)
    if keep_T.dtype != np.bool_:
        raise AlgorithmError(f"{what} must return booleans (True keeps), not {keep_T.dtype}")
    return keep_T


def _shape(batch: Batch, algorithm: Algorithm, counters: dict[str, float]) -> Batch:
    """The batch with its rewards shaped; what each part changed on average, over scored rollouts."""
    for part in algorithm.shaping:
        what, before_N = f"shaping {part.name!r}", batch.reward_N
        after_N = np.asarray(part(batch), np.float64)
        if after_N.shape != before_N.shape:
            raise AlgorithmError(
                f"{what} returned shape {after_N.shape}; expected one reward per rollout ({batch.rollouts},)"
            )
        if (np.isfinite(after_N) != np.isfinite(before_N)).any():
            raise AlgorithmError(
                f"{what} must keep unscored rollouts NaN and give finite rewards to the others"
            )
        scored_N = np.isfinite(before_N)
        moved = float((after_N - before_N)[scored_N].mean()) if scored_N.any() else 0.0
        name = f"shaped/{part.name}"
        counters[name] = counters.get(name, 0.0) + moved
        batch = replace(batch, reward_N=after_N)
    return batch


def _credit(batch: Batch, algorithm: Algorithm) -> dict[str, np.ndarray]:
    if algorithm.credit is None:
        return {}
    what = f"credit {algorithm.credit.name!r}"
    given = algorithm.credit(batch)
    named = given if isinstance(given, Mapping) else {"advantage": given}
    if "advantage" not in named:
        raise AlgorithmError(f"{what} returned columns {sorted(named)} without 'advantage'")
    out = {name: _lift(batch, np.asarray(c, np.float64), f"{what}, {name}") for name, c in named.items()}
    if np.isinf(out["advantage"]).any():
        raise AlgorithmError(f"{what} gave an infinite advantage; return NaN where there is none")
    for name, column in out.items():
        largest = np.abs(np.nan_to_num(column)).max(initial=0.0)
        if largest > np.finfo(np.float32).max:
            known_N = batch.reward_N[np.isfinite(batch.reward_N)]
            raise AlgorithmError(
                f"{what}, {name}: {largest:.3g} is more than the loss can hold (float32); rewards lie in "
                f"{known_N.min(initial=0.0):.3g}..{known_N.max(initial=0.0):.3g}: scale them"
            )
    return out


def _counts(batch: Batch, algorithm: Algorithm) -> dict[str, float]:
    played_N = batch.kind_G[batch.group_N] == KINDS.index("rollout")  # an example has no reward to lack
    unscored_N = ~np.isfinite(batch.reward_N) & ~batch.aborted_N & played_N
    out = {
        "groups": batch.groups,
        "rollouts": batch.rollouts,
        "rollouts_aborted": np.count_nonzero(batch.aborted_N),
        "rollouts_baseline": np.count_nonzero(batch.role_N == ROLES.index("baseline")),
        "truncated_share": batch.truncated_N.mean() if batch.rollouts else 0.0,
        "tokens": batch.tokens,
        "rows": batch.rows,
    }
    if algorithm.credit is not None:
        out["rollouts_unscored"] = np.count_nonzero(unscored_N)
    return {name: float(value) for name, value in out.items()}


def _staleness_counters(age_T: np.ndarray) -> dict[str, float]:
    if not len(age_T):
        return {}
    return {"staleness_mean": float(age_T.mean()), "staleness_max": float(age_T.max())}


# -- weights and streams -------------------------------------------------------------------------


def assemble(
    batch: Batch,
    algorithm: Algorithm,
    mask_T: np.ndarray,
    columns: dict[str, np.ndarray],
    counters: dict[str, float],
    *,
    update: int = 0,
    updates: int = 1,
    scales: Mapping[str, float] | None = None,
) -> PreparedBatch:
    """Streams of one update from what credit and masks left: its denominators are its own."""
    scales = scales or {}
    streams = tuple(
        _stream(batch, algorithm, spec, mask_T, columns, scales.get(spec.name, spec.scale))
        for spec in algorithm.streams
    )
    trained_T = np.zeros(batch.tokens, bool)
    weighed_T = np.zeros(batch.tokens, bool)
    for stream in streams:
        if stream.spec.model == "policy":
            trained_T |= stream.active_T
        weighed_T |= stream.weight_T != 0
    row_active_R = np.bincount(batch.row_T[trained_T], minlength=batch.rows) > 0
    own = {
        "trained_tokens": float(np.count_nonzero(weighed_T)),
        "trained_share": np.count_nonzero(weighed_T) / max(1, int(batch.length_N.sum())),
        "active_tokens": float(np.count_nonzero(trained_T)),
        "rows_active": float(np.count_nonzero(row_active_R)),
    }
    if "advantage" in columns:
        signal_T = weighed_T & (np.nan_to_num(columns["advantage"]) != 0)
        signal_G = np.bincount(batch.group_N[batch.rollout_T[signal_T]], minlength=batch.groups) > 0
        own["groups_zero_advantage"] = float(np.count_nonzero(~signal_G))
        own["zero_advantage_share"] = np.count_nonzero(~signal_G) / max(1, batch.groups)
    return PreparedBatch(
        batch=batch,
        algorithm=algorithm,
        streams=streams,
        mask_T=mask_T,
        columns=columns,
        row_active_R=row_active_R,
        trained_T=trained_T,
        counters={**counters, **own},
        update=update,
        updates=updates,
        scales=dict(scales),
    )


def _stream(
    batch: Batch,
    algorithm: Algorithm,
    spec: StreamSpec,
    mask_T: np.ndarray,
    columns: dict[str, np.ndarray],
    scale: float,
) -> Stream:
    what = f"stream {spec.name!r}"
    credited = spec.objective.traits.get("advantage", False)
    if spec.select is not None:
        mask_T = mask_T * _keep(batch, spec.select(batch), f"{what}, select")
    if credited:  # no advantage is not advantage 0: such tokens are in no denominator
        mask_T = np.where(np.isnan(columns["advantage"]), 0.0, mask_T)
    if column := spec.objective.traits.get("column"):
        mask_T = np.where(np.isnan(columns[column]), 0.0, mask_T)
    weight_T = scale * np.asarray(spec.aggregation(batch, mask_T), np.float64)
    if weight_T.shape != mask_T.shape or not np.isfinite(weight_T).all() or weight_T[mask_T == 0].any():
        raise AlgorithmError(
            f"{what}: aggregation {spec.aggregation.name!r} must give a finite weight per token, and 0 where "
            "the mask is 0"
        )
    unit_T = batch.unit_T(spec.unit)
    active_T = weight_T != 0
    own = {name: np.where(active_T, np.nan_to_num(column), 0.0) for name, column in columns.items()}
    if credited:
        active_T &= own["advantage"] != 0
    if spec.level == "unit":  # a unit is seen whole or not at all
        live = np.bincount(unit_T[active_T], minlength=int(unit_T.max(initial=-1)) + 1) > 0
        active_T = (weight_T != 0) & live[unit_T]
    if spec.behaviour or (spec.objective.traits.get("ratio") and algorithm.proximal == "behaviour"):
        _require_behaviour(batch, what, active_T)
    return Stream(spec.name, spec, spec.level, unit_T, weight_T, active_T, own)


def _require_behaviour(batch: Batch, what: str, active_T: np.ndarray) -> None:
    unknown_T = active_T & np.isnan(batch.logprob_T)
    if unknown_T.any():
        n = int(batch.rollout_T[unknown_T][0])
        raise AlgorithmError(
            f"{what}: {int(unknown_T.sum())} trained tokens have no behaviour log-probability, the first in "
            f"rollout {batch.rollout_ids[n]!r} (source {batch.sources[batch.source_N[n]]!r}); train foreign "
            "tokens through a cross-entropy stream"
        )


# -- nothing to train ----------------------------------------------------------------------------


def solve_rate_histogram(batch: Batch) -> dict[str, int]:
    """Groups by the mean of their compared rewards; quarters of 0..1 with both ends apart, else fifths."""
    keep_N = batch.compared_N
    count_G = np.bincount(batch.group_N[keep_N], minlength=batch.groups)
    share_N = batch.reward_N[keep_N] / count_G[batch.group_N[keep_N]]  # a sum of large ones might overflow
    mean = np.bincount(batch.group_N[keep_N], share_N, minlength=batch.groups)[count_G > 0]
    out: dict[str, int] = {}
    if len(mean) and mean.min() >= 0 and mean.max() <= 1:
        inner = mean[(mean > 0) & (mean < 1)]
        quarters = np.histogram(inner, np.linspace(0, 1, 5))[0]
        names = ("0..0.25", "0.25..0.5", "0.5..0.75", "0.75..1")
        out = {"0": int((mean == 0).sum()), **dict(zip(names, quarters.tolist(), strict=True))}
        out["1"] = int((mean == 1).sum())
    elif len(mean) and mean.max() - mean.min() <= ROUNDING * np.abs(mean).max():
        out = {f"{mean.max():.3g}": len(mean)}  # equal but for rounding: nothing to cut into fifths
    elif len(mean):
        counts, edges = np.histogram(mean, 5)
        out = {f"{a:.3g}..{b:.3g}": int(c) for a, b, c in zip(edges, edges[1:], counts, strict=False)}
    if (count_G == 0).any():
        out["no reward"] = int((count_G == 0).sum())
    return {name: number for name, number in out.items() if number}


def _nothing(prepared: PreparedBatch) -> NothingToTrain:
    batch, counters = prepared.batch, prepared.counters
    causes = {
        name.removeprefix("masked_rollouts/"): int(number)
        for name, number in counters.items()
        if name.startswith("masked_rollouts/") and number
    }
    for n, cause in enumerate(batch.causes):
        if cause and prepared.algorithm.credit is not None and not batch.aborted_N[n]:
            causes[f"unscored: {cause}"] = causes.get(f"unscored: {cause}", 0) + 1
    causes.pop("unscored", None)
    bare = int(np.count_nonzero((batch.length_N == 0) & ~batch.aborted_N))
    if bare:
        causes["no trained token"] = bare
    weighed_T = np.any([s.weight_T != 0 for s in prepared.streams], axis=0)
    left_N = np.bincount(batch.rollout_T[weighed_T], minlength=batch.rollouts) > 0
    if left_N.any():
        causes["zero advantage"] = int(np.count_nonzero(left_N))
    rates = solve_rate_histogram(batch) if prepared.algorithm.credit is not None else {}
    text = f"nothing to train on in {batch.groups} groups, {batch.rollouts} rollouts: "
    text += ", ".join(f"{number} {cause}" for cause, number in causes.items()) or "the batch is empty"
    if rates:
        text += "; groups by mean reward: " + ", ".join(f"{k}: {v}" for k, v in rates.items())
    return NothingToTrain(text, counters, rates, causes)
