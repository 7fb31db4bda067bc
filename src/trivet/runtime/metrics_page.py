"""The page of metrics and warnings, made from the glossary and the rules.

python -m trivet.runtime.metrics_page docs/reference/metrics.md writes it between the page's two marks.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from trivet.monitor import glossary
from trivet.monitor.alerts import RULES
from trivet.recipe.reference import replace_between

BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


def reference() -> str:
    """Every metric, then every warning with the thresholds it has by default."""
    rows = ["| rule | when | thresholds |", "|---|---|---|"]
    for name, rule in RULES.items():
        when = " ".join((inspect.getdoc(rule) or "").split())
        given = inspect.signature(rule).parameters.values()
        limits = ", ".join(f"{p.name} {p.default:g}" for p in given if p.kind is p.KEYWORD_ONLY)
        rows.append(f"| `{name}` | {when} | {limits} |")
    about = (
        "A stage that samples says aloud when its numbers go wrong, once for each episode; in `events.jsonl` "
        "and the report the warning has the rule's name."
    )
    return "\n\n".join([glossary.reference(), "## Warnings", about, "\n".join(rows)])


def write(page: Path) -> bool:
    """Put the tables between the page's marks; whether that changed it. Raises ValueError without marks."""
    return replace_between(page, BEGIN, END, reference())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
