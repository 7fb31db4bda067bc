"""The monitor as a run uses it: steps, evaluations, rewinding, tables, TensorBoard."""

import io
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from trivet.monitor import Monitor, MonitorError, read_metrics
from trivet.monitor.files import read_json, read_lines
from trivet.monitor.terminal import make_console


def make(folder, **options):
    out = io.StringIO()
    return Monitor(folder, console=make_console(out, 100), **options), out


def test_steps_and_evaluations(tmp_path):
    monitor, out = make(tmp_path)
    with monitor, monitor.stage("rl", what="grpo", source="stage sft", steps=2):
        monitor.eval(0, "addition", {"pass@1": 0.25, "pass@1/low": 0.2, "pass@1/high": 0.3})
        monitor.log(1, {"train/loss": np.float32(0.5)})
        monitor.log(2, {"train/loss": 0.25})
        monitor.eval(2, "addition", {"pass@1": 0.75})
    records = read_metrics(tmp_path)
    assert [(r["stage"], r["step"]) for r in records] == [("rl", 0), ("rl", 1), ("rl", 2)]
    assert records[0]["eval/addition/pass@1/low"] == 0.2
    assert records[1]["train/loss"] == 0.5
    assert records[2]["train/loss"] == 0.25
    assert records[2]["eval/addition/pass@1"] == 0.75
    assert all(r["time"] > 1e9 for r in records)
    text = out.getvalue()
    assert "grpo · from stage sft · until 2 steps" in text
    assert "rl  eval 0  addition  pass@1 25.0% (20.0% to 30.0%)\n" in text
    assert "rl  eval 2  addition  pass@1 75.0%  ▲ +50.0 since start\n" in text
    assert "eval addition" in text


def test_line_of_an_evaluation_leaves_out_what_says_nothing(tmp_path):
    monitor, out = make(tmp_path)
    with monitor, monitor.stage("rl"):
        values = {
            "tasks": 64.0,
            "reward": 0.5,
            "unscored": 0.0,
            "length": 11.25,
            "truncated": 0.125,
            "pass@4": 0.75,
        }
        monitor.eval(20, "addition", values)
    assert (
        "rl  eval 20  addition  pass@4 75.0%  reward 0.500  length 11.2  truncated 12.5%\n" in out.getvalue()
    )


def test_values_that_are_no_numbers_become_null_and_a_warning(tmp_path):
    monitor, out = make(tmp_path)
    monitor.stage("rl")
    monitor.log(1, {"train/loss": float("nan"), "train/kl": float("inf"), "train/lr": 1.0})
    monitor.close()
    (raw,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(raw, parse_constant=pytest.fail)
    assert record["train/loss"] is None
    assert record["train/kl"] is None
    assert record["train/lr"] == 1.0
    assert record["warnings"] == 2
    assert "not finite: train/loss, train/kl at step 1 of rl" in out.getvalue()


def test_wrong_use_is_refused(tmp_path):
    monitor, _ = make(tmp_path)
    with pytest.raises(MonitorError, match=r"call monitor.stage"):
        monitor.log(1, {})
    monitor.stage("rl")
    with pytest.raises(MonitorError, match="steps start at 0"):
        monitor.log(-1, {})
    with pytest.raises(TypeError):
        monitor.log(1.5, {})
    with pytest.raises(MonitorError, match="slash"):
        monitor.eval(1, "a/b", {})
    with pytest.raises(MonitorError, match="2 cells"):
        monitor.table("t", ["a", "b"], [[1]])
    monitor.close()
    monitor.close()  # twice is no error
    assert read_metrics(tmp_path) == []


def fill(monitor):
    for stage, steps in (("sft", 3), ("rl", 5), ("code", 2)):
        monitor.stage(stage, steps=steps)
        monitor.eval(0, "add", {"pass@1": 0.1})
        for step in range(1, steps + 1):
            monitor.log(step, {"train/loss": float(step)})
            if step == 3:
                monitor.table(f"{stage} at 3", ["a"], [[step]])
        monitor.eval(steps, "add", {"pass@1": 0.9})
        monitor.table(f"{stage} at its end", ["a"], [[steps]])


def places(folder):
    return [(r["stage"], r["step"]) for r in read_metrics(folder)]


def test_rewind_drops_later_steps_and_stages(tmp_path):
    monitor, _ = make(tmp_path)
    fill(monitor)
    monitor.close()
    monitor, _ = make(tmp_path)  # a new process
    assert monitor.rewind("rl", 3) == 2 + 1 + 4  # rl 4 and 5, its evaluation, four lines of code
    kept = [("sft", s) for s in range(4)] + [("rl", s) for s in range(4)]
    assert places(tmp_path) == kept
    assert [t["title"] for t in read_json(tmp_path / "tables.json", [])] == [
        "sft at 3",
        "sft at its end",
        "rl at 3",
    ]
    monitor.stage("rl", steps=5)
    for step in (4, 5):
        monitor.log(step, {"train/loss": float(step)})
    monitor.close()
    assert places(tmp_path) == [*kept, ("rl", 4), ("rl", 5)]
    assert [e["kind"] for e in read_lines(tmp_path / "events.jsonl")].count("rewind") == 1


def test_rewind_to_step_0_keeps_the_evaluation_before_training(tmp_path):
    monitor, _ = make(tmp_path)
    fill(monitor)
    monitor.rewind("sft", 0)
    assert places(tmp_path) == [("sft", 0)]
    assert monitor.rewind("unknown", 0) == 0
    assert monitor.rewind("sft", 0) == 0
    assert [e["kind"] for e in read_lines(tmp_path / "events.jsonl")].count("rewind") == 1
    assert monitor.rewind("sft", -1) == 1
    assert places(tmp_path) == []
    monitor.close()


def test_a_resumed_run_reads_like_one_never_stopped(tmp_path):
    def run(folder, stops):
        monitor, _ = make(folder)
        monitor.stage("rl", steps=6)
        for step in range(1, 7):
            monitor.log(step, {"train/loss": 1 / step})
            if step in stops:
                monitor._metrics._file.write('{"stage":"rl","st')  # killed while writing
                monitor._metrics._file.flush()
                monitor, _ = make(folder)
                with pytest.warns(UserWarning, match="not a JSON object"):
                    monitor.rewind("rl", step - 2)
                monitor.stage("rl", steps=6)
                for again in range(step - 1, step + 1):
                    monitor.log(again, {"train/loss": 1 / again})
        monitor.close()
        return [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(folder)]

    with pytest.warns(UserWarning, match="not a JSON object"):  # also met when the monitor is opened
        stopped = run(tmp_path / "a", {3, 5})
    assert stopped == run(tmp_path / "b", set())


def test_sessions_add_up(tmp_path):
    for _ in range(3):
        monitor, _ = make(tmp_path)
        monitor.about(name="my run", device="cpu")
        monitor.close()
    run = read_json(tmp_path / "run.json", {})
    assert len(run["sessions"]) == 3
    assert run["name"] == "my run"
    assert run["machine"]["device"] == "cpu"
    assert int(run["machine"]["cores"]) >= 1
    assert run["versions"]["python"].startswith("3.")


def test_a_table_of_the_same_title_replaces_the_earlier(tmp_path):
    monitor, out = make(tmp_path)
    monitor.table("t", ["a", "b"], [["x", 1.0]])
    monitor.table("t", ["a", "b"], [["y", np.int64(2)], [None, float("nan")]])
    monitor.close()
    (table,) = read_json(tmp_path / "tables.json", [])
    assert table["rows"] == [["y", 2], [None, "nan"]]
    assert "nan" in out.getvalue()


def test_an_error_ends_the_stage_with_its_words(tmp_path):
    monitor, out = make(tmp_path)

    def fails():
        with monitor, monitor.stage("rl", steps=9):
            monitor.log(1, {"train/loss": 1.0})
            raise RuntimeError("engine went away")

    with pytest.raises(RuntimeError):
        fails()
    assert "rl ended early: RuntimeError: engine went away" in out.getvalue()
    assert read_lines(tmp_path / "events.jsonl")[-1]["text"] == "RuntimeError: engine went away"


def test_many_threads(tmp_path):
    monitor, _ = make(tmp_path)
    monitor.stage("rl")

    def work(i):
        for step in range(50):
            monitor.log(step, {f"m/{i}": step}, line=False)
            monitor.warn("busy", f"{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    monitor.close()
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 200
    records = read_metrics(tmp_path)
    assert len(records) == 50
    assert records[7]["m/3"] == 7
    assert monitor._notices.counts() == {"busy": 200}
    last = [e for e in read_lines(tmp_path / "events.jsonl") if e["kind"] == "warning"][-1]
    assert last["count"] == 200


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor, _ = make(tmp_path, tensorboard=True)
    monitor.stage("rl")
    for step in range(1, 6):
        monitor.log(step, {"train/loss": float(step), "train/kl": float("nan")})
    monitor.rewind("rl", 3)
    monitor.stage("rl")
    monitor.log(4, {"train/loss": 40.0})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "rl")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_missing_tensorboard_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MonitorError, match=r"pip install 'trivet\[tensorboard\]'"):
        Monitor(tmp_path, tensorboard=True)


def test_importing_the_monitor_is_light():
    code = (
        "import sys, trivet.monitor; "
        "bad = {'torch', 'transformers', 'matplotlib', 'sqlalchemy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
