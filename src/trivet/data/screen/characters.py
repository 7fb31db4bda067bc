"""Exact search of shared runs of characters (60 by default) between items and texts.

Windows of every position of the items are indexed, but shorter ones than asked for; texts are probed at every
20th byte only. Any shared run of 60 holds a probe with its whole shorter window, so none is missed; from each
probe that is equal as text the match is grown both ways and the full windows in it are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trivet.data.screen.phrases import WordBuffer, word_buffer

_BASE = 0x9E3779B97F4A7C15
_SECOND = np.uint64(0xD6E8FEB86659FD93)
_SLOTS_PER_WINDOW = 16
_MAX_SLOTS = 1 << 26
_LEAST = 12  # a window is three times the stride: at least 4 + 8 bytes


def normal_bytes(buffer: WordBuffer) -> NDArray[np.uint8]:
    """Bytes of the normalised texts, a 0 after each; a blank may stand before the 0."""
    view = np.frombuffer(buffer.data, np.uint8)
    keep = view != 32
    keep[1:] |= view[:-1] > 32
    return view[keep]


def _hashes(data: bytes, length: int, stride: int) -> NDArray[np.uint64]:
    """Hash of `length` bytes (8 or more) from every `stride`-th byte on: a sum over eights, the last of which
    may overlap."""
    last = len(data) - length
    if last < 0:
        return np.zeros(0, np.uint64)
    count = last // stride + 1
    offsets = [*range(0, length - 7, 8)]
    if length % 8:
        offsets.append(length - 8)
    out = np.zeros(count, np.uint64)
    for k, offset in enumerate(offsets):
        eight = np.ndarray((count,), "<u8", data, offset, (stride,))
        out += eight * np.uint64(pow(_BASE, k + 1, 1 << 64))
    return out


@dataclass(frozen=True, slots=True)
class CharacterIndex:
    """Normalised segments of items, ready to be looked for.

    `data`: all segments in UTF-8, a 0 after each; segment s is `data[begin_S[s] : begin_S[s + 1] - 1]` and
    belongs to item `item_S[s]`. `hash_K` (sorted) and `at_K`: short windows and where they stand in `data`.
    """

    characters: int
    data: bytes
    begin_S: NDArray[np.int64]
    item_S: NDArray[np.int64]
    hash_K: NDArray[np.uint64]
    at_K: NDArray[np.int64]
    seen: NDArray[np.bool_]

    @property
    def stride(self) -> int:
        return self.characters // 3

    @property
    def length(self) -> int:
        """Bytes of the short windows."""
        return self.characters - self.stride + 1

    @classmethod
    def build(cls, items: Sequence[Sequence[str]], characters: int = 60) -> CharacterIndex:
        """`items`: the normalised segments of each. Segments of under `characters` have no window."""
        if characters < _LEAST:
            raise ValueError(f"windows of {characters} characters: at least {_LEAST} are needed")
        pairs = [
            (i, text.encode())
            for i, item in enumerate(items)
            for text in dict.fromkeys(item)
            if len(text) >= characters
        ]
        data = b"".join(text + b"\0" for _, text in pairs)
        stride = characters // 3
        length = characters - stride + 1
        hash_N = _hashes(data, length, 1)
        # Not the windows that hold a 0: they would pass from one segment to the next.
        zeros = np.cumsum(np.frombuffer(data, np.uint8) == 0)
        at_K = np.flatnonzero(zeros[length - 1 :] == np.concatenate(([0], zeros[:-length])) if pairs else [])
        hash_K = hash_N[at_K]
        order = np.argsort(hash_K, kind="stable")
        slots = 1 << max(12, min(_MAX_SLOTS, _SLOTS_PER_WINDOW * len(at_K)).bit_length())
        seen = np.zeros(slots, np.bool_)
        seen[_slot(hash_K, slots)] = True
        seen[_slot(hash_K * _SECOND, slots)] = True
        begin = np.cumsum([0, *(len(text) + 1 for _, text in pairs)], dtype=np.int64)
        item_S = np.array([i for i, _ in pairs], np.int64)
        return cls(characters, data, begin, item_S, hash_K[order], at_K[order], seen)

    def scan(self, documents: Sequence[Sequence[str]]) -> list[dict[int, list[str]]]:
        """Per document: item -> its windows that one of the document's texts holds, in order."""
        texts = [text for document in documents for text in document]
        size_D = np.fromiter(map(len, documents), np.int64, len(documents))
        return self.scan_buffer(word_buffer(texts), size_D)

    def scan_buffer(self, buffer: WordBuffer, size_D: NDArray[np.int64]) -> list[dict[int, list[str]]]:
        """`scan` of texts that are words already; document d is the next `size_D[d]` texts."""
        out: list[dict[int, list[str]]] = [{} for _ in range(len(size_D))]
        normal = normal_bytes(buffer)
        data = normal.tobytes()
        end_T = np.flatnonzero(normal == 0)  # of the texts
        found: dict[tuple[int, int], set[int]] = defaultdict(set)  # text, segment -> window starts in data
        grown: dict[tuple[int, int, int], int] = {}  # text, segment, shift -> up to where it was compared
        for probe, at in self._candidates(data, end_T):
            text = int(np.searchsorted(end_T, probe))
            segment = int(np.searchsorted(self.begin_S, at, side="right")) - 1
            line = (text, segment, probe - at)
            if at < grown.get(line, -1):
                continue
            if data[probe : probe + self.length] != self.data[at : at + self.length]:
                continue
            begin = int(end_T[text - 1]) + 1 if text else 0
            end = int(end_T[text])
            end -= end > begin and data[end - 1] == 32
            low, high = self._grow(data, probe, begin, end, at, segment)
            grown[line] = high
            found[text, segment].update(self._windows(low, high))
        document_T = np.repeat(np.arange(len(size_D)), size_D)
        for (text, segment), starts in sorted(found.items()):
            windows = out[document_T[text]].setdefault(int(self.item_S[segment]), [])
            windows.extend(self._text(start) for start in sorted(starts))
        return [
            {item: list(dict.fromkeys(windows)) for item, windows in items.items() if windows}
            for items in out
        ]

    def _candidates(self, data: bytes, end_T: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """(byte of the texts, byte of the items) of equal hashes. A text that repeats itself is not probed
        twice where everything a window through the probe could hold is the same."""
        hash_N = _hashes(data, self.length, self.stride)
        maybe = np.flatnonzero(self.seen.take(_slot(hash_N, len(self.seen))))
        maybe = maybe[self.seen.take(_slot(hash_N[maybe] * _SECOND, len(self.seen)))]
        low = np.searchsorted(self.hash_K, hash_N[maybe])
        high = np.searchsorted(self.hash_K, hash_N[maybe], side="right")
        equal = np.flatnonzero(low < high)
        probe_H = maybe[equal] * self.stride
        done: set[tuple[int, int, bytes]] = set()
        around = 4 * self.characters  # bytes of a window at most
        for k, probe, text in zip(
            equal.tolist(), probe_H.tolist(), np.searchsorted(end_T, probe_H).tolist(), strict=True
        ):
            before = min(probe, around)
            context = (text, before, data[probe - before : probe + around])
            if context not in done:
                done.add(context)
                yield from ((probe, int(at)) for at in self.at_K[low[k] : high[k]])

    def _grow(self, data: bytes, probe: int, begin: int, end: int, at: int, segment: int) -> tuple[int, int]:
        """The longest match through a probe, as a range of the items' bytes."""
        first, last = int(self.begin_S[segment]), int(self.begin_S[segment + 1]) - 1
        left = _common(data, probe, self.data, at, min(probe - begin, at - first), backwards=True)
        right = _common(data, probe, self.data, at, min(end - probe, last - at), backwards=False)
        return at - left, at + right

    def _windows(self, low: int, high: int) -> list[int]:
        """Starts of the full windows within a range of the items' bytes."""
        view = np.frombuffer(self.data, np.uint8)[low:high]
        starts = np.flatnonzero((view & 0xC0) != 0x80)  # a character's first byte
        ends = np.append(starts[1:], high - low)  # a match cut within a character is cut before it
        if high < len(self.data) and (self.data[high] & 0xC0) == 0x80:
            starts, ends = starts[:-1], ends[:-1]
        full = len(starts) - self.characters + 1
        return [low + int(start) for start in starts[: max(0, full)]]

    def _text(self, start: int) -> str:
        return self.data[start : start + 4 * self.characters].decode(errors="ignore")[: self.characters]


def _slot(hashes: NDArray[np.uint64], slots: int) -> NDArray[np.int64]:
    return (hashes >> np.uint64(65 - slots.bit_length())).view(np.int64)


def _common(a: bytes, i: int, b: bytes, j: int, limit: int, backwards: bool) -> int:
    """How many bytes, at most `limit`, are equal from a[i], b[j] on (or before them)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if backwards:
            same = a[i - middle : i] == b[j - middle : j]
        else:
            same = a[i : i + middle] == b[j : j + middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low
