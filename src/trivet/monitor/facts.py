"""What a run's numbers depend on besides the recipe: versions and the machine. Nothing heavy is imported."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("trivet", "torch", "transformers", "tokenizers", "renderers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, the platform and the packages that decide a run's numbers."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Processor, the cores this process may use, and memory, as far as the system tells."""
    found = {"processor": _processor()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["cores"] = str(cores or "")
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{size / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        found["memory"] = ""
    return {key: value for key, value in found.items() if value}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
