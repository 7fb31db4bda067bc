"""A stream's loss on the positions of one chunk or micro-batch, and statistics that add up.

Statistics are 0-dimensional tensors under these names, which `merge` adds (or maximises) and `finalise` turns
into metrics:

    <stream>/tokens, <stream>/units      counts
    <stream>/<name>                      summed over tokens       -> mean per token
    <stream>/gap/<age>                   summed over the tokens of an age, <stream>/aged/<age> of them -> mean
    <stream>/unit/<name>                 summed over units        -> mean per unit
    <stream>/ess/<name>                  squares of <name> summed -> (sum)^2 / (n sum of squares), n of <name>
    sum/<stream>/<name>                  plain sum                -> <stream>/<name>
    max/<stream>/<name>                  maximum                  -> <stream>/<name>_max
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.algorithms.base import (
    PAIR_MARGIN,
    AlgorithmError,
    ObjectiveInputs,
    PreparedBatch,
    Stream,
    TopInputs,
)

if TYPE_CHECKING:
    from torch import Tensor

_STANDARD = {"ref_logp": "ref_P", "proximal_logp": "proximal_P"}


def stream_loss(
    prepared: PreparedBatch,
    stream: Stream,
    index_P: np.ndarray,
    logp_P: Tensor,
    *,
    entropy_P: Tensor | None = None,
    top_logp_E: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over the given positions of weight * factor * l, a scalar tensor, and its statistics.

    `index_P`: positions in `prepared.batch`; those that are not active in the stream are passed over.
    `logp_P`: their log-probabilities under the current policy at the row's temperature; for a critic's stream
    its values. For unit level each unit must be there whole. `top_logp_E`: log-probabilities of the entries
    of `batch.top` at these positions, position after position.

    Raises AlgorithmError for split units, missing annotations, and parts that return the wrong shape.
    """
    import torch

    keep = np.flatnonzero(stream.active_T[index_P])
    pick = torch.from_numpy(keep).to(logp_P.device)
    logp_P = logp_P[pick]
    if not len(keep):
        return logp_P.sum(), {}  # an empty sum: zero, and part of the graph
    index = np.asarray(index_P)[keep]
    x = _inputs(prepared, stream, index, logp_P)
    if stream.spec.model == "critic":
        x.value_P, x.logp_P = logp_P, x.behaviour_P
    x.entropy_P = None if entropy_P is None else entropy_P[pick]
    if stream.spec.top:
        x.top = _top(prepared, stream, np.asarray(index_P), keep, top_logp_E)
    stats: dict[str, Tensor] = {}
    factors = []
    for part in stream.spec.corrections:
        factor, more = part(x)
        if factor.shape != logp_P.shape or factor.requires_grad:
            raise AlgorithmError(f"correction {part.name!r} must return a detached factor per position")
        factors.append(factor)
        stats |= more
    for factor in factors:  # after all have seen the plain weights
        x.weight_P = x.weight_P * factor
    terms, more = _terms(stream, x)
    loss = terms.sum()
    stats |= more
    if prepared.age_T is not None and "abs_log_diff" in more:
        stats |= _gap_by_age(x, prepared.age_T[index])
    if x.entropy_P is not None:
        stats["entropy"] = x.entropy_P.detach().sum()
    stats["tokens"] = logp_P.new_tensor(float(len(index)))
    if x.units:
        stats["units"] = logp_P.new_tensor(float(x.units))
    stats["sum/loss"] = loss.detach()
    return loss, {_prefixed(stream.name, name): value for name, value in stats.items()}


def _terms(stream: Stream, x: ObjectiveInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """What the objective gives, checked: it may be anybody's. Raises AlgorithmError."""
    what, given = f"objective {stream.objective.name!r}", stream.objective(x)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise AlgorithmError(f"{what} must return the loss terms and a dictionary of statistics")
    terms, stats = given
    if terms.shape not in {x.logp_P.shape, (x.units,), ()}:
        units = f" or unit ({x.units},)" if x.units else ""
        raise AlgorithmError(
            f"{what} returned {tuple(terms.shape)} terms; expected one per position ({len(x.logp_P)},){units}"
        )
    if x.logp_P.requires_grad and not terms.requires_grad and stream.spec.model == "policy":
        raise AlgorithmError(f"{what} returned terms with no gradient: it never reads logp_P, or detaches it")
    for name, value in stats.items():
        if getattr(value, "numel", lambda: 1)() != 1:
            raise AlgorithmError(
                f"{what}: statistic {name!r} must be one number, a sum, not one per position"
            )
    return terms, dict(stats)


def _top(
    prepared: PreparedBatch, stream: Stream, index_P: np.ndarray, keep: np.ndarray, logp_E: Tensor | None
) -> TopInputs:
    """The stored entries of the positions `index_P[keep]`."""
    import torch

    top = prepared.batch.top
    if top is None or logp_E is None:
        raise AlgorithmError(
            f"stream {stream.name!r} reads the sampler's top log-probabilities, which the batch lacks: set "
            "engine.top, and hand the trainer the attachments"
        )
    count_P = np.diff(top.offset_T1)[index_P]
    kept_P = np.zeros(len(index_P), bool)
    kept_P[keep] = True
    start_P = top.offset_T1[index_P]
    begin_P = np.cumsum(count_P) - count_P
    entry_E = np.repeat(start_P - begin_P, count_P) + np.arange(int(count_P.sum()))
    kept_E = np.repeat(kept_P, count_P)
    position_E = np.repeat(np.arange(len(keep)), count_P[keep])
    device = logp_E.device
    return TopInputs(
        position_E=torch.from_numpy(position_E).to(device),
        sampler_E=torch.from_numpy(top.logprob_E[entry_E[kept_E]]).to(device, logp_E.dtype),
        logp_E=logp_E[torch.from_numpy(np.flatnonzero(kept_E)).to(device)],
    )


AGES: tuple[tuple[str, int, int], ...] = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3_4", 3, 4),
    ("5_up", 5, 1 << 60),
)
"""Buckets of staleness: name, youngest, oldest, in publications."""


def _gap_by_age(x: ObjectiveInputs, age: np.ndarray) -> dict[str, Tensor]:
    """|log pi - log mu| summed by the age of the turn, and the tokens of each age."""
    import torch

    gap_P = (x.logp_P - x.behaviour_P).detach().abs()
    known_P = torch.isfinite(gap_P)
    age_P = torch.from_numpy(age).to(gap_P.device)
    out: dict[str, Tensor] = {}
    for name, low, high in AGES:
        here_P = known_P & (age_P >= low) & (age_P <= high)
        if here_P.any():
            out[f"gap/{name}"], out[f"aged/{name}"] = gap_P[here_P].sum(), here_P.sum().to(gap_P.dtype)
    return out


def _prefixed(stream: str, name: str) -> str:
    head, _, rest = name.partition("/")
    return f"{head}/{stream}/{rest}" if head in ("max", "sum") and rest else f"{stream}/{name}"


def _inputs(prepared: PreparedBatch, stream: Stream, index: np.ndarray, logp_P: Tensor) -> ObjectiveInputs:
    """The stream's columns at `index`, moved to the device of `logp_P` in one copy."""
    import torch

    batch, annotations = prepared.batch, prepared.batch.annotations
    rollout = batch.rollout_T[index]
    arrays: dict[str, np.ndarray] = {
        "weight_P": stream.weight_T[index],
        "behaviour_P": batch.logprob_T[index],
        **{name: column[index] for name, column in stream.columns.items()},
        **{name: column[index] for name, column in annotations.items()},
        "preference_P": batch.preference_N[rollout],
    }
    if PAIR_MARGIN in batch.counters:
        arrays[PAIR_MARGIN] = np.nan_to_num(batch.counters[PAIR_MARGIN])[rollout]
    block = torch.from_numpy(np.stack([np.asarray(a, np.float64) for a in arrays.values()]))
    tensors: dict[str, Any] = dict(zip(arrays, block.to(logp_P.device, logp_P.dtype), strict=True))
    for name, target in _STANDARD.items():
        if name in tensors:
            tensors[target] = tensors.pop(name)
    _proximal(prepared, stream, tensors, logp_P)
    missing = [n for p in (stream.objective, *stream.spec.corrections) for n in _absent(p.needs, tensors)]
    if missing:
        raise AlgorithmError(f"stream {stream.name!r} reads {sorted(set(missing))}: annotate the batch first")
    unit, units = stream.unit_T[index], 0
    if stream.level == "unit":
        unit, units = _whole_units(stream, unit)
    known = {name: tensors.pop(name, None) for name in ("proximal_P", "ref_P", "preference_P")}
    return ObjectiveInputs(
        logp_P=logp_P,
        weight_P=tensors.pop("weight_P"),
        unit_P=torch.from_numpy(unit).to(logp_P.device),
        units=units,
        behaviour_P=tensors.pop("behaviour_P"),
        advantage_P=tensors.pop("advantage", None),
        rollout_P=torch.from_numpy(rollout).to(logp_P.device),
        columns=tensors,
        **known,
    )


def _absent(needs: Iterable[str], tensors: Mapping[str, Any]) -> list[str]:
    """Per-token annotations a part needs that are not there (top and routes are not per-token columns)."""
    return [n for n in needs if n not in ("top", "routes") and _STANDARD.get(n, n) not in tensors]


def _proximal(prepared: PreparedBatch, stream: Stream, tensors: dict[str, Any], logp_P: Tensor) -> None:
    if prepared.algorithm.proximal == "behaviour":
        tensors["proximal_P"] = tensors["behaviour_P"]
    elif prepared.algorithm.proximal == "recompute" and "proximal_P" not in tensors:
        if prepared.updates > 1:
            raise AlgorithmError(
                f"stream {stream.name!r}: with {prepared.updates} updates per batch proximal_logp must be in "
                "batch.annotations before the first update"
            )
        tensors["proximal_P"] = logp_P.detach()  # one update: it starts from the current policy


def _whole_units(stream: Stream, unit: np.ndarray) -> tuple[np.ndarray, int]:
    """Dense unit numbers; AlgorithmError when a unit is not there whole."""
    here, dense, count = np.unique(unit, return_inverse=True, return_counts=True)
    whole = np.bincount(stream.unit_T[stream.active_T], minlength=int(here.max()) + 1)[here]
    if (count != whole).any():
        i = int(np.flatnonzero(count != whole)[0])
        raise AlgorithmError(
            f"stream {stream.name!r}: {stream.spec.unit} {here[i]} was handed over in parts ({count[i]} of "
            f"{whole[i]} positions); a unit is never split over chunks, micro-batches or ranks"
        )
    return dense.reshape(-1), len(here)


def merge(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`total` with `more` added to it (in place): sums are added, `max/` keys maximised."""
    import torch

    for name, value in more.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = (
                torch.maximum(total[name], value) if name.startswith("max/") else total[name] + value
            )
    return total


def finalise(stats: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of an update from its statistics, after all micro-batches and ranks were merged."""
    numbers = {name: float(value) for name, value in stats.items()}
    out: dict[str, float] = {}
    for name, value in numbers.items():
        head, _, rest = name.partition("/")
        if head == "max":
            out[f"{rest}_max"] = value
        elif head == "sum" or rest in ("tokens", "units"):
            out[rest if head == "sum" else name] = value
        elif rest.startswith("aged/"):
            out[name] = value
        elif rest.startswith("gap/"):
            out[name] = value / max(numbers.get(f"{head}/aged/{rest.removeprefix('gap/')}", 0.0), 1.0)
        elif rest.startswith("ess/"):
            what = rest.removeprefix("ess/")
            n = numbers.get(f"{head}/units" if what.startswith("unit/") else f"{head}/tokens", 0.0)
            total = numbers.get(f"{head}/{what}", 0.0)
            out[f"{head}/ess/{what.removeprefix('unit/')}"] = total**2 / (n * value) if n * value > 0 else 0.0
        elif rest.startswith("unit/"):
            out[f"{head}/{rest.removeprefix('unit/')}"] = value / max(numbers.get(f"{head}/units", 0.0), 1.0)
        else:
            out[name] = value / max(numbers.get(f"{head}/tokens", 0.0), 1.0)
    return out
