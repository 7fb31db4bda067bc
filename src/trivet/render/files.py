"""Model directories that appear whole or not at all, and transformers kept quiet while they are made."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trivet.render.base import RenderError


@contextmanager
def whole(directory: Path, *, force: bool) -> Iterator[Path]:
    """An empty folder beside `directory` that takes its place when the block ends without an error.

    Raises RenderError, and touches nothing, where `directory` is occupied: without `force` by anything, with
    it by what does not look like a model (no config.json).
    """
    _check_free(directory, force)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if directory.is_dir():
            shutil.rmtree(directory)
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_free(directory: Path, force: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise RenderError(f"{directory} is a file: choose another folder")
    held = any(directory.iterdir())
    if held and not force:
        raise RenderError(
            f"{directory} already holds something else and is not empty: choose another folder, remove it, "
            "or pass force=True (--force)"
        )
    if held and not (directory / "config.json").exists():
        raise RenderError(
            f"{directory} holds other things and no config.json: it is not a model's folder and is not "
            "replaced; choose another, or remove it yourself"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers' own: a run has one of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
