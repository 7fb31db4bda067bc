"""The durable log of prompts and rollouts. SQLAlchemy is imported when a ledger is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.buffer.attachments import AttachmentStore
from trivet.buffer.errors import AttachmentError, LedgerBusy, LedgerError

if TYPE_CHECKING:
    from trivet.buffer.lease import Lease
    from trivet.buffer.ledger import Ledger
    from trivet.buffer.replay import Decision, Freed, Recovered, Rewound
    from trivet.buffer.schema import State
    from trivet.buffer.stage import StageLedger
    from trivet.buffer.strategies import Candidates, register_strategy
    from trivet.buffer.versions import Version

_LAZY = {
    "Candidates": "strategies",
    "Decision": "replay",
    "Freed": "replay",
    "Lease": "lease",
    "Ledger": "ledger",
    "Recovered": "replay",
    "Rewound": "replay",
    "StageLedger": "stage",
    "State": "schema",
    "Version": "versions",
    "register_strategy": "strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


__all__ = [
    "AttachmentError",
    "AttachmentStore",
    "Candidates",
    "Decision",
    "Freed",
    "Lease",
    "Ledger",
    "LedgerBusy",
    "LedgerError",
    "Recovered",
    "Rewound",
    "StageLedger",
    "State",
    "Version",
    "register_strategy",
]
