"""Answers scored offline: in order, in parallel, resumed, and stopped when there are too few scores."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.rewards.offline import (
    BINS,
    EARLY,
    OfflineError,
    Sample,
    Scores,
    check_unscored,
    histogram,
    mean,
    score_samples,
)
from trivet.types import Message, Pending, Reward, Scored, Task, Unscored


def samples(n: int) -> list[Sample]:
    return [
        Sample(
            Task("x", (Message("user", f"q{i}"),), {"answer": i}),
            Message("assistant", str(i)),
            place=f"f:{i}",
        )
        for i in range(n)
    ]


async def by_number(sample: Sample) -> Reward:
    number = int(sample.message.text)
    await asyncio.sleep(0.001 * (number % 3))  # later ones may be done first
    return Scored(number / 10, {"odd": number % 2})


def run(n: int, judge=by_number, **options) -> Scores:
    options.setdefault("verifier", "v")
    return asyncio.run(score_samples(samples(n), judge, **options))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("parallel", [1, 3, 50])
def test_order_is_kept(tmp_path: Path, parallel: int) -> None:
    scores = run(20, parallel=parallel, output=tmp_path / "o.jsonl")
    assert list(scores.values_N) == [i / 10 for i in range(20)]
    assert scores.parts() == {"odd": (0.5, 20)}
    written = lines(tmp_path / "o.jsonl")
    assert [row["index"] for row in written] == list(range(20))
    assert [row["value"] for row in written] == [i / 10 for i in range(20)]
    assert written[3]["place"] == "f:3" and written[3]["length"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["o.jsonl"]


def test_as_many_at_once_as_asked_for() -> None:
    now = most = 0

    async def judge(sample: Sample) -> Reward:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return Scored(1.0)

    run(30, judge, parallel=7)
    assert most == 7


def test_what_is_there_is_not_scored_again(tmp_path: Path) -> None:
    output, asked = tmp_path / "o.jsonl", []

    async def judge(sample: Sample) -> Reward:
        asked.append(sample.message.text)
        if sample.message.text == "4" and len(asked) <= 10:
            return Unscored("judge_unavailable", "down")
        return await by_number(sample)

    first = run(10, judge, output=output)
    assert first.causes() == {"judge_unavailable": 1}
    asked += ["-"]
    again = run(10, judge, output=output)
    assert asked[11:] == ["4"]  # what had no score is tried again
    assert (again.resumed, len(again.values_N)) == (9, 10)
    assert lines(output)[4]["value"] == 0.4
    more = run(12, judge, output=output)
    assert (more.resumed, len(lines(output))) == (10, 12)


def test_scores_of_something_else_are_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    run(5, output=output)
    before = output.read_bytes()
    with pytest.raises(OfflineError, match="another verifier"):
        run(5, output=output, verifier="w")
    output.write_text("dear diary\n")
    with pytest.raises(OfflineError, match=r"o\.jsonl:1 is no line of scores"):
        run(5, output=output)
    output.write_bytes(before)
    assert run(5, output=output).resumed == 5


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    run(5, output=output)
    whole = output.read_text()
    for cut in (len(whole) - 1, len(whole) - 20, len(whole) // 2):
        output.unlink()
        (tmp_path / "o.jsonl.part").write_text(whole[:cut])
        assert len(run(5, output=output).values_N) == 5
        assert output.read_text() == whole


_KILLED = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from trivet.rewards.offline import Sample, score_samples
    from trivet.types import Message, Scored, Task
    samples = [
        Sample(
            Task("x", (Message("user", f"q{i}"),), {"answer": i}),
            Message("assistant", str(i)),
            place=f"f:{i}",
        )
        for i in range(40)
    ]
    done = 0
    async def judge(sample):
        global done
        done += 1
        if done == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return Scored(int(sample.message.text) / 10, {"odd": int(sample.message.text) % 2})
    asyncio.run(score_samples(samples, judge, verifier="v", parallel=1, output=Path(sys.argv[1])))
"""


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    script = tmp_path / "s.py"
    script.write_text(textwrap.dedent(_KILLED))
    ended = subprocess.run(
        [sys.executable, str(script), str(output)], env=os.environ, check=False, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL
    scores = run(40, output=output)
    assert scores.resumed == 20
    assert list(scores.values_N) == [i / 10 for i in range(40)]


def test_too_many_without_a_score(tmp_path: Path) -> None:
    asked = 0

    async def judge(sample: Sample) -> Reward:
        nonlocal asked
        asked += 1
        return Unscored("judge_timeout", "slow") if asked % 4 == 0 else Scored(1.0)

    with pytest.raises(
        OfflineError, match=r"judge_timeout 25\), more than the 10% allowed.*judge_timeout: slow"
    ):
        run(1000, judge, parallel=1, output=tmp_path / "o.jsonl")
    assert asked == EARLY  # it does not go on for nothing
    asked = 0
    scores = run(20, judge, parallel=1)
    with pytest.raises(OfflineError, match="5 of 20"):
        check_unscored(scores, 0.2)
    check_unscored(scores, 0.25)
    asked = 0
    assert len(run(1000, judge, max_unscored=0.3).values_N) == 750


def test_a_promise_is_no_score() -> None:
    async def judge(sample: Sample) -> Reward:
        return Pending(1e12)

    assert run(3, judge).causes() == {"pending": 3}


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=60))
def test_a_histogram_holds_every_value(values: list[float]) -> None:
    values_N = np.asarray(values)
    bins = histogram(values_N)
    assert sum(n for _, n in bins) == len(values)
    assert len(bins) <= BINS
    assert np.isfinite(mean(values_N))
