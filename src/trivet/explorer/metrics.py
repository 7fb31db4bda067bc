"""What a set of rollouts was like, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from trivet.explorer.filters import all_equal, scores
from trivet.types import Group, Rollout, Termination, Unscored

SOLVED = 0.9  # a reward of at least this counts as solved


def unscored_causes(rollouts: Sequence[Rollout]) -> Counter[str]:
    return Counter(r.reward.cause for r in rollouts if isinstance(r.reward, Unscored))


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """reward/...: over the policy's scored rollouts; group/...: over groups with at least one score."""
    rollouts = [r for group in groups for r in group.rollouts if r.role == "train" and r.source != "expert"]
    scored = [r for r in rollouts if r.score is not None]
    out: dict[str, float] = {"reward/unscored": 1 - len(scored) / len(rollouts) if rollouts else 0.0}
    for cause, n in unscored_causes(rollouts).items():
        out[f"reward/unscored/{cause}"] = n / len(rollouts)
    if not scored:
        return out
    reward_N = np.asarray([r.score for r in scored], np.float64)
    out["reward/mean"] = float(reward_N.mean())
    out["reward/std"] = float(reward_N.std())
    out["reward/solved"] = float((reward_N >= SOLVED).mean())
    parts: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.reward.parts.items():  # type: ignore[union-attr]
            parts.setdefault(name, []).append(value)
    out |= {f"reward/part/{name}": float(np.mean(values)) for name, values in sorted(parts.items())}
    by_group = [s for group in groups if len(s := scores(group))]
    if by_group:
        out["group/all_solved"] = float(np.mean([s.min() >= SOLVED for s in by_group]))
        out["group/none_solved"] = float(np.mean([s.max() < SOLVED for s in by_group]))
        out["group/all_equal"] = float(np.mean([all_equal(s) for s in by_group]))
    return out


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """rollout/...: lengths in sampled tokens, turns, and the share of each termination."""
    if not rollouts:
        return {}
    tokens_N = np.asarray([r.sampled_tokens for r in rollouts], np.float64)
    out = {
        "rollout/count": float(len(rollouts)),
        "rollout/tokens": float(tokens_N.sum()),
        "rollout/length_mean": float(tokens_N.mean()),
        "rollout/length_p50": float(np.percentile(tokens_N, 50)),
        "rollout/length_p90": float(np.percentile(tokens_N, 90)),
        "rollout/length_max": float(tokens_N.max()),
        "rollout/truncated": float(np.mean([r.termination.truncated for r in rollouts])),
    }
    solves = sum(1 for r in rollouts if r.score is not None and r.score >= SOLVED)
    if solves:
        out["rollout/tokens_per_solve"] = float(tokens_N.sum() / solves)
    ended = Counter(r.termination for r in rollouts)
    for termination in Termination:
        if ended[termination]:
            out[f"rollout/ended/{termination}"] = ended[termination] / len(rollouts)
    return out
