"""The phrase passes: sampled 8-grams, and all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trivet.data.screen.documents import Batch, Document
from trivet.data.screen.items import PreparedItems
from trivet.data.screen.phrases import Match, PhraseIndex, batches
from trivet.data.screen.verdicts import Borderline, Hit, Verdict
from trivet.data.screen.words import PHRASE_WORDS, SAMPLED_PHRASES, phrases

_SHOWN = 8  # matched phrases a hit names


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """A phrase pass.

    A document is dropped when it holds at least `threshold` of one item's distinct phrases, and borderline
    from `borderline_from` on (two phrases at least). Items with fewer than `strict_below` phrases are dropped
    only when all are there; what the plain threshold would have dropped is then borderline. `samples`:
    phrases taken of an item, None for all. `match`: `words` (word borders, within one message) or `substring`
    (the published rule: anywhere in all turns put together, the first and last word may be parts of words).
    `whole`: items too short for phrases are compared whole with each prompt. `borderline`: what becomes of
    such documents.
    """

    samples: int | None = SAMPLED_PHRASES
    threshold: float = 0.5
    borderline_from: float = 0.25
    strict_below: int = 0
    match: Match = "words"
    whole: bool = True
    borderline: Borderline = "keep"
    n: int = PHRASE_WORDS

    def __post_init__(self) -> None:
        if not 0 < self.borderline_from <= self.threshold <= 1:
            raise ValueError(
                f"borderline_from {self.borderline_from} and threshold {self.threshold}: needed is "
                "0 < borderline_from <= threshold <= 1"
            )


class NgramPass:
    """Phrases of all items in one index. Picklable; `check` changes nothing, so workers share it."""

    def __init__(self, items: PreparedItems, options: NgramOptions | None = None, name: str = "") -> None:
        self.options = options = options or NgramOptions()
        self.name = name or ("exhaustive_8gram" if options.samples is None else "sampled_8gram")
        self.borderline: Borderline = options.borderline
        self.items = items
        numbers: dict[str, int] = {}
        phrase_L: list[int] = []  # links of phrases to items
        item_L: list[int] = []
        for i, prepared in enumerate(items):
            if prepared.status == "phrases":
                for text in phrases(prepared.segments, options.n, options.samples):
                    if text not in items.allow.phrases:
                        phrase_L.append(numbers.setdefault(text, len(numbers)))
                        item_L.append(i)
        self.index = PhraseIndex.build(list(numbers), options.n, options.match)
        order = np.argsort(phrase_L, kind="stable")
        self._item_L = np.array(item_L, np.int64)[order]
        size_P = np.bincount(np.array(phrase_L, np.int64), minlength=len(numbers))
        self._begin_P = np.concatenate(([0], np.cumsum(size_P)))
        self.frequent_P = np.zeros(len(numbers), np.bool_)
        self.of_I = np.bincount(self._item_L, minlength=len(items))
        self._counted_I = self.of_I
        self._whole: dict[bytes, list[int]] = defaultdict(list)
        if options.whole:
            for i, prepared in enumerate(items):
                if prepared.status == "whole":
                    for text in prepared.whole_texts():
                        self._whole[text.encode()].append(i)
        self._whole_words = max((text.count(b" ") + 1 for text in self._whole), default=0)

    def find_frequent(self, sample: Iterable[Document]) -> dict[str, int]:
        """Phrases that a sample of the corpus holds so often that they prove nothing: they weigh nothing from
        now on. Returns them with the number of documents that hold them."""
        guards = self.items.guards
        count_P = np.zeros(len(self.index), np.int64)
        documents = 0
        for batch in batches(document.texts for document in sample):
            documents += len(batch)
            count_P += np.bincount(self.index.scan(batch)[1], minlength=len(self.index))
        self.frequent_P = count_P >= max(guards.frequent_documents, guards.frequent_share * documents)
        link_L = np.repeat(~self.frequent_P, np.diff(self._begin_P))
        self._counted_I = np.bincount(self._item_L[link_L], minlength=len(self.items))
        numbers = sorted(np.flatnonzero(self.frequent_P).tolist(), key=lambda p: -count_P[p])
        return {self.index.phrase(p): int(count_P[p]) for p in numbers}

    def unusable(self) -> dict[str, str]:
        """Items this pass cannot find, and why."""
        out = {}
        for i, prepared in enumerate(self.items):
            if not prepared.usable or (prepared.status == "whole" and not self.options.whole):
                out[prepared.item.label] = prepared.why or prepared.status
            elif prepared.status == "phrases" and not self.of_I[i]:
                out[prepared.item.label] = "all its phrases are allowed"
            elif prepared.status == "phrases" and not self._counted_I[i]:
                out[prepared.item.label] = "all its phrases are frequent: hits are borderline at most"
        return out

    def check(self, documents: Sequence[Document]) -> list[list[Hit]]:
        out: list[list[Hit]] = [[] for _ in documents]
        batch = Batch.of(documents)
        if self.options.match == "words":
            document_H, phrase_H = self.index.scan_buffer(batch.buffer, batch.size_D)
        else:
            document_H, phrase_H = self.index.scan([document.texts for document in documents])
        bounds = np.searchsorted(document_H, np.arange(len(documents) + 1))
        for d in np.unique(document_H).tolist():
            out[d].extend(self._hits(phrase_H[bounds[d] : bounds[d + 1]]))
        if self._whole:
            for d, i in self._whole_hits(batch):
                if not any(hit.item is self.items.items[i] for hit in out[d]):
                    out[d].append(Hit(self.items.items[i], "drop", 1, 1, 1.0, (), "whole"))
        return out

    def _hits(self, phrase_H: NDArray[np.int64]) -> list[Hit]:
        """Hits of one document from its distinct phrases."""
        links = [self._item_L[self._begin_P[p] : self._begin_P[p + 1]] for p in phrase_H]
        phrase_K = np.repeat(phrase_H, [len(link) for link in links])
        item_K = np.concatenate(links)
        hits_I = np.bincount(item_K)
        counted_I = np.bincount(item_K[~self.frequent_P[phrase_K]], minlength=len(hits_I))
        out = []
        for i in np.flatnonzero(hits_I).tolist():
            hits, counted = int(hits_I[i]), int(counted_I[i])
            verdict, why = self._verdict(hits, int(self.of_I[i]), counted, int(self._counted_I[i]))
            if verdict is not None:
                matched = phrase_K[item_K == i][:_SHOWN].tolist()
                texts = tuple(self.index.phrase(p) for p in matched)
                of = int(self.of_I[i])
                out.append(Hit(self.items.items[i], verdict, hits, of, hits / of, texts, why))
        return out

    def _verdict(self, hits: int, of: int, counted: int, counted_of: int) -> tuple[Verdict | None, str]:
        """`counted`: without frequent phrases."""
        options = self.options
        if hits >= options.threshold * of:
            if not counted_of or counted < options.threshold * counted_of:
                return "borderline", "frequent phrases"
            if of < options.strict_below and hits < of:
                return "borderline", "few phrases"
            return "drop", ""
        if counted_of and counted >= options.threshold * counted_of and counted >= 2:
            return "borderline", "without frequent phrases"
        if hits >= 2 and hits >= options.borderline_from * of:
            return "borderline", "overlap"
        return None, ""

    def _whole_hits(self, batch: Batch) -> list[tuple[int, int]]:
        """(document, item) of prompts that are an item."""
        buffer = batch.buffer
        size_T = np.diff(buffer.word_D)
        document_T = np.repeat(np.arange(len(batch)), batch.size_D)
        first_D = np.cumsum(batch.size_D) - batch.size_D
        out = []
        for t in np.flatnonzero((size_T > 0) & (size_T <= self._whole_words)).tolist():
            d = int(document_T[t])
            if batch[d].is_prompt(t - int(first_D[d])):
                text = buffer.words(int(buffer.word_D[t]), int(size_T[t]))
                out.extend((d, i) for i in self._whole.get(text, ()))
        return list(dict.fromkeys(out))


def sampled_8gram(items: PreparedItems, options: NgramOptions | None = None) -> NgramPass:
    """About 20 evenly spaced phrases of every item."""
    return NgramPass(items, options, "sampled_8gram")


def exhaustive_8gram(items: PreparedItems, options: NgramOptions | None = None) -> NgramPass:
    """All phrases of every item."""
    return NgramPass(items, options or NgramOptions(samples=None), "exhaustive_8gram")
