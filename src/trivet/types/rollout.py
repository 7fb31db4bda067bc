"""What an attempt at a task came to: reward, termination, rollout, group."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np

from trivet.types import codec
from trivet.types.messages import Message, SchemaError, Task
from trivet.types.trace import Trace


class Termination(StrEnum):
    """Why a rollout ended. Everything is decided from it, never from text."""

    FINISHED = "finished"  # the policy ended its answer itself
    LENGTH = "length"  # the response budget was used up
    CONTEXT = "context"  # the context window was full
    TURNS = "turns"  # the turn limit was reached
    TOOL_CALLS = "tool_calls"  # the tool-call limit was reached
    DEADLINE = "deadline"  # the rollout's wall-clock limit passed
    ERROR = "error"  # harness, tool layer or environment failed after execution began
    ABORTED = "aborted"  # infrastructure failed; not the policy's fault; retried

    @property
    def truncated(self) -> bool:
        """The policy was cut off by a budget."""
        return self in _TRUNCATED


_TRUNCATED = frozenset(
    {
        Termination.LENGTH,
        Termination.CONTEXT,
        Termination.TURNS,
        Termination.TOOL_CALLS,
        Termination.DEADLINE,
    }
)


@dataclass(frozen=True, slots=True)
class Scored:
    """A number a verifier stands by, and the parts it was made of. Always finite."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in {"value": self.value, **self.parts}.items():
            if not isinstance(number, int | float) or not abs(number) <= sys.float_info.max:
                raise SchemaError(
                    f"reward {name} is {number!r}: a score is a finite number; "
                    "return Unscored(cause) when there is none"
                )
        object.__setattr__(self, "value", float(self.value))


@dataclass(frozen=True, slots=True)
class Unscored:
    """No score could be had. Never counted as 0; leaves its group before any mean is taken."""

    cause: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """A score is still to come; at `until` (seconds since the epoch) it becomes Unscored."""

    until: float

    def __post_init__(self) -> None:
        if not isinstance(self.until, int | float) or math.isnan(self.until):
            raise SchemaError(f"a pending reward's until is {self.until!r}: give seconds since the epoch")

    def expired(self, now: float | None = None) -> bool:
        return (time.time() if now is None else now) >= self.until


Reward = Scored | Unscored | Pending
FEEDBACK_TIMEOUT = "feedback_timeout"


def reward_to_dict(reward: Reward) -> dict[str, Any]:
    match reward:
        case Scored(value, parts):
            return {"kind": "scored", "value": value, "parts": parts}
        case Unscored(cause, detail):
            return {"kind": "unscored", "cause": cause, "detail": detail}
        case Pending(until):
            return {"kind": "pending", "until": until}
    raise SchemaError(f"not a reward: {reward!r}; use Scored, Unscored or Pending")


def reward_from_dict(data: Mapping[str, Any]) -> Reward:
    match data.get("kind"):
        case "scored":
            return Scored(data["value"], dict(data["parts"]))
        case "unscored":
            return Unscored(data["cause"], data["detail"])
        case "pending":
            return Pending(data["until"])
    raise SchemaError(f"not a stored reward: {dict(data)!r}")


class IssueKey(NamedTuple):
    """One issue of a prompt: the ledger's unit."""

    task_id: str
    epoch: int
    round: int = 0

    def __str__(self) -> str:
        return f"{self.task_id}@{self.epoch}.{self.round}"


RolloutRole = Literal["train", "baseline", "eval"]
GroupKind = Literal["rollout", "sft", "preference"]


@dataclass(slots=True)
class Rollout:
    """One attempt at a task by one player.

    `counters` and `timings` (seconds) are numbers about the attempt; `messages` is the final
    conversation, a view of the trace for people and for queries.
    """

    task: Task
    trace: Trace
    reward: Reward
    termination: Termination
    attempt: int = 0
    group: str = ""
    player: str = "policy"
    episode: str = ""
    role: RolloutRole = "train"
    source: str = "policy"
    messages: list[Message] = field(default_factory=list)
    preference: Literal["chosen", "rejected"] | None = None
    counters: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    id: str = ""

    @property
    def score(self) -> float | None:
        """The reward's value, or None when it is not scored."""
        return self.reward.value if isinstance(self.reward, Scored) else None

    @property
    def sampled_tokens(self) -> int:
        return int(np.count_nonzero(self.trace.column("sampled")))

    def header(self) -> dict[str, Any]:
        """Everything but the trace, JSON-able."""
        out: dict[str, Any] = {
            "task": self.task.to_dict(),
            "reward": reward_to_dict(self.reward),
            "termination": str(self.termination),
            "messages": [m.to_dict() for m in self.messages],
        }
        for key in _PLAIN:
            out[key] = getattr(self, key)
        return out

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], trace: Trace) -> Rollout:
        return cls(
            task=Task.from_dict(header["task"]),
            trace=trace,
            reward=reward_from_dict(header["reward"]),
            termination=Termination(header["termination"]),
            messages=[Message.from_dict(m) for m in header["messages"]],
            **{key: header[key] for key in _PLAIN},
        )

    def to_bytes(self) -> bytes:
        blob = np.frombuffer(self.trace.to_bytes(), np.uint8)
        return codec.pack({"trace": blob}, self.header(), level=0)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Rollout:
        columns, header = codec.unpack(blob)
        return cls.from_parts(header, Trace.from_bytes(columns["trace"].tobytes()))


_PLAIN = (
    *("attempt", "group", "player", "episode", "role", "source"),
    *("preference", "counters", "timings", "id"),
)


@dataclass(slots=True)
class Group:
    """The rollouts of one task from one round: the unit of credit, filtering and delivery."""

    id: str
    issue: IssueKey
    rollouts: list[Rollout]
    kind: GroupKind = "rollout"

    @property
    def task(self) -> Task:
        return self.rollouts[0].task

    @property
    def ready(self) -> bool:
        """Nothing is pending any more."""
        return not any(isinstance(r.reward, Pending) for r in self.rollouts)
