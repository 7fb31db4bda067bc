"""metrics.jsonl: always valid, read back as written, cut lines left out, rewinding exact."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.monitor import DamagedLine, MonitorError, read_metrics
from trivet.monitor.files import JsonLines, clean, number, read_json, read_lines, write_json

names = st.from_regex(r"[a-z]{1,8}/[a-z@0-9_]{1,12}", fullmatch=True)
anything = st.floats() | st.integers() | st.booleans() | st.none() | st.text(max_size=5)


@given(st.lists(st.dictionaries(names, anything, max_size=6), max_size=8))
@settings(max_examples=60, deadline=None)
def test_round_trip(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("run")
    file = JsonLines(folder / "metrics.jsonl")
    expected = []
    for i, metrics in enumerate(steps):
        values, bad = clean(metrics)
        assert bad == [key for key, value in values.items() if value is None]
        file.append({"stage": "s", "step": i, "time": 1.5, **values})
        expected.append({"stage": "s", "step": i, "time": 1.5, **values})
    file.close()
    assert read_metrics(folder) == expected
    for line in (folder / "metrics.jsonl").read_text().splitlines() if steps else []:
        json.loads(line, parse_constant=pytest.fail)  # never NaN or Infinity
    for metrics, record in zip(steps, expected, strict=True):
        for key, value in metrics.items():
            if isinstance(value, int | float) and abs(value) < 1e300:
                assert record[key] == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([2.5]), 2.5),
        (np.bool_(True), 1),
        (True, 1),
        (math.nan, None),
        (-math.inf, None),
        (np.float64("nan"), None),
        (np.array([1.0, 2.0]), None),
        (10**400, None),
        ("0.5", None),
        (None, None),
    ],
)
def test_number(value, expected):
    got = number(value)
    assert got == expected
    assert type(got) in (int, float, type(None))


def test_torch_scalars():
    torch = pytest.importorskip("torch")
    assert number(torch.tensor(0.25)) == 0.25
    assert number(torch.tensor(3)) == 3
    assert number(torch.tensor(float("inf"))) is None
    assert number(torch.ones(2)) is None
    assert number(torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True)) == 1.5


@pytest.mark.parametrize("name", ["stage", "step", "time", "warnings", "", 3])
def test_reserved_names_are_refused(name):
    with pytest.raises(MonitorError, match="cannot be used"):
        clean({name: 1.0})


def line(step, **values):
    return {"stage": "rl", "step": step, "time": 0.0, **values}


def test_cut_last_line_is_left_out_and_repaired(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2)) + '\n{"stage":"rl","st')
    with pytest.warns(DamagedLine, match="line 3"):
        assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    file = JsonLines(path)
    file.append(line(3))
    file.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]  # no warning left: pytest -W error


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line(1)))
    file = JsonLines(path)
    file.append(line(2))
    file.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_damage_in_the_middle_costs_only_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"a"\n[1]\n\xff\xfe\n' + json.dumps(line(5)).encode() + b'\n{"stage": "rl", "x": NaN}\n{"y": 1}\n'
    )
    with pytest.warns(DamagedLine):
        assert [r["step"] for r in read_metrics(tmp_path)] == [5]


def test_lines_of_a_step_are_merged(tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.append(line(1, loss=None, warnings=1))
    file.append(line(1, reward=None, warnings=2))
    file.append(line(2, loss=3.0))
    file.close()
    assert read_metrics(tmp_path) == [line(1, loss=None, warnings=3, reward=None), line(2, loss=3.0)]


def test_keep_is_atomic_and_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = JsonLines(path)
    for step in range(10):
        file.append(line(step))
    before = path.stat().st_ino
    assert file.keep(lambda r: True) == 0
    assert path.stat().st_ino == before  # untouched
    assert file.keep(lambda r: r["step"] < 4) == 6
    assert path.stat().st_ino != before  # replaced, not written in place
    file.append(line(4))
    file.close()
    assert [r["step"] for r in read_lines(path)] == [0, 1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_absent_and_damaged_files(tmp_path):
    assert read_metrics(tmp_path) == []
    assert read_json(tmp_path / "none.json", {}) == {}
    (tmp_path / "half.json").write_text('{"a": ')
    with pytest.warns(DamagedLine, match="half.json"):
        assert read_json(tmp_path / "half.json", {}) == {}
    write_json(tmp_path / "whole.json", {"a": "\ud800"})  # a lone surrogate, as broken text may hold
    assert (tmp_path / "whole.json").exists()
