"""How winners and losers played: turns, tool calls, what their final answers are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trivet.types import Origin, Rollout

WINNER, LOSER = 0.9, 0.05  # rewards from and up to which a rollout counts as one
CALLS, MALFORMED = "tool_calls", "malformed_calls"  # counters an environment with tools reports


def conduct_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """conduct/...: turns and tool calls of winners (reward >= 0.9) and losers (<= 0.05), calls that could not
    be read, and the length of final answers apart from their reasoning, in characters.

    Tool calls are the rollouts' counters `tool_calls` and `malformed_calls`; a run without tools has none.
    """
    if not rollouts:
        return {}
    turns_N = np.asarray([_turns(rollout) for rollout in rollouts], np.float64)
    calls_N = np.asarray([rollout.counters.get(CALLS, np.nan) for rollout in rollouts], np.float64)
    score_N = np.asarray([np.nan if r.score is None else r.score for r in rollouts], np.float64)
    out: dict[str, float] = {}
    for name, chosen_N in (("winners", score_N >= WINNER), ("losers", score_N <= LOSER)):
        out |= _spread(f"conduct/{name}/turns", turns_N[chosen_N])
        out |= _spread(f"conduct/{name}/tool_calls", calls_N[chosen_N & np.isfinite(calls_N)])
    known_N = np.isfinite(calls_N)
    if known_N.any():
        out["conduct/tool_calls"] = float(calls_N[known_N].mean())
        bad = sum(r.counters.get(MALFORMED, 0.0) for r in rollouts)
        total = float(calls_N[known_N].sum())
        if total:
            out["conduct/malformed_calls"] = float(bad / total)
    return out | _answers(rollouts)


def _turns(rollout: Rollout) -> int:
    return sum(node.origin is Origin.SAMPLED for node in rollout.trace.nodes)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p90 = np.percentile(values, [50, 90])
    return {f"{name}_p50": float(p50), f"{name}_p90": float(p90)}


def _answers(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Characters of the last message of the policy: what it says, and what it thought before it."""
    last = [rollout.messages[-1] for rollout in rollouts if rollout.messages]
    said = [message for message in last if message.role == "assistant"]
    if not said:
        return {}
    out = {"conduct/answer_characters": float(np.mean([len(message.text) for message in said]))}
    thought = [len(message.reasoning) for message in said if message.reasoning]
    if thought:
        out["conduct/reasoning_characters"] = float(np.sum(thought) / len(said))
    return out
