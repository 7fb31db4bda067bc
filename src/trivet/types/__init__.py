"""The words every room shares: tasks, messages, traces, rollouts, rewards."""

from trivet.types.codec import CodecError
from trivet.types.messages import (
    Message,
    Part,
    Role,
    SchemaError,
    Task,
    ToolCall,
    canonical_json,
    content_hash,
)
from trivet.types.rollout import (
    FEEDBACK_TIMEOUT,
    Group,
    IssueKey,
    Pending,
    Reward,
    Rollout,
    Scored,
    Termination,
    Unscored,
    reward_from_dict,
    reward_to_dict,
)
from trivet.types.trace import Attachment, Node, Origin, Row, Tokens, Trace, TraceError

__all__ = [
    "FEEDBACK_TIMEOUT",
    "Attachment",
    "CodecError",
    "Group",
    "IssueKey",
    "Message",
    "Node",
    "Origin",
    "Part",
    "Pending",
    "Reward",
    "Role",
    "Rollout",
    "Row",
    "SchemaError",
    "Scored",
    "Task",
    "Termination",
    "Tokens",
    "ToolCall",
    "Trace",
    "TraceError",
    "Unscored",
    "canonical_json",
    "content_hash",
    "reward_from_dict",
    "reward_to_dict",
]
