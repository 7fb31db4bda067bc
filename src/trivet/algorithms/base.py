"""The tables an update is made from, and what an algorithm is: parts, streams, weights.

A batch is a flat concatenation of rows. It becomes an update in five steps, all numpy:

    shaping(batch) -> reward_N      what is rewarded beyond what the verifier said
    credit(batch) -> advantage      who is praised for what
    masks(batch) -> mask_T          which tokens may teach
    aggregation(batch, mask_T)      -> weight_T, the denominator inside, known before the first forward
    streams                         objective + weight_T + columns; loss = sum over t of weight_t * l_t

so that ranks and micro-batches only ever SUM. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trivet.types import IssueKey, Termination

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = frozenset({"ref_logp", "proximal_logp", "value", "top", "routes", "teacher_logp"})
"""What a part may ask the trainer, the engine or the buffer to provide."""

TERMINATIONS: tuple[Termination, ...] = tuple(Termination)
ROLES: tuple[str, ...] = ("train", "baseline")
KINDS: tuple[str, ...] = ("rollout", "sft", "preference")
PREFERENCES: Mapping[str | None, int] = {None: 0, "chosen": 1, "rejected": -1}

PAIR_MARGIN = "pair_margin"
"""Counter of a pair's rollouts, and the objectives' column: by how much the chosen answer is better."""

UnitKind = Literal["row", "rollout", "group"]
Level = Literal["token", "unit"]
Model = Literal["policy", "critic"]
UNITS: tuple[UnitKind, ...] = ("row", "rollout", "group")


class AlgorithmError(ValueError):
    """An algorithm cannot be built or cannot be applied to this data; says why and what to do."""


@dataclass(frozen=True, slots=True)
class TopColumn:
    """The sampler's most probable tokens, ragged: token t has the entries offset_T1[t]:offset_T1[t + 1].

    Tokens that were not sampled, or whose engine kept none, have no entries.
    """

    offset_T1: np.ndarray  # int64 (_T + 1,), from 0
    id_E: np.ndarray  # int32
    logprob_E: np.ndarray  # float32, under the sampler, at the token's temperature

    def slice(self, start: int, stop: int) -> TopColumn:
        """Tokens start..stop-1 as a column of their own."""
        first, last = int(self.offset_T1[start]), int(self.offset_T1[stop])
        offset_T1 = self.offset_T1[start : stop + 1] - first
        return TopColumn(offset_T1, self.id_E[first:last], self.logprob_E[first:last])


@dataclass(slots=True)
class Batch:
    """Groups as flat columns: tokens (_T) of rows (_R) of rollouts (_N) of groups (_G), in group order.

    A rollout's rows lie side by side, and so do a group's rollouts. Token t is predicted from the tokens
    before it in its row; the token at position 0 is predicted from nothing and is never trained.
    """

    # tokens
    ids_T: np.ndarray  # int32
    position_T: np.ndarray  # int32, index inside the row
    row_T: np.ndarray  # int32
    sampled_T: np.ndarray  # bool, the policy wrote it
    train_T: np.ndarray  # float32 loss weight as recorded, before any mask
    logprob_T: np.ndarray  # float32 behaviour log-probability at `temperature_T`; NaN: no known sampler
    version_T: np.ndarray  # int32 weight version that sampled it; -1: foreign
    temperature_T: np.ndarray  # float32
    turn_T: np.ndarray  # int32 turn among the rollout's sampled nodes; -1 elsewhere
    node_T: np.ndarray  # int32 node of the rollout's trace
    # rows
    row_start_R: np.ndarray  # int64 first token
    row_length_R: np.ndarray  # int64 tokens
    row_rollout_R: np.ndarray  # int64
    # rollouts
    reward_N: np.ndarray  # float64; NaN: unscored
    group_N: np.ndarray  # int64 index into group_ids
    player_N: np.ndarray  # int64 index into players
    attempt_N: np.ndarray  # int64
    termination_N: np.ndarray  # int8 index into TERMINATIONS
    length_N: np.ndarray  # int64 trained tokens n_i over all its rows, before any mask
    source_N: np.ndarray  # int64 index into sources
    role_N: np.ndarray  # int8 index into ROLES
    preference_N: np.ndarray  # int8: 1 chosen, -1 rejected, 0 neither
    raw_reward_N: np.ndarray  # float64 as the verifier gave it; `reward_N` is what shaping made of it
    # turns: the sampled nodes of each rollout's trace, in order of creation, rollout after rollout
    turn_rollout_W: np.ndarray  # int64
    turn_reward_W: np.ndarray  # float64 earned at that turn; NaN: none
    turn_state_W: np.ndarray  # int64 index into states, the situation it was taken in; -1: none
    # groups
    kind_G: np.ndarray  # int8 index into KINDS
    group_ids: tuple[str, ...]
    issues: tuple[IssueKey, ...]
    # names
    rollout_ids: tuple[str, ...]
    players: tuple[str, ...]
    sources: tuple[str, ...]
    causes: tuple[str, ...]  # per rollout: why it is unscored ("" where it is scored)
    states: tuple[str, ...] = ()
    step: int = 0  # the step it is trained at, 1, 2, ...; for parts that change with time
    # (_N,) float64 by name: parts of the reward and numbers about the attempt; NaN: it has none of that name
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    counters: dict[str, np.ndarray] = field(default_factory=dict)
    top: TopColumn | None = None
    # (_T, _L, _K) experts chosen per token, layer and choice; -1: not recorded
    routes_T: np.ndarray | None = None
    # (_T,) arrays by name, added at take time: proximal_logp, ref_logp, value, teacher_logp ...
    annotations: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.ids_T)

    @property
    def rows(self) -> int:
        return len(self.row_start_R)

    @property
    def rollouts(self) -> int:
        return len(self.reward_N)

    @property
    def groups(self) -> int:
        return len(self.group_ids)

    @property
    def rollout_T(self) -> np.ndarray:
        """The rollout each token belongs to."""
        return np.repeat(self.row_rollout_R, self.row_length_R)

    @property
    def turn_index_T(self) -> np.ndarray:
        """int64 turn (_W) each token belongs to; -1: not sampled."""
        first_N = np.searchsorted(self.turn_rollout_W, np.arange(self.rollouts))
        return np.where(self.turn_T >= 0, first_N[self.rollout_T] + self.turn_T, -1)

    @property
    def truncated_N(self) -> np.ndarray:
        """The policy was cut off by a budget."""
        return np.asarray([t.truncated for t in TERMINATIONS])[self.termination_N]

    @property
    def aborted_N(self) -> np.ndarray:
        """Infrastructure failed under it: says nothing about the policy."""
        return self.termination_N == TERMINATIONS.index(Termination.ABORTED)

    @property
    def compared_N(self) -> np.ndarray:
        """Scored and not aborted: what credit may look at. The rest leaves before any mean is taken."""
        return np.isfinite(self.reward_N) & ~self.aborted_N

    def unit_T(self, kind: UnitKind) -> np.ndarray:
        """int64 index of what ratios, vetoes and sequence means are taken over."""
        if kind == "row":
            return self.row_T.astype(np.int64)
        return self.rollout_T if kind == "rollout" else self.group_N[self.rollout_T]

    def slice_groups(self, start: int, stop: int) -> Batch:
        """Groups start..stop-1 as a batch of their own; the arrays are views where no index shifts."""
        n = slice(*np.searchsorted(self.group_N, [start, stop]).tolist())
        r = slice(*np.searchsorted(self.row_rollout_R, [n.start, n.stop]).tolist())
        lengths = self.row_length_R
        t = slice(int(lengths[: r.start].sum()), int(lengths[: r.stop].sum()))
        w = slice(*np.searchsorted(self.turn_rollout_W, [n.start, n.stop]).tolist())
        cut = {"T": t, "R": r, "N": n, "W": w, "G": slice(start, stop)}
        out: dict[str, Any] = {}
        for f in fields(self):
            value, axis = getattr(self, f.name), f.name.rsplit("_", 1)[-1]
            out[f.name] = value[cut[axis]] if axis in cut and value is not None else value
        out["row_T"] = out["row_T"] - r.start
        out["row_start_R"] = out["row_start_R"] - t.start
        out["row_rollout_R"] = out["row_rollout_R"] - n.start
        out["group_N"] = out["group_N"] - start
        out["turn_rollout_W"] = out["turn_rollout_W"] - n.start
        out["group_ids"], out["issues"] = self.group_ids[start:stop], self.issues[start:stop]
        out["rollout_ids"], out["causes"] = self.rollout_ids[n], self.causes[n]
        out["annotations"] = {name: column[t] for name, column in self.annotations.items()}
        out["parts"] = {name: column[n] for name, column in self.parts.items()}
        out["counters"] = {name: column[n] for name, column in self.counters.items()}
        out["top"] = self.top.slice(t.start, t.stop) if self.top is not None else None
        return Batch(**out)


@dataclass(slots=True)
class TopInputs:
    """The sampler's most probable tokens at the positions of a chunk: E entries, `position_E` into its P."""

    position_E: Tensor  # int64
    sampler_E: Tensor  # log-probability under the sampler
    logp_E: Tensor  # under the current policy, at the row's temperature; carries a gradient


@dataclass(slots=True)
class ObjectiveInputs:
    """What an objective sees: P positions, a chunk for token level, whole units for unit level.

    All are tensors of shape (_P,) on one device; only `logp_P` (and, where a part asks for them, `entropy_P`,
    `value_P` and `top.logp_E`) carries a gradient. `weight_P` holds the denominator and the (detached)
    correction factors. A critic's streams read `value_P`; their `logp_P` is the sampler's.
    """

    logp_P: Tensor  # current policy, at the row's temperature
    weight_P: Tensor
    unit_P: Tensor  # int64; dense 0..units-1 for unit level
    units: int  # 0 for token level
    behaviour_P: Tensor  # NaN where no sampler is known
    proximal_P: Tensor | None = None  # the centre of the ratio; detached
    ref_P: Tensor | None = None
    advantage_P: Tensor | None = None
    entropy_P: Tensor | None = None
    value_P: Tensor | None = None  # the critic's present estimate
    preference_P: Tensor | None = None  # 1 chosen, -1 rejected, 0 neither
    rollout_P: Tensor | None = None  # int64 rollout of the batch; tells a pair's sides apart
    top: TopInputs | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)  # further credit columns and annotations


Shaping = Callable[[Batch], np.ndarray]
"""-> reward_N from `batch.reward_N` (what earlier shaping left); NaN stays NaN: no reward is made up."""
Credit = Callable[[Batch], "np.ndarray | Mapping[str, np.ndarray]"]
"""-> advantage (_N,) or (_T,), or columns by name with "advantage" among them. NaN: no advantage (not 0)."""
Mask = Callable[[Batch], np.ndarray]
"""-> keep (_N,) or (_T,), bool: what may be trained. The credit before it has seen everything."""
Aggregation = Callable[[Batch, np.ndarray], np.ndarray]
"""(batch, mask_T float64 >= 0) -> weight_T float64; all 0 for an all-0 mask."""
Objective = Callable[[ObjectiveInputs], "tuple[Tensor, dict[str, Tensor]]"]
"""-> (weighted loss terms, to be summed: (_P,) or (_U,); additive statistics)."""
Correction = Callable[[ObjectiveInputs], "tuple[Tensor, dict[str, Tensor]]"]
"""-> (factor_P, detached; additive statistics). Scales l_t; never changes the denominator."""
Control = Callable[[float, int, Mapping[str, float]], float]
"""(a stream's scale, the step just trained, its metrics) -> its scale for the next step."""


@dataclass(frozen=True, slots=True)
class Part:
    """One named part with its options bound. Calling it calls the part.

    `traits`: what the part says about itself, e.g. `level` and `unit` ("token"/"unit" and over what),
    `advantage` (the loss is proportional to an advantage), `behaviour` (reads behaviour log-probabilities),
    `entropy` (differentiates the entropy), `group_min` (smallest group it makes sense for), `model` (whose
    output it is a loss of: "policy" or "critic"), `columns` (of a credit: what it returns beside the
    advantage), `column` (of an objective: which of them it reads).
    """

    role: str
    name: str
    call: Callable[..., Any]
    options: Mapping[str, Any]
    needs: frozenset[str] = frozenset()
    traits: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One term of the loss: scale * sum over t of weight_t * factor_t * l_t.

    `select(batch) -> bool (_N,) or (_T,)` limits it to some rollouts or tokens (None: all). `control` moves
    the scale from step to step; the run keeps where it stands.
    """

    name: str
    objective: Part
    aggregation: Part
    corrections: tuple[Part, ...] = ()
    scale: float = 1.0
    select: Mask | None = None
    control: Part | None = None

    @property
    def model(self) -> Model:
        """Whose output it is a loss of."""
        return self.objective.traits.get("model", "policy")

    @property
    def top(self) -> bool:
        """A part of it reads the sampler's most probable tokens."""
        return any("top" in p.needs for p in (self.objective, *self.corrections))

    @property
    def level(self) -> Level:
        """ "unit" when the objective or a correction must see whole units."""
        parts = (self.objective, *self.corrections)
        return "unit" if any(p.traits.get("level") == "unit" for p in parts) else "token"

    @property
    def unit(self) -> UnitKind:
        """The widest unit any part of it is taken over."""
        units = [p.traits.get("unit", "row") for p in (self.objective, *self.corrections)]
        return max(units, key=UNITS.index)

    @property
    def behaviour(self) -> bool:
        """A part of it reads the sampler's log-probabilities."""
        return any(p.traits.get("behaviour", False) for p in (self.objective, *self.corrections))


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kind (name), its parts, and what they need. Built by `resolve`; holds no arrays.

    `consumes`: kinds of group it trains on. `group_min`: smallest group that can carry a signal. `modes`:
    run modes it can train in. `proximal`: the centre of the importance ratio: "recompute" (the policy the
    update starts from), "behaviour" (what the sampler said), None (there is no ratio). `produces`: what a
    stage under it trains; a reward model does not become the next stage's policy.
    """

    kind: str
    streams: tuple[StreamSpec, ...]
    credit: Part | None = None
    shaping: tuple[Part, ...] = ()
    masks: tuple[Part, ...] = ()
    consumes: frozenset[str] = frozenset({"rollout"})
    modes: frozenset[str] = frozenset({"both", "async", "train"})
    proximal: Literal["recompute", "behaviour"] | None = None
    produces: Literal["policy", "reward_model"] = "policy"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every part, each once, in the order it takes effect."""
        out: list[Part] = list(self.shaping)
        out += [self.credit] if self.credit else []
        out += self.masks
        for stream in self.streams:
            out += [stream.aggregation, stream.objective, *stream.corrections]
            out += [stream.control] if stream.control else []
        return tuple(out)

    @property
    def needs(self) -> frozenset[str]:
        """The union of what the parts need, and the proximal policy where it is recomputed."""
        own = frozenset({"proximal_logp"}) if self.proximal == "recompute" else frozenset()
        return own.union(*(part.needs for part in self.parts))

    @property
    def group_min(self) -> int:
        return max((part.traits.get("group_min", 1) for part in self.parts), default=1)

    @property
    def entropy(self) -> bool:
        """An objective differentiates the entropy."""
        return any(s.objective.traits.get("entropy", False) for s in self.streams)

    @property
    def greedy(self) -> bool:
        """One attempt of each group is the policy's greedy answer."""
        return self.credit is not None and bool(self.credit.traits.get("greedy", False))

    @property
    def compares(self) -> bool:
        """A stream is taken over whole groups: half a preference pair teaches it nothing."""
        return any(stream.unit == "group" for stream in self.streams)

    @property
    def critic(self) -> bool:
        """A value model is trained beside the policy."""
        return any(s.model == "critic" for s in self.streams)

    def annotations(self, updates_per_batch: int) -> frozenset[str]:
        """Columns to put into `batch.annotations` before the first update.

        With one update per batch the proximal policy is the current one: its log-probabilities come out of
        the update's own forward and no pass is spent on them, unless credit reads them.
        """
        needs = self.needs & {"ref_logp", "proximal_logp", "value", "teacher_logp"}
        free = updates_per_batch == 1 and "proximal_logp" not in self.credit_needs
        return needs - {"proximal_logp"} if free else needs

    @property
    def credit_needs(self) -> frozenset[str]:
        """Annotations that must exist before `prepare`; the others may follow it, on active rows only."""
        parts = (*self.shaping, *((self.credit,) if self.credit else ()))
        return frozenset().union(*(part.needs for part in parts)) - {"top", "routes"}


@dataclass(slots=True)
class Stream:
    """A stream with its weights for one update. `weight_T` float64, `active_T` bool: l_t matters.

    `active_T` is False where the weight is 0 and, for objectives proportional to an advantage, where the
    advantage is 0 (for unit level: over the whole unit). `columns`: advantage and other credit columns.
    """

    name: str
    spec: StreamSpec
    level: Level
    unit_T: np.ndarray
    weight_T: np.ndarray
    active_T: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def objective(self) -> Part:
        return self.spec.objective


@dataclass(slots=True)
class PreparedBatch:
    """One update's batch: streams with weights, what to forward, what was left out and why.

    `row_active_R`: rows the policy forwards. `trained_T`: positions whose log-probability some stream of the
    policy wants (inside active rows); a critic's are its streams' `active_T`. `mask_T` float64: train weight
    after masks. `update` of `updates` in this batch. `scales`: of streams whose control has moved them.
    """

    batch: Batch
    algorithm: Algorithm
    streams: tuple[Stream, ...]
    mask_T: np.ndarray
    columns: dict[str, np.ndarray]
    row_active_R: np.ndarray
    trained_T: np.ndarray
    counters: dict[str, float]
    update: int = 0
    updates: int = 1
    scales: dict[str, float] = field(default_factory=dict)
    age_T: np.ndarray | None = None  # int64 staleness in publications, where the current version is known

    @property
    def active_T(self) -> np.ndarray:
        """bool (_T,): tokens at which a stream of any model has a loss."""
        return np.any([np.zeros(self.batch.tokens, bool), *(s.active_T for s in self.streams)], axis=0)

    @property
    def empty(self) -> bool:
        """Nothing would change: skip the optimiser's step and count it."""
        return not self.active_T.any()


class NothingToTrain(RuntimeError):
    """No token of the batch can teach anything; the step is skipped, counted and explained.

    `counters` as of PreparedBatch; `solve_rate`: histogram of the groups' mean rewards {bin: groups};
    `causes`: {why: rollouts}.
    """

    def __init__(
        self, message: str, counters: dict[str, float], solve_rate: dict[str, int], causes: dict[str, int]
    ) -> None:
        super().__init__(message)
        self.counters, self.solve_rate, self.causes = counters, solve_rate, causes
