"""Shared runs of characters, found at every 20th byte, are those of the plain rule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.screen.test_phrases import random_pair, text_of_words

from trivet.data.screen.characters import CharacterIndex
from trivet.data.screen.oracle import shared_windows
from trivet.data.screen.words import normalise


@given(
    st.lists(text_of_words, max_size=4), st.lists(st.lists(text_of_words, max_size=3), max_size=4), st.data()
)
def test_equals_the_plain_rule(items: list[str], documents: list[list[str]], data: st.DataObject) -> None:
    characters = data.draw(st.sampled_from([12, 13, 20, 31, 60]))
    index = CharacterIndex.build([[normalise(item)] for item in items], characters)
    got = index.scan(documents)
    for document, windows in zip(documents, got, strict=True):
        truth = {i: shared_windows(item, document, characters) for i, item in enumerate(items)}
        assert {i: set(some) for i, some in windows.items()} == {i: some for i, some in truth.items() if some}
        assert all(len(some) == len(set(some)) for some in windows.values())


@pytest.mark.parametrize("pairs", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_pairs(pairs: int) -> None:
    rng = random.Random(pairs)
    hits = 0
    for _ in range(pairs // 50):
        batch = [random_pair(rng) for _ in range(50)]
        index = CharacterIndex.build([[normalise(item)] for item, _ in batch])
        for i, windows in enumerate(index.scan([document for _, document in batch])):
            truth = shared_windows(batch[i][0], batch[i][1])
            assert set(windows.get(i, [])) == truth
            hits += len(truth)
    assert hits > pairs


def test_every_window_at_every_place() -> None:
    item = "".join(random.Random(0).choices("abcdefgh", k=100))
    index = CharacterIndex.build([[item]])
    for before in range(45):
        for length in (59, 60, 61, 100):
            (windows,) = index.scan([["x" * before + " " + item[:length] + " tail"]])
            assert len(windows.get(0, [])) == max(0, length - 59), (before, length)


def test_segments_and_texts_are_apart() -> None:
    a, b = "a" * 10 + "b" * 30, "c" * 30 + "d" * 10
    index = CharacterIndex.build([[a, b], [a + b]])
    assert index.scan([[a + b], [a, b], []]) == [{1: [(a + b)[i : i + 60] for i in range(21)]}, {}, {}]


def test_a_text_that_repeats_itself_ends_soon() -> None:
    index = CharacterIndex.build([["ab" * 300]])
    (windows,) = index.scan([["ab" * 1_000_000]])
    assert set(windows[0]) == {"ab" * 30, "ba" * 30}


def test_short_items_and_short_windows() -> None:
    assert CharacterIndex.build([["short"]]).scan([["short"]]) == [{}]
    with pytest.raises(ValueError, match="at least 12"):
        CharacterIndex.build([], 11)
