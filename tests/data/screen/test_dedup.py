"""Exact and near duplicates: the first in order stays, whatever the batches."""

from __future__ import annotations

import importlib.util
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.data.screen.dedup import (
    DedupOptions,
    Duplicates,
    ExactFilter,
    Sketches,
    exact_key,
    full_hashes,
    resolve,
    sketch,
)
from trivet.data.screen.documents import Document
from trivet.data.screen.phrases import word_buffer
from trivet.data.screen.words import split_words

needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is not installed")
NEAR = DedupOptions(near=True)


def chat(*texts: str, place: str = "") -> Document:
    return Document(
        texts, ("user", "assistant") * (len(texts) // 2) + ("user",) * (len(texts) % 2), "s", place
    )


def find(documents: list[Document], options: DedupOptions, batch: int = 1000) -> Duplicates:
    parts = [sketch(documents[i : i + batch], options) for i in range(0, len(documents), batch)]
    return resolve(Sketches.join(parts), options)


def test_exact_duplicates_keep_the_first() -> None:
    documents = [chat("a b", "c"), chat("x", "y"), chat(" A\n b", "C "), chat("a b", "d"), chat("x", "y")]
    out = find(documents, DedupOptions())
    assert out.first_D.tolist() == [0, 1, 0, 3, 1]
    assert out.kept.tolist() == [True, True, False, True, False]
    assert out.clusters() == {0: [2], 1: [4]}
    assert out.report()["clusters by size"] == {2: 2}
    assert find(documents, DedupOptions(of="prompt")).first_D.tolist() == [0, 1, 0, 0, 1]


def test_what_is_the_same() -> None:
    words = DedupOptions(normal="words")
    plus, minus = chat("What is 2 + 3?", "5"), chat("What is 2 - 3?", "5")
    assert exact_key(plus) != exact_key(minus)
    assert exact_key(plus, words) == exact_key(minus, words)
    assert exact_key(chat("a", "b")) != exact_key(chat("a b"))
    assert exact_key(Document(("a",), ("user",))) != exact_key(Document(("a",), ("system",)))
    assert exact_key(Document(("a",))) == exact_key(Document(("a",), ("user",)))


def variant(words: list[str], changes: int, rng: random.Random) -> str:
    out = list(words)
    for i in rng.sample(range(len(out)), changes):
        out[i] = f"new{rng.randrange(1000)}"
    return " ".join(out)


@cache
def shingles(text: str, n: int = 5) -> frozenset[tuple[str, ...]]:
    words = split_words(text)
    return frozenset(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def jaccard(a: str, b: str) -> float:
    x, y = shingles(a), shingles(b)
    return len(x & y) / len(x | y)


def corpus(size: int, seed: int) -> list[Document]:
    """Documents, some of them variants of earlier ones, from near copies to distant cousins."""
    rng = random.Random(seed)
    vocabulary = [f"word{i}" for i in range(2000)]
    texts: list[str] = []
    for _ in range(size):
        if texts and rng.random() < 0.5:
            base = split_words(rng.choice(texts))
            texts.append(variant(base, rng.choice([0, 1, 2, 4, 8, 16]), rng))
        else:
            texts.append(" ".join(rng.choices(vocabulary, k=rng.randrange(100, 300))))
    return [chat(text) for text in texts]


@needs_rensa
def test_near_duplicates_overlap_as_said_and_few_are_missed() -> None:
    documents = corpus(300, 1)
    out = find(documents, NEAR)
    texts = [document.texts[0] for document in documents]
    near = np.flatnonzero(out.kind_D == 2).tolist()
    assert len(near) > 30
    for d in near:
        first = int(out.first_D[d])
        assert first < d and out.kind_D[first] == 0
        assert jaccard(texts[d], texts[first]) == pytest.approx(out.jaccard[d], abs=1e-9)
        assert out.jaccard[d] >= 0.8
    kept = np.flatnonzero(out.kept).tolist()
    missed = sum(any(jaccard(texts[a], texts[b]) >= 0.8 for b in kept if b < a) for a in kept)
    assert missed <= 0.02 * len(near) + 1


@needs_rensa
def test_batches_saving_and_joining_change_nothing(tmp_path: Path) -> None:
    documents = corpus(120, 2)
    whole = find(documents, NEAR)
    assert find(documents, NEAR, batch=7).first_D.tolist() == whole.first_D.tolist()
    parts = []
    for i in range(0, 120, 50):
        sketch(documents[i : i + 50], NEAR).save(tmp_path / str(i))
        parts.append(Sketches.load(tmp_path / str(i)))
    again = resolve(Sketches.join(parts), NEAR)
    assert again.first_D.tolist() == whole.first_D.tolist()
    assert again.kind_D.tolist() == whole.kind_D.tolist()
    Sketches.join(parts).save(tmp_path / "all")
    mapped = Sketches.load(tmp_path / "all")
    assert isinstance(mapped.shingle_S, np.memmap)
    assert resolve(mapped, NEAR).first_D.tolist() == whole.first_D.tolist()


@needs_rensa
def test_an_exact_copy_of_a_near_duplicate_belongs_to_its_first() -> None:
    rng = random.Random(3)
    words = [f"w{i}" for i in range(200)]
    near = variant(words, 2, rng)
    out = find([chat(" ".join(words)), chat(near), chat("other " * 9), chat(near)], NEAR)
    assert out.first_D.tolist() == [0, 0, 2, 0]
    assert out.kind_D.tolist() == [0, 2, 0, 1]
    assert out.clusters() == {0: [1, 3]}


@needs_rensa
def test_short_and_empty_documents() -> None:
    texts = ["yes", "Yes!", "no", "", "...", "a b c d e f", "a b c d"]
    out = find([chat(text) for text in texts], NEAR)
    assert out.first_D.tolist() == [0, 0, 2, 3, 4, 5, 6]


@needs_rensa
def test_nothing_at_all() -> None:
    assert find([], NEAR).report()["documents"] == 0
    assert len(sketch([], NEAR)) == 0


@needs_rensa
def test_candidates_are_capped_and_this_is_counted() -> None:
    rng = random.Random(4)
    shared = [f"s{i}" for i in range(60)]
    documents = [chat(" ".join(shared + [f"d{d}x{i}" for i in range(40)])) for d in range(30)]
    rng.shuffle(documents)
    low = DedupOptions(near=True, threshold=0.5, max_candidates=2)
    out = find(documents, low)
    assert out.kept.all() and out.capped > 0
    assert find(documents, DedupOptions(near=True, threshold=0.5)).capped == 0


@given(st.lists(st.text(max_size=30), max_size=6))
def test_all_bytes_of_a_word_count(words: list[str]) -> None:
    text = " ".join(words) + " " + "x" * 300 + "a " + "x" * 300 + "b " + "abcdefgh1 abcdefgh2 abcdefgh"
    buffer = word_buffer([text])
    hashes = full_hashes(buffer).tolist()
    plain = split_words(text)
    assert len(hashes) == len(plain)
    assert len(set(hashes)) == len(set(plain))


def test_a_stream_is_filtered_and_goes_on_after_a_stop() -> None:
    documents = [chat("a", place="f:1"), chat("b", place="f:2"), chat("A", place="f:3"), chat("b"), chat("c")]
    whole = ExactFilter()
    expected = [None, None, "f:1", "f:2", None]
    assert [whole.first(document) for document in documents] == expected
    first = ExactFilter()
    got: list[Any] = [first.first(document) for document in documents[:2]]
    second = ExactFilter()
    second.restore(json.loads(json.dumps(first.state())))
    assert got + [second.first(document) for document in documents[2:]] == expected
    assert second.state() == whole.state()
    assert ExactFilter().first(chat("z")) is None
    unnamed = ExactFilter()
    assert [unnamed.first(chat(text)) for text in ("p", "q", "q", "p")] == [None, None, "1", "0"]


def test_a_threshold_is_a_share() -> None:
    with pytest.raises(ValueError, match="Jaccard"):
        DedupOptions(threshold=1.5)
