"""What the libraries underneath print is not meant for whoever uses trivet."""

from __future__ import annotations


def hush_libraries() -> None:
    """No progress bars of transformers, and none of its warnings: trivet shows what there is to wait for, and
    checks lengths against the context itself."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
