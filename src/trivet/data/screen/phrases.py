"""Exact search of many phrases in many texts, by hashing every run of words with numpy.

A batch of texts becomes one buffer of lower-case letters and blanks. The hash of a word is made of its first
eight bytes and its length, the hash of a run of words is a polynomial over those; a table of the hashes' top
bits rejects nearly every run. What passes is looked up and compared as text, so a hit is always a hit, and
equal runs have equal hashes, so none is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trivet.data.screen.words import BYTE_TABLE, PHRASE_WORDS, fold

Match = Literal["words", "substring"]

_BASE = 0x9E3779B97F4A7C15  # odd: the golden ratio in 64 bits
_LENGTH = np.uint64(0xC2B2AE3D27D4EB4F)
_SECOND = np.uint64(0xD6E8FEB86659FD93)  # gives the second place of a hash in the table
# Of the eight bytes read at a word's start, those that belong to a word of 0 ... 8 bytes.
_MASKS = np.array([(1 << (8 * k)) - 1 for k in range(9)], np.uint64)
_PAD = b" " * 16
_SLOTS_PER_PHRASE = 16
_MAX_SLOTS = 1 << 26


@dataclass(frozen=True, slots=True)
class WordBuffer:
    """Texts in one buffer: letters, blanks, and a 0 where a run must not pass.

    `start_W`, `end_W` are the bytes of word w; `word_D` is the index of the first word of text d, with one
    more entry at the end.
    """

    data: bytes
    start_W: NDArray[np.int64]
    end_W: NDArray[np.int64]
    word_D: NDArray[np.int64]

    def words(self, first: int, n: int) -> bytes:
        """`n` words from word `first`, joined by blanks; holds a 0 byte if a border lies among them."""
        data = self.data[self.start_W[first] : self.end_W[first + n - 1]]
        return b" ".join(data.split())


def word_buffer(texts: Sequence[str], border: Sequence[bool] | None = None) -> WordBuffer:
    """Texts as a word buffer. A run of words may pass from text d to d + 1 only where `border[d]` is False;
    None: nowhere."""
    parts = [fold(text) for text in texts]
    data = bytearray((b" " + b" ".join(parts) + _PAD).translate(BYTE_TABLE))
    after_D = np.cumsum(np.fromiter((len(part) + 1 for part in parts), np.int64, len(parts)))
    view = np.frombuffer(data, np.uint8)
    view[after_D if border is None else after_D[np.asarray(border, bool)]] = 0
    inside = view > 32
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    edges += 1
    start_W, end_W = np.ascontiguousarray(edges[::2]), np.ascontiguousarray(edges[1::2])
    word_D = np.concatenate(([0], np.searchsorted(start_W, after_D)))
    return WordBuffer(bytes(data), start_W, end_W, word_D)


def word_hashes(buffer: WordBuffer) -> NDArray[np.uint64]:
    """One number per word: equal words, equal numbers."""
    data = buffer.data
    eight = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))  # the eight bytes from every byte on
    length_W = buffer.end_W - buffer.start_W
    hash_W = eight[buffer.start_W]
    hash_W &= _MASKS.take(length_W, mode="clip")
    hash_W += length_W.view(np.uint64) * _LENGTH
    return hash_W


def run_hashes(hash_W: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Hash of every `n` consecutive words: a polynomial, built from runs of 1, 2, 4 ... words."""
    out, out_length = hash_W[:0], 0
    power, length = hash_W, 1
    while n:
        if n & 1:
            out = power if not out_length else _join(out, power, out_length, length)
            out_length += length
        n >>= 1
        if n:
            power, length = _join(power, power, length, length), 2 * length
    return out


def _join(
    left: NDArray[np.uint64], right: NDArray[np.uint64], left_length: int, right_length: int
) -> NDArray[np.uint64]:
    size = max(0, len(right) - left_length)
    joined = left[:size] * np.uint64(pow(_BASE, right_length, 1 << 64))
    joined += right[left_length : left_length + size]
    return joined


@dataclass(frozen=True, slots=True)
class PhraseIndex:
    """Phrases of `n` words, ready to be looked for. Plain arrays: picklable, and `save`d it is shared by
    processes through the page cache.

    `hash_P` is sorted, `phrase_P` gives the phrase's number as it was passed in; the text of phrase p is
    `text[offset_P[p] : offset_P[p + 1]]`.
    """

    n: int
    match: Match
    hash_P: NDArray[np.uint64]
    phrase_P: NDArray[np.int64]
    text: NDArray[np.uint8]
    offset_P: NDArray[np.int64]
    seen: NDArray[np.bool_]

    @classmethod
    def build(cls, texts: Sequence[str], n: int = PHRASE_WORDS, match: Match = "words") -> PhraseIndex:
        """`texts`: distinct normalised phrases of exactly `n` words. Raises ValueError for others."""
        if n < (3 if match == "substring" else 1):
            raise ValueError(f"phrases of {n} words: `words` needs at least 1, `substring` at least 3")
        wrong = next((text for text in texts if len(text.split()) != n), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} has {len(wrong.split())} words; every phrase of this index has {n}")
        encoded = [text.encode() for text in texts]
        buffer = word_buffer(texts)
        # As a substring a phrase fixes the words between its first and its last; those two may be parts of
        # words.
        skip, length = (1, n - 2) if match == "substring" else (0, n)
        run_W = run_hashes(word_hashes(buffer), length)
        hash_P = run_W[np.arange(len(texts)) * n + skip] if texts else run_W[:0]
        order = np.argsort(hash_P, kind="stable")
        slots = 1 << max(12, min(_MAX_SLOTS, _SLOTS_PER_PHRASE * len(texts)).bit_length())
        seen = np.zeros(slots, np.bool_)
        seen[_slot(hash_P, slots)] = True
        seen[_slot(hash_P * _SECOND, slots)] = True
        return cls(
            n,
            match,
            hash_P[order],
            order.astype(np.int64),
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([0, *(len(text) for text in encoded)], dtype=np.int64),
            seen,
        )

    def __len__(self) -> int:
        return len(self.hash_P)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.hash_P, self.phrase_P, self.text, self.offset_P, self.seen))

    def phrase(self, number: int) -> str:
        """Text of a phrase."""
        return self._bytes(number).decode()

    def _bytes(self, number: int) -> bytes:
        return self.text[self.offset_P[number] : self.offset_P[number + 1]].tobytes()

    def find(self, buffer: WordBuffer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(word_H, phrase_H): phrases and where they stand, by their first words' indices. A phrase that
        stands in a text many times over is given at least once."""
        skip, length = (1, self.n - 2) if self.match == "substring" else (0, self.n)
        run_W = run_hashes(word_hashes(buffer), length)
        maybe = np.flatnonzero(self.seen.take(_slot(run_W, len(self.seen))))
        maybe = maybe[self.seen.take(_slot(run_W[maybe] * _SECOND, len(self.seen)))]
        low = np.searchsorted(self.hash_P, run_W[maybe])
        known = low < len(self.hash_P)
        maybe, low = maybe[known], low[known]
        equal = self.hash_P[low] == run_W[maybe]
        maybe, low = maybe[equal], low[equal]
        text = np.searchsorted(buffer.word_D, maybe, side="right")
        # The same number again in the same text: nearly always the same phrase again.
        _, first, place = np.unique(text * len(self) + low, return_index=True, return_inverse=True)
        hits: list[tuple[int, int]] = []
        done = np.zeros(len(first), np.bool_)
        for group, at in enumerate(first.tolist()):
            done[group] = self._compare(buffer, int(maybe[at]) - skip, int(low[at]), hits)
        for at in np.flatnonzero(~done[place]).tolist():
            if at != first[place[at]]:
                self._compare(buffer, int(maybe[at]) - skip, int(low[at]), hits)
        out = np.array(hits, np.int64).reshape(-1, 2)
        return out[:, 0], out[:, 1]

    def _compare(self, buffer: WordBuffer, first: int, at: int, hits: list[tuple[int, int]]) -> bool:
        """Adds the phrases with the hash at `at` that stand at word `first`; True if all of them do."""
        if first < 0 or first + self.n > len(buffer.start_W):
            return False
        found = buffer.words(first, self.n)
        if b"\0" in found:  # over the border of a text
            return False
        every, key = True, self.hash_P[at]
        while at < len(self.hash_P) and self.hash_P[at] == key:
            number = int(self.phrase_P[at])
            if self._same(found, self._bytes(number)):
                hits.append((first, number))
            else:
                every = False
            at += 1
        return every

    def _same(self, found: bytes, phrase: bytes) -> bool:
        if self.match == "words":
            return found == phrase
        first, wanted = found.index(b" "), phrase.index(b" ")
        return first >= wanted and found.startswith(phrase, first - wanted)

    def scan(self, documents: Sequence[Sequence[str]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(document_H, phrase_H): the distinct phrases that each document holds, sorted. A document is the
        list of its messages' texts; `words` never looks across two of them, `substring` reads them as one."""
        texts = [text for document in documents for text in document]
        last = None
        if self.match == "substring":
            last = [i + 1 == len(document) for document in documents for i in range(len(document))]
        size_D = np.fromiter(map(len, documents), np.int64, len(documents))
        return self.scan_buffer(word_buffer(texts, last), size_D)

    def scan_buffer(
        self, buffer: WordBuffer, size_D: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`scan` of texts that are words already; document d is the next `size_D[d]` texts."""
        word_H, phrase_H = self.find(buffer)
        first_D = buffer.word_D[np.concatenate(([0], np.cumsum(size_D)))]
        document_H = np.searchsorted(first_D, word_H, side="right") - 1
        pair_H = np.unique(document_H * max(1, len(self)) + phrase_H)
        return pair_H // max(1, len(self)), pair_H % max(1, len(self))

    def save(self, folder: Path) -> None:
        """Arrays as `.npy` files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        (folder / "index.json").write_text(json.dumps({"n": self.n, "match": self.match}), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, mapped: bool = True) -> PhraseIndex:
        """What `save` wrote; `mapped` reads pages on demand and shares them between processes."""
        head = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        mode: Literal["r"] | None = "r" if mapped else None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode=mode) for name in _ARRAYS}
        return cls(head["n"], head["match"], **arrays)


_ARRAYS = ("hash_P", "phrase_P", "text", "offset_P", "seen")


def _slot(hashes: NDArray[np.uint64], slots: int) -> NDArray[np.int64]:
    """Top bits of a hash: its place in a table of `slots` (a power of two)."""
    return (hashes >> np.uint64(65 - slots.bit_length())).view(np.int64)


def batches(documents: Iterable[Sequence[str]], characters: int = 1 << 18) -> Iterable[list[Sequence[str]]]:
    """Documents in lists of about `characters` together, so that a batch's arrays stay in the cache."""
    batch: list[Sequence[str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document))
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
