"""The report and the plots: self-contained, escaped, small, and drawn from what there is."""

import io
import json
import math
import random
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.monitor import Monitor, MonitorError, report
from trivet.monitor.charts import chart
from trivet.monitor.panels import MAX_POINTS, History, panels
from trivet.monitor.run_folder import RunFolder
from trivet.monitor.safe_text import esc
from trivet.monitor.terminal import make_console
from trivet.types import Message, Rollout, Scored, Task, Termination, Trace

HOSTILE = (
    "</pre></style><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\x00\x1b[31m\u202eevil\ud800"
)
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "nav",
        "section",
        "article",
        "footer",
    ),
    *("a", "h1", "h2", "h3", "h4", "p", "dl", "div", "dt", "dd", "span", "b", "i", "br", "pre", "details"),
    *("summary", "figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "path", "text", "rect", "g", "circle"),
}


class Page(HTMLParser):
    """Collects tags and attributes; complains about what is not closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def check(path):
    """A page that asks for nothing from elsewhere and holds no script; parsed."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert set(page.tags) <= ALLOWED
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "xlink:href", "formaction")
        assert name != "href" or value.startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert not any(c in text for c in "\x00\x1b\u202e")
    return page


def quiet(folder, **options):
    return Monitor(folder, console=make_console(io.StringIO(), 100), **options)


def rollout(task, answer, value, role="eval"):
    opening = Task(
        env=HOSTILE, messages=(Message("user", task),), id=task, payload={HOSTILE: HOSTILE}, source=HOSTILE
    )
    trace = Trace()
    trace.add_sampled(-1, [1], [-0.5], 0)
    messages = [*opening.messages, Message("assistant", answer)]
    reward = Scored(value, {HOSTILE: value})
    return Rollout(opening, trace, reward, Termination.FINISHED, role=role, messages=messages)


def fill(folder, text="plain"):
    (folder / "recipe.yaml").write_text(f"name: {json.dumps(text)}\nnote: |\n  {text}\n", errors="replace")
    with quiet(folder, samples_every=1) as monitor:
        monitor.about(name=text, **{text: text})
        for stage, keys in (
            ("sft", ["train/loss"]),
            ("rl", ["train/loss", "reward/mean", f"reward/part/{text}"]),
        ):
            with monitor.stage(stage, what=text, source=text, until=text, steps=3):
                monitor.eval(0, "add", {"pass@1": 0.1, "pass@1/low": 0.0, "pass@1/high": 0.2, "pass@4": 0.3})
                for step in range(1, 4):
                    values = dict.fromkeys(keys, step / 3)
                    monitor.log(
                        step, values | {"time/step_s": 1.0, "time/sample_s": 0.6, f"time/{text}": 0.1}
                    )
                monitor.eval(3, "add", {"pass@1": 0.8, "pass@1/low": 0.7, "pass@1/high": 0.9, "pass@4": 0.95})
                monitor.samples(3, [rollout("q " + text, text, 1.0), rollout(text, text, 0.0, "train")])
        monitor.table(text, ["a", text], [[text, 1], [None, 2.5]])
        monitor.warn(text, text)
    return folder


def test_report_shows_the_run(tmp_path):
    path = report(fill(tmp_path))
    assert path == tmp_path / "report.html"
    page = check(path)
    text = " ".join(page.text)
    for part in (
        "10.0%",
        "80.0%",
        "+70.0 points",
        "interval 70.0% to 90.0%",
        "recipe.yaml",
        "cores",
        "Seconds a step",
    ):
        assert part in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value[1:] for name, value in page.attributes if name == "href"}
    assert links == {"results", "curves", "tables", "stages", "samples", "warnings", "recipe", "environment"}
    assert links <= set(ids)
    assert "prefers-color-scheme: dark" in path.read_text()
    names = {p.name for p in (tmp_path / "plots").iterdir()}
    assert {"reward.svg", "reward.png", "loss.svg", "eval_pass-1.png", "eval_add.svg", "time.png"} <= names
    assert not names & {"kl.svg", "length.svg", "entropy.png"}  # no data, no plot
    assert (tmp_path / "plots/reward.png").read_bytes().startswith(b"\x89PNG")
    ET.parse(tmp_path / "plots/reward.svg")


def test_hostile_text_is_escaped_everywhere(tmp_path):
    path = report(fill(tmp_path, HOSTILE))
    page = check(path)  # tags, attributes, control characters
    text = path.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "".join(page.text).count("alert(1)") > 10  # shown as text
    assert "default-src 'none'" in text


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_esc(text):
    escaped = esc(text)
    assert not set("<>\"'") & set(escaped)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", escaped)
    escaped.encode("utf-8")


def test_a_run_of_20_000_steps_stays_small(tmp_path):
    rng = random.Random(0)
    keys = [
        *(
            "reward/mean",
            "reward/correct",
            "reward/format",
            "rollout/solved",
            "rollout/truncated",
            "rollout/length",
        ),
        *("rollout/length_max", "train/loss", "train/entropy", "train/kl", "train/grad_norm", "train/lr"),
        *(
            "engine/tokens_per_s",
            "train/tokens_per_s",
            "time/step_s",
            "time/sample_s",
            "time/train_s",
            "time/sync_s",
        ),
    ]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i in range(20_000):
            record = {
                "stage": "sft" if i < 8000 else "rl",
                "step": i % 8000 if i < 8000 else i - 8000,
                "time": 1e9 + i,
            }
            record |= {key: rng.random() for key in keys}
            if i % 20 == 0:
                for name in ("a", "b", "c"):
                    p = rng.random() / 2 + 0.2
                    record |= {f"eval/{name}/pass@1": p, f"eval/{name}/pass@1/low": p - 0.1}
                    record |= {f"eval/{name}/pass@1/high": p + 0.1, f"eval/{name}/pass@8": p + 0.2}
            file.write(json.dumps(record) + "\n")
    path = report(tmp_path, plots=False)
    check(path)
    assert path.stat().st_size < 3_000_000


def records(values, key="train/loss", stage="rl", start=1):
    return [{"stage": stage, "step": start + i, "time": 1e9 + i, key: v} for i, v in enumerate(values)]


def test_thinning_keeps_means_and_extremes():
    y = np.sin(np.arange(10_000) / 50)
    y[5000] = 9.0
    series = History(records(y.tolist())).series("train/loss", "loss")
    assert series is not None
    assert np.nanmax(series.high) == 9.0
    assert np.nanmin(series.low) == y.min()
    assert abs(np.nanmean(series.y) - y.mean()) < 0.01
    assert series.x[-1] == 10_000
    assert len(series.x) <= MAX_POINTS


def test_stages_share_an_axis_and_break_the_line():
    history = History(records([3.0, 2.0], stage="a") + records([1.0, 0.5, 0.25], stage="b"))
    assert [(s.name, s.start, s.stop) for s in history.spans] == [("a", 0, 2), ("b", 2, 5)]
    series = history.series("train/loss", "loss")
    assert series is not None
    np.testing.assert_array_equal(series.y, [3.0, 2.0, np.nan, 1.0, 0.5, 0.25])
    np.testing.assert_array_equal(series.x, [1, 2, 3, 3, 4, 5])
    assert history.where(2) == ("a", 2)
    assert history.where(3) == ("b", 1)


def test_stages_of_different_scale_get_their_own_panel():
    wide = [3 - i / 20 for i in range(50)]
    small = [0.01 * math.sin(i) for i in range(50)]
    found = panels(History(records(wide, stage="sft") + records(small, stage="rl")))
    assert [(p.id, p.title, [s.name for s in p.spans]) for p in found] == [
        ("loss_sft", "Loss, sft", ["sft"]),
        ("loss_rl", "Loss, rl", ["rl"]),
    ]
    assert found[1].origin == 50


def test_parts_of_parts_of_the_time_are_not_counted_twice():
    values = {"time/step_s": 10.0, "time/train_s": 6.0, "time/train_forward_s": 5.0, "time/sample_s": 3.0}
    (panel,) = panels(History([{"stage": "rl", "step": s, "time": 1.0, **values} for s in (1, 2)]))
    assert {s.name: s.y.tolist() for s in panel.series} == {
        "train": [6, 6],
        "sample": [3, 3],
        "other": [1, 1],
    }
    assert panel.colours() == [0, 1, 7]


def test_models_of_a_bench_stage_are_compared(tmp_path):
    with quiet(tmp_path) as monitor:
        monitor.stage("bench")
        for place, (model, p) in enumerate((("start", 0.1), ("sft", 0.4), ("rl", 0.9))):
            monitor.eval(place, f"add@{model}", {"pass@1": p})
    text = " ".join(check(monitor.report()).text)
    for part in ("add, models compared", "start to rl", "+80.0 points"):
        assert part in text
    assert panels(History(RunFolder.read(tmp_path).records)) == []


def test_missing_values_break_the_line_only_where_they_are():
    found = panels(History(records([1.0, None, 3.0, None, None])))
    (panel,) = found
    np.testing.assert_array_equal(panel.series[0].y, [1.0, np.nan, 3.0, np.nan, np.nan])
    assert panel.series[0].last == 3.0
    assert panels(History(records([None, None]))) == []


metric = st.none() | st.floats(-1e12, 1e12) | st.sampled_from([0.0, 1.0, 1e-300, 1e300, -1e300])


@given(
    st.sampled_from(
        ["train/loss", "reward/mean", "eval/a/pass@1", "time/train_s", "reward/solved", "eval/a/reward"]
    ),
    st.lists(metric, min_size=1, max_size=60),
    st.lists(metric, max_size=60),
)
@settings(max_examples=80, deadline=None)
def test_any_numbers_can_be_drawn(key, first, second):
    history = History(records(first, key, "a", start=0) + records(second, key, "b", start=0))
    for panel in panels(history):
        low, high = panel.limits()
        assert low < high
        text = chart(panel, history)
        assert "nan" not in text
        assert "inf" not in text.replace("information", "")
        ET.fromstring(text)


def test_one_evaluation_only(tmp_path):
    with quiet(tmp_path) as monitor:
        monitor.stage("bench")
        monitor.eval(0, "gsm8k", {"pass@1": 0.4, "pass@1/low": 0.3, "pass@1/high": 0.5, "count": 64})
    text = " ".join(check(monitor.report()).text)
    assert "40.0%" in text
    assert "points" not in text  # nothing to compare with
    assert (tmp_path / "plots/eval_pass-1.svg").exists()


def test_empty_run_and_no_run(tmp_path):
    with quiet(tmp_path / "run") as monitor:
        pass
    check(monitor.report())
    with pytest.raises(MonitorError, match="not a run folder"):
        report(tmp_path)


def test_no_plots_when_not_wanted(tmp_path):
    fill(tmp_path)
    with quiet(tmp_path, plots=False) as monitor:
        monitor.report()
    assert not (tmp_path / "plots").exists()


def test_old_plots_go(tmp_path):
    fill(tmp_path)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots/kl.svg").write_text("old")
    (tmp_path / "plots/notes.txt").write_text("mine")
    report(tmp_path)
    assert not (tmp_path / "plots/kl.svg").exists()
    assert (tmp_path / "plots/notes.txt").exists()


def test_without_matplotlib_the_report_is_still_written(tmp_path, monkeypatch):
    import sys

    fill(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match="no plots were drawn"):
        check(report(tmp_path))


def test_warnings_and_time_over_sessions(tmp_path):
    for count in (1, 3):
        with quiet(tmp_path) as monitor, monitor.stage("rl"):
            monitor.log(1, {"train/loss": 1.0})
            for i in range(count):
                monitor.warn("verifier", f"text {i}")
    folder = RunFolder.read(tmp_path)
    (entry,) = folder.warnings()
    assert entry["total"] == 4
    assert "text 2" in entry["text"]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    spent = sum(
        e["time"] * (1 if e["kind"] == "end" else -1) for e in events if e["kind"] in ("stage", "end")
    )
    (stage,) = folder.stages()
    assert stage.seconds == pytest.approx(spent, abs=1e-3)


def test_a_killed_stage_counts_until_its_last_line(tmp_path):
    lines = [
        {"time": 100.0, "kind": "stage", "stage": "rl", "step": 0, "text": "grpo", "source": "", "until": ""},
        {"time": 500.0, "kind": "stage", "stage": "rl", "step": 0, "text": "grpo", "source": "", "until": ""},
        {"time": 530.0, "kind": "end", "stage": "rl", "step": 2, "text": "", "seconds": 30.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [{"stage": "rl", "step": 1, "time": 110.0}, {"stage": "rl", "step": 2, "time": 520.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (stage,) = RunFolder.read(tmp_path).stages()
    assert stage.seconds == 10 + 30
