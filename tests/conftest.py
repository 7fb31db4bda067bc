"""Shared by all tests: one thread per worker, no network, no time limits on property tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before numpy or torch is imported: several test workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "trivet", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trivet")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Larger data that lives beside the checkout; tests that need it are skipped where it is absent."""
    path = Path(os.environ.get("TRIVET_SHARED") or Path(__file__).parents[2] / "shared")
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; set TRIVET_SHARED")
    return path
