"""The loop that plays: a policy, its conversations, and the attempt they belong to."""

from trivet.agents.attempt import Attempt
from trivet.agents.conversation import Conversation, ConversationError
from trivet.agents.policy import AttachmentWriter, Policy

__all__ = ["AttachmentWriter", "Attempt", "Conversation", "ConversationError", "Policy"]
