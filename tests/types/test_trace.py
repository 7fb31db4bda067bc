"""Traces: the branch rule, rows, storage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.types import Attachment, CodecError, Origin, Trace, TraceError, codec


def turn(trace: Trace, prompt: list[int], answer: list[int], version: int = 0) -> int:
    node = trace.branch(prompt)
    return trace.add_sampled(node, answer, [-0.5] * len(answer), version)


def test_calls_in_time_order_give_three_rows() -> None:
    """Two interleaved conversations, and one whose history was rewritten."""
    trace = Trace()
    turn(trace, [1, 2], [3])
    turn(trace, [9, 8], [7])
    turn(trace, [1, 2, 3, 4], [5])
    turn(trace, [9, 8, 7, 6], [5])
    turn(trace, [1, 2, 4, 5, 6], [7])
    rows = trace.rows()
    assert [row.ids_T.tolist() for row in rows] == [
        [1, 2, 3, 4, 5],
        [9, 8, 7, 6, 5],
        [1, 2, 4, 5, 6, 7],
    ]
    assert [np.flatnonzero(row.sampled_T).tolist() for row in rows] == [[2, 4], [2, 4], [5]]
    assert [np.flatnonzero(row.train_T).tolist() for row in rows] == [[2, 4], [2, 4], [5]]
    assert [row.turn_T[row.sampled_T].tolist() for row in rows] == [[0, 2], [1, 3], [4]]


def test_a_shared_answer_is_trained_in_the_first_row_only() -> None:
    trace = Trace()
    first = turn(trace, [1, 2], [3])
    turn(trace, [1, 2, 3, 4], [5])
    turn(trace, [1, 2, 3, 6], [7])
    rows = trace.rows()
    assert [np.flatnonzero(row.train_T).tolist() for row in rows] == [[2, 4], [4]]
    assert [np.flatnonzero(row.sampled_T).tolist() for row in rows] == [[2, 4], [2, 4]]
    assert trace.path(first) == [0, 1]


def test_a_request_inside_a_node_branches_at_its_parent_and_copies_unsampled() -> None:
    trace = Trace()
    turn(trace, [1, 2], [3, 4, 5])
    node = trace.branch([1, 2, 3, 4, 9])
    assert trace.nodes[node].parent == 0
    row = trace.rows()[1]
    assert row.ids_T.tolist() == [1, 2, 3, 4, 9]
    assert not row.sampled_T.any() and not row.train_T.any()
    assert np.isnan(row.logprob_T).all() and (row.version_T == -1).all()


def test_the_same_prompt_is_one_node() -> None:
    trace = Trace()
    turn(trace, [1, 2], [3])
    turn(trace, [1, 2], [4])
    assert [n.origin for n in trace.nodes] == [Origin.MESSAGE, Origin.SAMPLED, Origin.SAMPLED]


def test_a_linear_path_is_a_read_only_view_that_survives_growth() -> None:
    trace = Trace()
    node = trace.add(-1, range(10))
    tokens = trace.tokens(node)
    assert not tokens.flags.writeable and tokens.base is not None
    trace.add(node, range(5000))
    assert tokens.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("logprob", "temperature", "message"),
    [
        ([-1.0], 1.0, "2 tokens but 1 log-prob"),
        ([-1.0, np.nan], 1.0, "token 1 has log-probability nan"),
        ([0.5, -1.0], 1.0, "token 0 has log-probability 0.5"),
        ([-np.inf, -1.0], 1.0, "token 0 has log-probability -inf"),
        ([-1.0, -1.0], 0.0, "temperature"),
    ],
)
def test_what_no_sampler_gives_is_refused(logprob: list[float], temperature: float, message: str) -> None:
    trace = Trace()
    with pytest.raises(TraceError, match=message):
        trace.add_sampled(-1, [1, 2], logprob, 0, temperature=temperature)
    assert len(trace) == 0 and not trace.nodes


def test_inserted_tokens_are_never_trained() -> None:
    trace = Trace()
    with pytest.raises(TraceError, match="never trained"):
        trace.add(-1, [1], Origin.INSERTED, train=1.0)
    with pytest.raises(TraceError, match="use add_sampled"):
        trace.add(-1, [1], Origin.SAMPLED)
    with pytest.raises(TraceError, match="parent 3"):
        trace.add(3, [1])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Requests whose prompts extend, repeat or cut what was there before; small alphabet, so they meet."""
    trace = Trace()
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(tokens)
        if trace.nodes and draw(st.booleans()):
            base = trace.tokens(draw(st.integers(0, len(trace.nodes) - 1))).tolist()
            prompt = base[: draw(st.integers(0, len(base)))] + prompt
        answer = draw(tokens)
        node = trace.branch(prompt)
        assert trace.tokens(node).tolist() == prompt
        logprob = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(answer), max_size=len(answer)))
        leaf = trace.add_sampled(node, answer, logprob, draw(st.integers(0, 9)), temperature=0.5)
        assert trace.tokens(leaf).tolist() == prompt + answer
        if draw(st.booleans()):
            trace.nodes[leaf].reward = draw(st.floats(-1, 1))
            trace.nodes[leaf].state = "anchor"
            trace.attach(leaf, Attachment("00ff", "top", 0, 1, "<f2", (1, 3)))
    return trace


@settings(max_examples=100, deadline=None)
@given(traces())
def test_every_sampled_token_is_trained_exactly_once(trace: Trace) -> None:
    rows = trace.rows()
    assert sum(int(row.train_T.sum()) for row in rows) == int(trace.column("sampled").sum())
    for row in rows:
        assert row.ids_T.tolist() == trace.tokens(row.leaf).tolist()
        assert not (row.train_T[~row.sampled_T]).any()


@settings(max_examples=100, deadline=None)
@given(traces())
def test_storage_round_trip(trace: Trace) -> None:
    again = Trace.from_bytes(trace.to_bytes())
    assert again.nodes == trace.nodes
    for name in ("id", "sampled", "train", "logprob", "version"):
        np.testing.assert_array_equal(again.column(name), trace.column(name))
    assert again.to_bytes() == trace.to_bytes()
    again.branch([7, 7, 7])  # a loaded trace can go on
    copy = trace.copy()
    copy.add(-1, [1])
    assert len(copy) == len(trace) + 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_found_or_harmless(data: st.DataObject) -> None:
    """A flipped byte gives a named error; never another exception, never other tokens."""
    trace = Trace()
    turn(trace, [1, 2, 3], [4, 5])
    blob = bytearray(trace.to_bytes())
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    try:
        again = Trace.from_bytes(bytes(blob))
    except (CodecError, TraceError):
        return
    np.testing.assert_array_equal(again.column("id"), trace.column("id"))


def test_one_column_can_be_read_alone() -> None:
    trace = Trace()
    turn(trace, [1, 2], [3])
    assert codec.read_column(trace.to_bytes(), "id").tolist() == [1, 2, 3]
    with pytest.raises(KeyError, match="no column 'routes'"):
        codec.read_column(trace.to_bytes(), "routes")


def test_foreign_and_newer_blobs_are_named() -> None:
    with pytest.raises(CodecError, match="too short"):
        codec.unpack(b"")
    with pytest.raises(CodecError, match="not a trivet record"):
        codec.unpack(b"PK\x03\x04" + bytes(20))
    blob = bytearray(codec.pack({}, None))
    blob[4] = 99
    with pytest.raises(CodecError, match="upgrade trivet"):
        codec.unpack(bytes(blob))
    blob[4] = 1
    with pytest.raises(CodecError, match="an older trivet wrote it"):
        codec.unpack(bytes(blob))
    with pytest.raises(CodecError, match="cannot be stored"):
        codec.pack({"o": np.array([object()])}, None)
