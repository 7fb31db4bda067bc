"""The table of metrics: its names, and how a logged name is found in it."""

from __future__ import annotations

import re

import pytest

from trivet.monitor.fields import guess_kind
from trivet.monitor.glossary import METRICS, SECTIONS, describe, reference
from trivet.monitor.panels import _LINES


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/unscored/judge: timeout/2", "reward/unscored/<cause>"),
        ("train/pg/clipped", "train/<stream>/clipped"),
        ("train/critic/loss", "train/critic/loss"),
        ("train/value/loss", "train/<stream>/loss"),
        ("train/pg/gap/3_4", "train/<stream>/gap/<age>"),
        ("train/pg/ess/tis_factor", "train/<stream>/ess/<factor>"),
        ("eval/add/pass@4", "eval/<taskset>/pass@<k>"),
        ("eval/add/pass@4/low", "eval/<taskset>/pass@<k>/low"),
        ("time/critic/train_plan_s", "time/critic/train_<part>_s"),
        ("train/my_own", None),
        ("train/pg/my_own", None),
        ("reward/part/", None),
        ("train/<stream>/loss/more", None),
        ("elsewhere/mean", None),
    ],
)
def test_names_are_found(name, entry):
    found = describe(name)
    assert (found.name if found else None) == entry


def test_every_entry_says_something_once():
    names = [metric.name for section in SECTIONS for metric in section.metrics]
    assert len(names) == len(set(names)) == len(METRICS)
    for metric in METRICS.values():
        assert len(metric.about) > 4, metric.name
        assert "|" not in metric.about
        assert f"| `{metric.name}` | {metric.unit} | {metric.about} |" in reference()


def test_the_unit_says_how_it_is_written():
    assert guess_kind("train/pg/tis_clipped") == "percent"
    assert guess_kind("explorer/lost") == "percent"
    assert guess_kind("train/tokens_per_s") == "rate"
    assert guess_kind("time/sync_s") == "seconds"
    assert guess_kind("train/annotate_s") == "seconds"
    assert guess_kind("train/kl") == "number"
    assert guess_kind("pass@4") == "percent"  # an evaluation's own name, without its taskset


def test_what_is_drawn_is_in_the_table_and_of_one_unit():
    for id_, _, lines in _LINES:
        entries = [describe(key) for key, _ in lines]
        assert all(entries), id_
        assert len({guess_kind(key) for key, _ in lines}) == 1, id_


def test_rules_read_what_is_in_the_table():
    from pathlib import Path

    from trivet.monitor import alerts

    keys = re.findall(r'history, "([a-z_/]+)"', Path(alerts.__file__).read_text(encoding="utf-8"))
    assert len(keys) >= 9
    assert all(describe(key) for key in keys)
