"""The reference is what the code says, and says something of every part."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def test_the_page_is_up_to_date(tmp_path):
    copy = tmp_path / "algorithms.md"
    copy.write_text(PAGE.read_text())
    subprocess.run([sys.executable, "-m", "trivet.algorithms.reference", str(copy)], check=True)
    assert copy.read_text() == PAGE.read_text(), "run `make docs`"


def test_every_entry_has_prose_and_a_source_where_one_is_due():
    text = PAGE.read_text()
    entries = re.split(r"^### ", text.split("algorithms: begin -->")[1], flags=re.M)[1:]
    assert len(entries) > 80
    for entry in entries:
        name, _, body = entry.partition("\n")
        assert len(body.strip()) > 40, name
