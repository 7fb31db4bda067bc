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

__all__ = [
    "Backend",
    "Bubblewrap",
    "Capabilities",
    "ExecResult",
    "Limits",
    "PathError",
    "Sandbox",
    "SandboxError",
    "Tag",
    "Template",
    "reap",
    "shut_down",
]

_BASE = {
    "Backend",
    "Capabilities",
    "ExecResult",
    "Limits",
    "PathError",
    "Sandbox",
    "SandboxError",
    "Tag",
    "Template",
}
_HOME = {"Bubblewrap": "bubblewrap", "reap": "client", "shut_down": "client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "base" if name in _BASE else _HOME[name]
    return getattr(importlib.import_module(f"trivet.sandbox.{home}"), name)
