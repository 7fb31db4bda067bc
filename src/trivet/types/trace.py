"""What happened, token by token.

A trace is a forest of nodes over one growing token buffer. A node is a run of tokens of one origin;
a child continues its parent; concatenating the nodes on a path gives exactly what the engine saw.
Text is a view of it: nothing is ever tokenised a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from trivet.types import codec

Tokens = np.ndarray
"""A read-only int32 array of token ids, shape (_T,)."""


class TraceError(ValueError):
    """A trace was asked for something that would make it untrue."""


class Origin(StrEnum):
    """Where a node's tokens come from."""

    MESSAGE = "message"  # a message's rendered text (prompt, tool result, expert answer)
    GENERATION_PROMPT = "generation_prompt"  # what the template puts before an answer
    SAMPLED = "sampled"  # written by the policy
    INSERTED = "inserted"  # put in by the renderer between turns; never trained


@dataclass(frozen=True, slots=True)
class Attachment:
    """A heavy column kept in a file named by its hash.

    `start`/`stop` are token positions inside the node, `dtype` and `shape` describe the file's array.
    """

    name: str
    kind: str
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Node:
    """A run of tokens of one origin. `message` indexes the rollout's messages (-1: none)."""

    parent: int
    start: int
    length: int
    origin: Origin
    message: int = -1
    temperature: float = 1.0
    reward: float | None = None
    state: str | None = None
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One path from a root to a leaf, as training reads it. All arrays have shape (_T,).

    `train_T` is 0 where an earlier row already trains the token. `logprob_T` is NaN where no sampler is
    known, `version_T` -1 for foreign tokens, `turn_T` the index of the sampled node among the trace's
    sampled nodes in order of creation (-1 elsewhere).
    """

    leaf: int
    ids_T: np.ndarray
    sampled_T: np.ndarray
    train_T: np.ndarray
    logprob_T: np.ndarray
    version_T: np.ndarray
    temperature_T: np.ndarray
    node_T: np.ndarray
    turn_T: np.ndarray

    def __len__(self) -> int:
        return len(self.ids_T)


_COLUMNS: dict[str, Any] = {
    "id": np.int32,
    "sampled": np.bool_,
    "train": np.float32,
    "logprob": np.float32,
    "version": np.int32,
}


def _loss_weights(train: float | np.ndarray, shape: tuple[int, ...], origin: Origin) -> np.ndarray:
    """`train` as one weight per token; raises TraceError where there must be none."""
    train_T = np.broadcast_to(np.asarray(train, np.float32), shape)
    if origin is not Origin.MESSAGE and train_T.any():
        raise TraceError(f"tokens of origin {origin} are never trained")
    if not np.isfinite(train_T).all() or (train_T < 0).any():
        raise TraceError("loss weights must be finite and not negative")
    return train_T


@dataclass(slots=True)
class Trace:
    """A forest of nodes and its per-token columns (`id`, `sampled`, `train`, `logprob`, `version`)."""

    nodes: list[Node] = field(default_factory=list)
    _data: dict[str, np.ndarray] = field(
        default_factory=lambda: {k: np.empty(0, dtype) for k, dtype in _COLUMNS.items()}
    )
    _size: int = 0

    def __len__(self) -> int:
        """Tokens stored, each node counted once."""
        return self._size

    def column(self, name: str) -> np.ndarray:
        """A read-only view of one column over the whole buffer, in order of creation."""
        view = self._data[name][: self._size]
        view.flags.writeable = False
        return view

    # -- writing ---------------------------------------------------------------------------------

    def _append(self, columns: dict[str, Any], n: int) -> int:
        start, need = self._size, self._size + n
        if need > len(self._data["id"]):
            capacity = max(64, need, 2 * len(self._data["id"]))
            # Old views keep the old buffer: a prompt handed to an engine never changes under it.
            for name, old in self._data.items():
                grown = np.empty(capacity, old.dtype)
                grown[:start] = old[:start]
                self._data[name] = grown
        for name, values in columns.items():
            self._data[name][start:need] = values
        self._size = need
        return start

    def _check_parent(self, parent: int) -> None:
        if not -1 <= parent < len(self.nodes):
            raise TraceError(f"parent {parent} does not exist: the trace has {len(self.nodes)} nodes")

    def add(
        self,
        parent: int,
        ids: Sequence[int] | np.ndarray,
        origin: Origin = Origin.MESSAGE,
        *,
        message: int = -1,
        train: float | np.ndarray = 0.0,
    ) -> int:
        """Continue `parent` (-1 starts a root) with tokens the policy did not write; the new node.

        `train` (a number or shape (_T,)) is the loss weight: non-zero for supervised answers only.
        """
        self._check_parent(parent)
        if origin is Origin.SAMPLED:
            raise TraceError("sampled tokens come with log-probabilities: use add_sampled")
        ids_T = np.asarray(ids, np.int32)
        if not isinstance(train, float) or train != 0.0:
            train = _loss_weights(train, ids_T.shape, origin)
        columns = {"id": ids_T, "sampled": False, "train": train, "logprob": np.nan, "version": -1}
        start = self._append(columns, len(ids_T))
        self.nodes.append(Node(parent, start, len(ids_T), origin, message))
        return len(self.nodes) - 1

    def add_sampled(
        self,
        parent: int,
        ids: Sequence[int] | np.ndarray,
        logprob: Sequence[float] | np.ndarray,
        version: int | Sequence[int] | np.ndarray,
        *,
        temperature: float = 1.0,
        message: int = -1,
        attachments: tuple[Attachment, ...] = (),
    ) -> int:
        """Continue `parent` with what the policy wrote; the new node.

        `logprob` (_T,) are of softmax(logits / temperature) over the whole vocabulary, `version` is the
        weight version of each token. Raises TraceError on lengths that disagree and on values that no
        sampler gives (NaN, infinite, positive).
        """
        self._check_parent(parent)
        ids_T, logprob_T = np.asarray(ids, np.int32), np.asarray(logprob, np.float32)
        version_T = np.asarray(version, np.int32)
        if version_T.ndim and version_T.shape != ids_T.shape:
            raise TraceError(f"{ids_T.size} tokens but {version_T.size} weight versions")
        if logprob_T.shape != ids_T.shape:
            raise TraceError(f"{ids_T.size} tokens but {logprob_T.size} log-probabilities")
        if len(ids_T) and not (-np.inf < logprob_T.min() and logprob_T.max() <= 1e-4):  # NaN fails both
            bad = int(np.flatnonzero(~(logprob_T <= 1e-4) | ~np.isfinite(logprob_T))[0])
            raise TraceError(f"token {bad} has log-probability {logprob_T[bad]}: no sampler gives that")
        if not temperature > 0:
            raise TraceError(f"temperature {temperature} must be above 0 for sampled tokens")
        columns = {
            "id": ids_T,
            "sampled": True,
            "train": 1.0,
            "logprob": np.minimum(logprob_T, 0.0),
            "version": version_T,
        }
        start = self._append(columns, len(ids_T))
        node = Node(parent, start, len(ids_T), Origin.SAMPLED, message, float(temperature))
        node.attachments = attachments
        self.nodes.append(node)
        return len(self.nodes) - 1

    # -- reading ---------------------------------------------------------------------------------

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`."""
        self._check_parent(node)
        out: list[int] = []
        while node != -1:
            out.append(node)
            node = self.nodes[node].parent
        return out[::-1]

    def _gather(self, name: str, path: Sequence[int]) -> np.ndarray:
        """One column along a path: a view where the path is contiguous in the buffer, else a copy."""
        nodes = [self.nodes[i] for i in path]
        if not nodes:
            return self.column(name)[:0]
        contiguous = all(a.start + a.length == b.start for a, b in pairwise(nodes))
        column = self.column(name)
        if contiguous:
            return column[nodes[0].start : nodes[-1].start + nodes[-1].length]
        return np.concatenate([column[n.start : n.start + n.length] for n in nodes])

    def tokens(self, node: int) -> Tokens:
        """Everything the engine saw and wrote up to the end of `node`."""
        ids = self._gather("id", self.path(node))
        ids.flags.writeable = False
        return ids

    def children(self, node: int) -> Iterator[int]:
        return (i for i, n in enumerate(self.nodes) if n.parent == node)

    def match(self, ids: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """The longest chain of whole nodes that is a prefix of `ids`: (last node or -1, its length)."""
        ids_T, column = np.asarray(ids, np.int32), self.column("id")
        best, best_length = -1, 0
        ends: dict[int, int] = {-1: 0}  # matching node -> tokens matched up to its end
        for index, node in enumerate(self.nodes):  # parents precede children
            begin = ends.get(node.parent)
            if begin is None or begin + node.length > len(ids_T):
                continue
            end = begin + node.length
            if np.array_equal(column[node.start : node.start + node.length], ids_T[begin:end]):
                ends[index] = end
                if end > best_length:  # of equals the first made: re-used prompts share one node
                    best, best_length = index, end
        return best, best_length

    def branch(
        self,
        ids: Sequence[int] | np.ndarray,
        origin: Origin = Origin.MESSAGE,
        *,
        message: int = -1,
    ) -> int:
        """The node at which a request with prompt `ids` continues, made where it is missing.

        Whole nodes are re-used; the rest becomes one new unsampled node, also where it repeats the first
        tokens of a node it diverges from.
        """
        node, matched = self.match(ids)
        rest = np.asarray(ids, np.int32)[matched:]
        if len(rest) == 0 and node >= 0:
            return node
        return self.add(node, rest, origin, message=message)

    def leaves(self) -> list[int]:
        """Nodes without children, in order of creation."""
        parents = {node.parent for node in self.nodes}
        return [i for i in range(len(self.nodes)) if i not in parents]

    def rows(self) -> list[Row]:
        """One row per leaf; a node is trained in the first row that holds it."""
        turn = np.cumsum([n.origin is Origin.SAMPLED for n in self.nodes], dtype=np.int32) - 1
        seen: set[int] = set()
        out: list[Row] = []
        for leaf in self.leaves():
            path = self.path(leaf)
            nodes = [self.nodes[i] for i in path]
            lengths = [n.length for n in nodes]
            fresh = np.repeat([i not in seen for i in path], lengths)
            turns = [turn[i] if self.nodes[i].origin is Origin.SAMPLED else -1 for i in path]
            seen.update(path)
            out.append(
                Row(
                    leaf=leaf,
                    ids_T=self._gather("id", path),
                    sampled_T=self._gather("sampled", path),
                    train_T=np.where(fresh, self._gather("train", path), np.float32(0)),
                    logprob_T=self._gather("logprob", path),
                    version_T=self._gather("version", path),
                    temperature_T=np.repeat(np.asarray([n.temperature for n in nodes], np.float32), lengths),
                    node_T=np.repeat(np.asarray(path, np.int32), lengths),
                    turn_T=np.repeat(np.asarray(turns, np.int32), lengths),
                )
            )
        return out

    # -- storage ---------------------------------------------------------------------------------

    def attachments(self) -> list[Attachment]:
        return [a for node in self.nodes for a in node.attachments]

    def attach(self, node: int, attachment: Attachment) -> None:
        """Tie a heavy column to `node`."""
        self.nodes[node].attachments = (*self.nodes[node].attachments, attachment)

    def to_bytes(self) -> bytes:
        """One compressed blob; each column can be read alone with `codec.read_column`."""
        columns = {name: self.column(name) for name in _COLUMNS}
        nodes = self.nodes
        meta = {
            "nodes": [[n.parent, n.length, n.origin, n.message, n.temperature] for n in nodes],
            "reward": {str(i): n.reward for i, n in enumerate(nodes) if n.reward is not None},
            "state": {str(i): n.state for i, n in enumerate(nodes) if n.state is not None},
            "attachments": [
                [i, a.name, a.kind, a.start, a.stop, a.dtype, list(a.shape)]
                for i, n in enumerate(nodes)
                for a in n.attachments
            ],
        }
        return codec.pack(columns, meta)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Trace:
        """The inverse of `to_bytes`. Raises CodecError, TraceError."""
        columns, meta = codec.unpack(blob)
        try:
            data = {name: np.array(columns[name], dtype) for name, dtype in _COLUMNS.items()}
            nodes = [
                (int(parent), int(length), Origin(origin), int(message), float(temperature))
                for parent, length, origin, message, temperature in meta["nodes"]
            ]
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(f"trace blob lacks a part: {error!r}") from error
        trace = cls(_data=data, _size=len(data["id"]))
        if any(len(column) != trace._size for column in data.values()):
            raise TraceError("trace blob: columns of different lengths")
        held = sum(length for _, length, *_ in nodes)
        if min((length for _, length, *_ in nodes), default=0) < 0 or held != trace._size:
            raise TraceError(f"trace blob: nodes hold {held} tokens, columns {trace._size}")
        start = 0
        for i, (parent, length, origin, message, temperature) in enumerate(nodes):
            if not -1 <= parent < i:
                raise TraceError(f"trace blob: node {i} has parent {parent}")
            node = Node(parent, start, length, origin, message, temperature)
            node.reward = meta["reward"].get(str(i))
            node.state = meta["state"].get(str(i))
            trace.nodes.append(node)
            start += length
        for i, name, kind, a, b, dtype, shape in meta["attachments"]:
            trace.attach(i, Attachment(name, kind, a, b, dtype, tuple(shape)))
        return trace

    def copy(self) -> Trace:
        """An independent copy."""
        data = {name: np.array(self.column(name)) for name in _COLUMNS}
        return Trace([replace(node) for node in self.nodes], data, self._size)
