"""Lines for people: formats, alignment, widths, a terminal that goes away."""

import io
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from trivet.monitor import Monitor
from trivet.monitor.fields import STEP_FIELDS, compact, duration, plain, tick_text, ticks, write_metric
from trivet.monitor.notices import Notices
from trivet.monitor.progress import Board
from trivet.monitor.terminal import SafeFile, StepLine, make_console


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.421, "0.42s"),
        (0.999, "1.0s"),
        (1.84, "1.8s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (312, "5m12s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (273600, "3d04h"),
        (float("inf"), "-"),
        (-3, "0.00s"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.62, "0.620"),
        (-0.0123, "-0.012"),
        (12.345, "12.35"),
        (0.0, "0.000"),
        (3.1e-6, "3.1e-06"),
        (1.2e7, "1.2e+07"),
    ],
)
def test_plain(value, text):
    assert plain(value) == text


def test_counts_and_shares():
    assert [compact(v) for v in (950, 12345, 999_700, 4.5e6, 0.5)] == ["950", "12.3k", "1.0M", "4.5M", "0.5"]
    assert write_metric("reward/solved", 0.613) == "61%"
    assert write_metric("rollout/truncated", 0.004) == "0.4%"
    assert write_metric("rollout/length_mean", 11.3) == "11.3"
    assert write_metric("time/train_s", 75.0) == "1m15s"
    assert write_metric("train/loss", None) == "-"


@given(
    st.floats(-1e9, 1e9),
    st.floats(1e-6, 1e9),
    st.sampled_from(["number", "percent", "seconds", "rate"]),
    st.integers(2, 8),
)
@settings(max_examples=150, deadline=None)
def test_no_two_ticks_read_the_same(low, gap, kind, n):
    if gap < 1e-5 * abs(low):
        return  # narrower than floats of this size resolve well
    if kind != "number":
        low = abs(low)
    places = ticks(low, low + gap, n)
    assert len(places) <= 2 * n + 2
    assert all(low - 1e-6 * gap <= p <= low + gap * (1 + 1e-6) for p in places)
    if len(places) > 1 and gap > (1.0 if kind == "seconds" else 1e-3) * abs(low):
        step = places[1] - places[0]
        texts = [tick_text(p, kind, step) for p in places if abs(p) > 1e-9 * gap]
        assert len(set(texts)) == len(texts)


def test_tick_labels():
    assert [tick_text(v, "rate", 5000) for v in (0, 5000, 10_000)] == ["0", "5k", "10k"]
    assert [tick_text(v, "rate", 2e7) for v in (9.8e8, 1e9, 1.02e9)] == ["980M", "1.00G", "1.02G"]
    assert [tick_text(v, "percent", 0.025) for v in (0.025, 0.05)] == ["2.5%", "5.0%"]
    assert [tick_text(v, "number", 5e-4) for v in (5e-4, 1e-3, 1.5e-3)] == ["5e-4", "1e-3", "1.5e-3"]
    assert [tick_text(v, "number", 0.25) for v in (-0.25, 0.5)] == ["-0.25", "0.50"]
    assert [tick_text(v, "seconds", 60) for v in (60, 120)] == ["60s", "2m00s"]


FULL = {
    "reward/mean": 0.62,
    "reward/solved": 0.61,
    "rollout/length_mean": 11.3,
    "train/loss": -0.0123,
    "train/kl": 0.001,
    "train/entropy": 1.21,
    "train/grad_norm": 0.4,
    "engine/tokens_per_s": 12345.0,
    "time/step_s": 1.8,
}


def test_step_line_reads_as_documented():
    clock = Clock()
    line = StepLine("rl", 200, clock=clock)
    clock.now += 2
    first = line.format(12, FULL, 120).plain
    assert first.startswith("rl   12/200  reward 0.620    solved  61%  length  11.3  loss -0.0123  kl 0.0010")
    assert first.endswith("1.8s  eta 6m16s")  # 188 steps of 2 s
    clock.now += 2
    second = line.format(13, FULL | {"reward/mean": 0.9}, 120).plain
    assert "reward 0.900 ▲" in second
    assert second.index("loss") == first.index("loss")
    third = line.format(14, FULL | {"reward/mean": 0.1}, 120).plain
    assert "reward 0.100 ▼" in third


def test_quiet_columns_show_once_there_is_something():
    line = StepLine("rl", 9, clock=Clock())
    assert "unscored" not in line.format(1, {"reward/mean": 1.0, "reward/unscored": 0.0}, 100).plain
    assert "unscored  25%" in line.format(2, {"reward/mean": 1.0, "reward/unscored": 0.25}, 100).plain
    assert "unscored   0%" in line.format(3, {"reward/mean": 1.0, "reward/unscored": 0.0}, 100).plain


def test_extra_metrics_and_no_total():
    line = StepLine("rl", None, show=["train/lr"], clock=Clock())
    text = line.format(3, {"train/lr": 1e-5}, 100).plain
    assert text.startswith("rl  step     3  train/lr 1.0e-05")
    assert "eta" not in text


@given(
    st.dictionaries(
        st.sampled_from([f.key for f in STEP_FIELDS]),
        st.none() | st.floats(-1e12, 1e12),
        max_size=len(STEP_FIELDS),
    ),
    st.sampled_from([10, 20, 60, 100]),
    st.integers(0, 10**7),
)
@settings(max_examples=150, deadline=None)
def test_never_wider_than_asked(metrics, width, step):
    line = StepLine("a-stage", 200, clock=Clock())
    assert line.format(step, metrics, width).cell_len <= width


@pytest.mark.parametrize("width", [60, 100])
def test_all_output_fits_the_width(tmp_path, width):
    out = io.StringIO()
    with Monitor(tmp_path, console=make_console(out, width)) as monitor:
        with monitor.stage(
            "rl", what="grpo on addition " * 5, source="stage sft", until="200 steps", steps=200
        ):
            monitor.eval(
                0, "addition", {"pass@1": 0.1, "pass@1/low": 0.05, "pass@1/high": 0.2, "pass@4": 0.3}
            )
            for step in range(1, 5):
                monitor.log(step, FULL)
            monitor.eval(4, "addition" * 4, {f"m{i}": 0.5 for i in range(30)})
            monitor.warn("verifier", "no answer " * 30)
            monitor.info("word " * 60)
        monitor.table("A table " * 20, ["name", "value"], [["x" * 150, 1.25], ["y", None]])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("rl  ") and "reward" in line for line in lines) == 4
    assert "\x1b" not in out.getvalue()  # colour only in a terminal


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    console.print(StepLine("rl", 10, clock=Clock()).format(1, FULL, 80))
    assert "\x1b[36" not in out.getvalue()
    assert "\x1b[3" not in out.getvalue()


def test_hostile_text_does_not_drive_the_terminal(tmp_path):
    out = io.StringIO()
    with Monitor(tmp_path, console=make_console(out, 100)) as monitor:
        monitor.stage("rl", what="\x1b[2J")
        monitor.warn("a\x07", "\x1b]0;title\x07 [red]x[/red] [/broken]")
        monitor.info("\x9b31m")
        monitor.table("\x1b", ["\x1b"], [["\x1b[0m [/x]"]])
        with monitor.progress("\x1b[1m[/x]", 3) as bar:
            bar.advance()
    text = out.getvalue()
    assert not any(c in text for c in "\x1b\x07\x9b")
    assert "[red]x[/red] [/broken]" in text


def test_ascii_terminal():
    raw = io.BytesIO()
    console = make_console(io.TextIOWrapper(raw, encoding="ascii"), 80)
    console.print("über 1 → 2")
    console.file.flush()
    assert raw.getvalue() == b"?ber 1 ? 2\n"


def test_warnings_are_folded():
    clock = Clock()
    notices = Notices(gap_s=10, clock=clock)
    assert notices.add("verifier", "first") == "first"
    assert notices.add("other", "x") == "x"
    assert [notices.add("verifier", f"n{i}") for i in range(50)] == [None] * 50
    clock.now += 11
    assert notices.add("verifier", "late") == "late (51 more, 52 in all)"
    assert notices.add("verifier", "later") is None
    assert notices.rest() == [("verifier", "later (1 more, 53 in all)")]
    assert notices.rest() == []
    assert notices.counts() == {"verifier": 53, "other": 1}


def test_closed_stream_is_no_error(tmp_path):
    out = io.StringIO()
    monitor = Monitor(tmp_path, console=make_console(out, 80))
    monitor.stage("rl", steps=2)
    out.close()
    monitor.log(1, FULL)
    monitor.warn("x", "y")
    monitor.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


_SCRIPT = """
import sys
from trivet.monitor import Monitor
with Monitor(sys.argv[1]) as m, m.stage("rl", steps=3000):
    for step in range(1, 3001):
        m.log(step, {"reward/mean": 0.5, "train/loss": 0.1})
    m.warn("a", "b")
    m.table("t", ["a"], [[1]])
sys.stderr.write("done")
"""


@pytest.mark.parametrize("shell", ['"$0" -c "$1" "$2" | head -1', '"$0" -c "$1" "$2" >&-'])
def test_broken_pipe_and_closed_stdout(tmp_path, shell):
    command = ["bash", "-o", "pipefail", "-c", shell, sys.executable, _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "done"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3000


def test_safe_file_forwards_what_a_console_asks():
    file = SafeFile(None)
    assert not file.isatty()
    assert file.write("x") == 1
    assert file.fileno() > 0
    assert not file.broken


def test_progress_in_a_file_is_sparse():
    out, clock = io.StringIO(), Clock()
    board = Board(make_console(out, 80), clock=clock)
    with board.add("sampling", 512) as bar:
        for _ in range(300):  # ten minutes
            clock.now += 2
            bar.advance(1)
            board.look()
    lines = out.getvalue().splitlines()
    assert lines[0] == "sampling  1/512  0%  2.0s  eta 17m02s"
    assert 8 <= len(lines) <= 16


def test_short_work_shows_nothing():
    out, clock = io.StringIO(), Clock()
    board = Board(make_console(out, 80), clock=clock)
    with board.add("quick", 3) as bar:
        clock.now += 1.9
        board.look()
        bar.advance()
    clock.now += 10
    board.look()
    assert out.getvalue() == ""


def test_progress_bar_in_a_terminal():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=70, color_system=None, legacy_windows=False)
    console.is_dumb_terminal  # noqa: B018
    board = Board(console, clock=clock)
    board._live = True
    with board.add("scoring [/x]", 10) as bar:
        bar.advance(4)
        clock.now += 3
        board.look()
        bar.advance(2)
        console.print("a line above")
        time.sleep(0.3)
    text = out.getvalue()
    assert "scoring [/x]" in text
    assert "4/10" in text or "6/10" in text
    assert "a line above" in text


def test_no_thread_is_left():
    board = Board(make_console(io.StringIO(), 80))
    for _ in range(5):
        with board.add("a", 1), board.add("b", None):
            pass
    deadline = time.monotonic() + 5
    while any(t.name == "trivet-progress" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [t for t in threading.enumerate() if t.name == "trivet-progress"]


def test_quiet_prints_warnings_only(tmp_path):
    out = io.StringIO()
    with (
        Monitor(tmp_path, quiet=True, console=make_console(out, 80)) as monitor,
        monitor.stage("rl", steps=3),
    ):
        monitor.log(1, FULL)
        monitor.info("hello")
        monitor.warn("verifier", "no answer")
    assert out.getvalue() == "⚠ verifier: no answer\n"
    assert (tmp_path / "metrics.jsonl").exists()


def test_columns_from_the_environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert make_console(io.StringIO()).width == 77
    monkeypatch.delenv("COLUMNS")
    assert make_console(io.StringIO()).width == 120
    assert os.environ.get("COLUMNS") is None
