"""The ledger's tables and the states an issue can be in. Nothing here is particular to SQLite."""

from __future__ import annotations

from enum import StrEnum

import sqlalchemy as sa

SCHEMA_VERSION = 1


class State(StrEnum):
    """Where an issue of a prompt is. Exactly one at any moment; the last five are terminal."""

    ISSUED = "issued"  # waiting to be played
    IN_FLIGHT = "in_flight"  # being played, or stored and waiting for feedback
    READY = "ready"  # stored, every reward known
    LEASED = "leased"  # in a trainer's hands
    TRAINED = "trained"  # an optimiser step was made of it
    FILTERED = "filtered"  # a filter refused it
    STALE = "stale"  # too old when its turn came
    FAILED = "failed"  # could not be played within its tries
    SURPLUS = "surplus"  # not needed: its batch was already full

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.TRAINED, State.FILTERED, State.STALE, State.FAILED, State.SURPLUS})
_DROPPED = frozenset({State.FILTERED, State.STALE, State.FAILED, State.SURPLUS})

# What the methods may do. Going back (release, expiry, rewind) is not in this table: it undoes a move.
LEGAL: dict[State, frozenset[State]] = {
    State.ISSUED: frozenset({State.IN_FLIGHT}),
    State.IN_FLIGHT: frozenset({State.READY, State.FILTERED, State.FAILED, State.SURPLUS}),
    State.READY: _DROPPED | {State.LEASED},
    State.LEASED: _DROPPED | {State.TRAINED},
    **{state: frozenset() for state in TERMINAL},
}

metadata = sa.MetaData()
# SQLite numbers rows without gaps in reuse only for INTEGER PRIMARY KEY AUTOINCREMENT.
_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _text(name: str, **more: object) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, **more)  # type: ignore[arg-type]


meta = sa.Table("meta", metadata, sa.Column("key", sa.Text, primary_key=True), _text("value"))

# Who opened the ledger: one row per opening. Claims and leases belong to an opening, not to a name.
sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session", _Id, primary_key=True),
    _text("owner"),
    _text("machine"),
    sa.Column("pid", _Id, nullable=False),
    _text("process"),
    sa.Column("opened", sa.Float, nullable=False),
    sa.Column("closed", sa.Float),
    sqlite_autoincrement=True,
)

stages = sa.Table(
    "stages",
    metadata,
    sa.Column("stage", sa.Text, primary_key=True),
    _text("fingerprint"),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("last_step", _Id, nullable=False),  # highest acknowledged or checkpointed step
    sa.Column("collected", _Id, nullable=False),  # blobs of decisions up to this step are gone
)

tasks = sa.Table("tasks", metadata, sa.Column("hash", sa.Text, primary_key=True), _text("body"))

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("lease", _Id, primary_key=True),
    sa.Column("stage", sa.ForeignKey("stages.stage"), nullable=False),
    sa.Column("session", sa.ForeignKey("sessions.session"), nullable=False),
    _text("status"),  # open | acked | released | expired | undone
    sa.Column("expires", sa.Float, nullable=False),
    sa.Column("step", _Id),  # recorded step of a replay; the acknowledged step afterwards
    sa.Column("replay", sa.Boolean, nullable=False),
    sa.Column("read", sa.Boolean, nullable=False),  # its groups were read: their rewards are frozen
    sa.Index("leases_open", "stage", "status"),
    sqlite_autoincrement=True,
)

issues = sa.Table(
    "issues",
    metadata,
    sa.Column("seq", _Id, primary_key=True),  # the order of issue
    sa.Column("stage", sa.ForeignKey("stages.stage"), nullable=False),
    _text("task_id"),
    sa.Column("epoch", _Id, nullable=False),
    sa.Column("round", _Id, nullable=False),
    _text("state"),
    sa.Column("changed", sa.Float, nullable=False),
    sa.Column("pin", sa.Text),  # the undone decision, to be made again at `step`
    sa.Column("step", _Id),  # the step the decision was made for
    sa.Column("pos", _Id),  # place in the lease, then in the step
    sa.Column("cause", sa.Text),
    sa.Column("gap", _Id),
    sa.Column("tries", _Id),
    sa.Column("session", sa.ForeignKey("sessions.session")),  # who plays it (in_flight)
    sa.Column("expires", sa.Float),
    sa.Column("lease", sa.ForeignKey("leases.lease")),
    sa.Column("kind", sa.Text),  # rollout | sft | preference | task; null until something is stored
    sa.Column("group_id", sa.Text),
    sa.Column("task", sa.ForeignKey("tasks.hash")),
    sa.Column("pending", _Id, nullable=False),  # rollouts whose reward is still to come
    sa.Column("min_version", _Id),
    sa.Column("max_version", _Id),
    sa.UniqueConstraint("stage", "epoch", "round", "task_id"),
    sa.Index("issues_state", "stage", "state", "seq"),
    sa.Index("issues_step", "stage", "step"),
    sa.Index("issues_lease", "lease"),
    sqlite_autoincrement=True,
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("issue", sa.ForeignKey("issues.seq"), nullable=False),
    sa.Column("position", _Id, nullable=False),
    sa.Column("task", sa.ForeignKey("tasks.hash"), nullable=False),
    _text("stage"),
    _text("task_id"),
    _text("group_id"),
    sa.Column("attempt", _Id, nullable=False),
    _text("player"),
    _text("role"),
    _text("source"),
    _text("termination"),
    _text("reward_kind"),  # scored | unscored | pending
    sa.Column("reward_value", sa.Float),
    sa.Column("reward_cause", sa.Text),
    sa.Column("reward_until", sa.Float),  # set while pending
    _text("reward"),
    sa.Column("sampled_tokens", _Id, nullable=False),
    sa.Column("min_version", _Id),
    sa.Column("max_version", _Id),
    sa.Column("created", sa.Float, nullable=False),
    _text("messages"),
    _text("header"),
    sa.Column("trace", sa.LargeBinary),  # null once collected
    sa.Index("rollouts_issue", "issue", "position"),
    sa.Index("rollouts_until", "reward_until"),
)

attachments = sa.Table(
    "attachments",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("rollout", sa.ForeignKey("rollouts.id"), primary_key=True),
    sa.Column("added", sa.Float, nullable=False),  # wall clock, to compare with file times
    sa.Index("attachments_rollout", "rollout"),
)

# Attachments no rollout refers to any more, until their files are gone.
garbage = sa.Table(
    "garbage",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("added", sa.Float, nullable=False),  # when the last rollout that referred to it was stored
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("stage", sa.ForeignKey("stages.stage"), primary_key=True),
    sa.Column("step", _Id, primary_key=True),
    _text("state"),
    sa.Column("created", sa.Float, nullable=False),
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("version", _Id, primary_key=True),
    sa.Column("step", _Id, nullable=False),
    _text("stage"),
    sa.Column("parent", sa.ForeignKey("versions.version")),
    _text("checksum"),
    _text("incarnation"),
    sa.Column("created", sa.Float, nullable=False),
    sqlite_autoincrement=True,
)
