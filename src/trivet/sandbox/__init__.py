"""Where programs written by a policy run: behind walls, within bounds, and gone when they should be.

Names are imported when first used: the keeper's process needs only its own module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.sandbox.base import (
        Backend,
        Capabilities,
        ExecResult,
        Limits,
        PathError,
        Sandbox,
        SandboxError,
        Tag,
        Template,
    )
    from trivet.sandbox.bubblewrap import Bubblewrap
    from trivet.sandbox.client import reap, shut_down
    from trivet.sandbox.container import Container
    from trivet.sandbox.e2b import E2B
    from trivet.sandbox.local import Local
    from trivet.sandbox.probe import report
    from trivet.sandbox.zygotes import ChannelClosed, Program, ZygotePool

__all__ = [
    "E2B",
    "Backend",
    "Bubblewrap",
    "Capabilities",
    "ChannelClosed",
    "Container",
    "ExecResult",
    "Limits",
    "Local",
    "PathError",
    "Program",
    "Sandbox",
    "SandboxError",
    "Tag",
    "Template",
    "ZygotePool",
    "reap",
    "report",
    "shut_down",
]

# Where those live that are not in `base`.
_HOME = {
    "E2B": "e2b",
    "Bubblewrap": "bubblewrap",
    "ChannelClosed": "zygotes",
    "Container": "container",
    "Local": "local",
    "Program": "zygotes",
    "ZygotePool": "zygotes",
    "reap": "client",
    "report": "probe",
    "shut_down": "client",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"trivet.sandbox.{_HOME.get(name, 'base')}"), name)
