"""Did the weights arrive? Compares what an engine holds after an update with what was published."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_SHOWN = 3  # names of each sort in a message


class ProofFailed(RuntimeError):
    """After an update the receiver does not hold what was published. `names` lists the tensors at fault."""

    def __init__(self, message: str, version: int, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.version = version
        self.names = names


def _some(names: list[str], describe: Mapping[str, str]) -> str:
    shown = ", ".join(describe.get(name, name) for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def prove(
    expected: Mapping[str, str],
    got: Mapping[str, str],
    version: int,
    *,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Raise ProofFailed unless `got` (what the engine holds) is `expected` (what was published).

    `tied` maps further names of published tensors to the names in `expected` (`Published.tied`): the receiver
    may report a tied tensor under either name or under both, and every report must be right. A tensor that
    was not published is at fault too, unless it is a copy of a published one (an untied head).
    """
    tied = tied or {}
    published = set(expected.values())
    reported = {tied.get(name, name) for name in got}
    missing = [name for name in expected if name not in reported]
    differing, extra, describe = [], [], {}
    for name, value in got.items():
        want = expected.get(tied.get(name, name))
        if want is None:
            if value not in published:
                extra.append(name)
        elif value != want:
            differing.append(name)
            describe[name] = f"{name} (published {want}, held {value})"
    if not expected:
        raise ProofFailed(
            f"weights of version {version}: nothing was published, so nothing is proved", version
        )
    if not (missing or differing or extra):
        return
    parts = []
    for label, names in (("differing", differing), ("missing", missing), ("extra", extra)):
        if names:
            parts.append(f"{len(names)} {label}: {_some(names, describe)}")
    raise ProofFailed(
        f"weights of version {version} did not arrive: of {len(expected)} published tensors "
        f"{len(differing)} differ and {len(missing)} are missing, {len(extra)} were not published. "
        + "; ".join(parts)
        + ". The receiver answers with other weights than the trainer's: do not sample from it; "
        "load this version again or restart it",
        version,
        tuple(differing + missing + extra),
    )


def prove_probe(expected_T: np.ndarray, got_T: np.ndarray, version: int, *, tolerance: float = 1e-3) -> float:
    """The largest |difference| of a probe prompt's log-probabilities (_T,), trainer's against engine's.

    Raises ProofFailed above `tolerance` (nats) and on NaN or unequal lengths. It finds what checksums cannot
    (a tensor that arrived and is not used), but an update smaller than the tolerance escapes it: use it
    beside checksums, not in their place, where learning rates are small.
    """
    expected_T, got_T = np.asarray(expected_T, np.float64), np.asarray(got_T, np.float64)
    where = f"weights of version {version}: probe"
    if expected_T.shape != got_T.shape or expected_T.ndim != 1 or len(expected_T) == 0:
        raise ProofFailed(
            f"{where}: log-probabilities of shape {got_T.shape} from the engine, {expected_T.shape} from the "
            "trainer; both must be those of the same prompt (at least 2 tokens)",
            version,
        )
    with np.errstate(invalid="ignore"):
        gap_T = np.where(expected_T == got_T, 0.0, np.abs(expected_T - got_T))  # both may be -inf
    worst = int(np.argmax(np.where(np.isnan(gap_T), np.inf, gap_T)))
    if not gap_T[worst] <= tolerance:
        raise ProofFailed(
            f"{where}: token {worst + 1} has log-probability {got_T[worst]:.6f} in the engine and "
            f"{expected_T[worst]:.6f} in the trainer (allowed difference {tolerance:g}; "
            f"{int((~(gap_T <= tolerance)).sum())} of {len(gap_T)} tokens are off). The engine computes with "
            "other weights, another dtype or another forward pass than the trainer",
            version,
        )
    return float(gap_T[worst])
