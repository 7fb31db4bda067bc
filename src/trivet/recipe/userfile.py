"""Python files of a user's own, named in a recipe."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class LoadError(ValueError):
    """A name does not lead to an object; the message says which part of it fails."""


def load_file(path: str | Path) -> ModuleType:
    """A Python file as a module; the same file, unchanged in place, is loaded once."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise LoadError(f"no such file: {file}")
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"trivet_user_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise LoadError(f"{file} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # half-run, it must not be found by the next import
        del sys.modules[name]
        raise
    return module
