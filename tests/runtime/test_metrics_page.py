"""The page of metrics and warnings is made from the code and is up to date."""

from __future__ import annotations

from pathlib import Path

from trivet.monitor.alerts import RULES
from trivet.runtime.metrics_page import reference, write

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    copy = tmp_path / "metrics.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    assert not write(copy), "run: make docs"


def test_every_rule_is_there_with_its_thresholds() -> None:
    text = reference()
    assert all(f"| `{name}` | " in text for name in RULES)
    assert "above 0.5, steps 3" in text  # truncation_high
