"""What an engine is: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from trivet.types import Tokens


class EngineError(RuntimeError):
    """The engine could not do what it was asked; infrastructure's fault, not the policy's."""


class EngineTimeout(EngineError):
    """A deadline passed; the message says what was waited for and how far it was."""


class WeightsNotArrived(EngineError):
    """After an update the engine does not hold what was published; names version and tensor."""


Finish = Literal["stop", "length", "context"]
"""stop: a stop id was sampled; length: max_tokens reached; context: the window is full."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled.

    In training only `temperature` may differ from its default: log-probabilities are of softmax(logits /
    temperature) over the whole vocabulary. `temperature=0` is greedy (log-probabilities then of
    softmax(logits)). `top` asks for the k largest log-probabilities per position. `order` sorts admission in
    a deterministic engine: (issue, attempt, turn).
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    top: int = 0
    top_p: float = 1.0
    top_k: int = 0
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Top:
    """Ragged top-k of the sampler, sampled positions only: entry i spans offset_T[i]:offset_T[i+1].

    Kept: probabilities q >= 1e-4, up to K. `id_K` u32, `logprob_K` f16, `mass_T` the kept mass per token.
    """

    offset_T: np.ndarray
    id_K: np.ndarray
    logprob_K: np.ndarray
    mass_T: np.ndarray


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: ids with the stop token, their log-probabilities, exact version per token."""

    ids_T: np.ndarray
    logprob_T: np.ndarray
    version_T: np.ndarray
    finish: Finish
    top: Top | None = None
    routes: np.ndarray | None = None
    counters: dict[str, float] = field(default_factory=dict)  # prefilled, reused (tokens), queue_s, ...


class Engine(Protocol):
    """Asynchronous generation. It steps in a thread of its own and hands results over once a step.

    Cancelling the awaiting task frees the request's slot.
    """

    @property
    def version(self) -> int:
        """Of the weights that new tokens are sampled with."""
        ...

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, media: Any = None
    ) -> Generation:
        """Raises EngineTimeout, EngineError; ValueError for a prompt that is empty or does not fit."""
        ...

    def expect(self, sessions: Iterable[str]) -> None:
        """Deterministic engines: begin the next round only when each session has queued a request or settled,
        then admit in `Sampling.order`. A no-op elsewhere."""
        ...

    def settle(self, session: str) -> None:
        """`session` will ask for nothing more: forget it as expected, free what is kept for it."""
        ...

    def update(self, tensors: Mapping[str, Any], version: int) -> dict[str, str]:
        """Load named tensors (Hugging Face names) in place between steps; blocks until done.

        Caches die with the old version. Returns the checksum of each tensor as the engine now holds
        it (`weights.checksum`), read back from its own storage.
        """
        ...

    def logprobs(self, ids: Tokens) -> np.ndarray:
        """Log-probabilities (_T - 1,) of ids[1:] under the engine's own forward: the probe of a sync."""
        ...

    def sleep(self) -> None:
        """Free caches (and weights, where they can be had back)."""
        ...

    def wake(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Counters since the last call: decoded, prefilled, reused tokens, steps, busy seconds, occupancy."""
        ...

    def close(self) -> None: ...


def request_seed(
    run: str, task: str, epoch: int, attempt: int, player: str = "policy", turn: int = 0, retry: int = 0
) -> int:
    """A 63-bit seed from everything that tells one request from another."""
    key = "\x1f".join(map(str, (run, task, epoch, attempt, player, turn, retry)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


EngineFactory = Callable[..., Engine]
