"""Duplicates: exact ones by SHA-256, near ones by MinHash with every candidate's overlap computed.

Documents are sketched in any number of processes (`sketch`), the sketches are joined in the documents' order,
and `resolve` says for each document which earlier one it repeats. The first in order is kept, so the result
depends on the order alone. A sketch can be saved and a run continued from it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trivet.data.screen.documents import Document
from trivet.data.screen.phrases import WordBuffer, run_hashes, word_buffer
from trivet.data.screen.words import normalise

Of = Literal["prompt", "whole"]
_BASE = 0x9E3779B97F4A7C15
_BLANKS = b" \t\n\r\v\f"
_LONG = 256  # bytes; longer words are hashed one by one
_RECALL = 0.99  # of pairs at the threshold, when bands are chosen


@dataclass(frozen=True, slots=True)
class DedupOptions:
    """What counts as a duplicate.

    `of`: the prompt (all user messages) or the whole conversation. `normal`: `blanks` (lower case, white
    space left out) or `words` (letters and digits only: "2 + 3" and "2 - 3" are then the same).
    `near`: also documents whose runs of `shingle` words overlap by `threshold` (Jaccard) or more; needs the
    library rensa. `max_candidates`: earlier documents compared with one; how often it was not enough is
    counted.
    """

    of: Of = "whole"
    normal: Literal["blanks", "words"] = "blanks"
    near: bool = False
    threshold: float = 0.8
    shingle: int = 5
    permutations: int = 128
    max_candidates: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"a Jaccard threshold lies in (0, 1], not {self.threshold}")


def exact_key(document: Document, options: DedupOptions | None = None) -> bytes:
    """SHA-256 of the normalised text (its first half: 16 bytes), message borders and roles included."""
    options = options or DedupOptions()
    parts = []
    for d, text in enumerate(document.texts):
        if options.of == "prompt" and not document.is_prompt(d):
            continue
        role = document.roles[d] if document.roles else "user"
        parts.append(f"{role}\x1f{normalise(text) if options.normal == 'words' else text}")
    whole = "\x1e".join(parts).lower().encode("utf-8", "surrogatepass")
    return hashlib.sha256(whole.translate(None, _BLANKS)).digest()[:16]


@dataclass(slots=True)
class Sketches:
    """What is remembered of documents, in order: `key_D16` (bytes of the exact keys), `band_DB` (a hash per
    band of the MinHash), and the distinct shingles of document d as `shingle_S[begin_D[d] : begin_D[d + 1]]`,
    sorted.
    """

    key_D16: NDArray[np.uint8]
    band_DB: NDArray[np.uint64]
    shingle_S: NDArray[np.uint32]
    begin_D: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key_D16)

    def save(self, folder: Path) -> None:
        """Arrays as `.npy` files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("key_D16", "band_DB", "shingle_S", "begin_D"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Sketches:
        """What `save` wrote; shingles are mapped and read as they are compared."""
        key, band, begin = (np.load(folder / f"{name}.npy") for name in ("key_D16", "band_DB", "begin_D"))
        path = folder / "shingle_S.npy"
        shingle = np.load(path, mmap_mode="r" if len(key) and begin[-1] else None)
        return cls(key, band, shingle, begin)

    @classmethod
    def join(cls, parts: Sequence[Sketches]) -> Sketches:
        """The documents of all parts, in order."""
        if not parts:
            return _no_sketches(0)
        starts = np.cumsum([0, *(int(part.begin_D[-1]) for part in parts)])
        begins = [part.begin_D[:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
        return cls(
            np.concatenate([part.key_D16 for part in parts]),
            np.concatenate([part.band_DB for part in parts]),
            np.concatenate([part.shingle_S for part in parts]),
            np.concatenate([*begins, starts[-1:]]),
        )


def _no_sketches(bands: int) -> Sketches:
    return Sketches(
        np.zeros((0, 16), np.uint8),
        np.zeros((0, bands), np.uint64),
        np.zeros(0, np.uint32),
        np.zeros(1, np.int64),
    )


def sketch(documents: Sequence[Document], options: DedupOptions) -> Sketches:
    """Sketches of a batch of documents. A function of its arguments alone."""
    keys = b"".join(exact_key(document, options) for document in documents)
    out = _no_sketches(_bands(options)[0] if options.near else 0)
    out.key_D16 = np.frombuffer(keys, np.uint8).reshape(-1, 16)
    if not options.near:
        out.band_DB = np.zeros((len(documents), 0), np.uint64)
        out.begin_D = np.zeros(len(documents) + 1, np.int64)
        return out
    shingles = [np.unique(run) for run in _shingles(documents, options)]
    out.begin_D = np.cumsum([0, *map(len, shingles)], dtype=np.int64)
    flat = np.concatenate(shingles) if shingles else np.zeros(0, np.uint64)
    out.band_DB = _band_hashes(flat, out.begin_D, options)
    # Sorted anew: the upper half alone is kept.
    halves = [np.unique((run >> np.uint64(32)).astype(np.uint32)) for run in shingles]
    out.begin_D = np.cumsum([0, *map(len, halves)], dtype=np.int64)
    out.shingle_S = np.concatenate(halves) if halves else out.shingle_S
    return out


def _shingles(documents: Sequence[Document], options: DedupOptions) -> Iterator[NDArray[np.uint64]]:
    """Hashes of the runs of words of each document; one hash of all its words where it has fewer."""
    texts = [
        "\n".join(document.prompts if options.of == "prompt" else document.texts) for document in documents
    ]
    buffer = word_buffer(texts)
    word_W = full_hashes(buffer)
    run_W = run_hashes(word_W, options.shingle)
    for first, last in zip(buffer.word_D[:-1].tolist(), buffer.word_D[1:].tolist(), strict=True):
        size = last - first
        if size >= options.shingle:
            yield _mixed(run_W[first : last - options.shingle + 1])
        else:
            yield _mixed(run_hashes(word_W[first:last], size)) if size else word_W[:0]


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits spread over the word: low bits of a polynomial depend on low bits only."""
    mixed = hashes ^ (hashes >> np.uint64(32))
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed * np.uint64(_BASE)


def full_hashes(buffer: WordBuffer) -> NDArray[np.uint64]:
    """A hash of every word from all of its bytes."""
    data = buffer.data
    eight = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    length_W = buffer.end_W - buffer.start_W
    hash_W = length_W.view(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    masks = np.array([(1 << (8 * k)) - 1 for k in range(9)], np.uint64)
    longer = np.arange(len(length_W))
    for block in range(0, _LONG, 8):
        longer = longer[length_W[longer] > block]
        if not len(longer):
            return hash_W
        part = eight[buffer.start_W[longer] + block] & masks.take(length_W[longer] - block, mode="clip")
        hash_W[longer] = (hash_W[longer] ^ part) * np.uint64(_BASE)
        hash_W[longer] ^= hash_W[longer] >> np.uint64(29)
    for w in longer[length_W[longer] > _LONG].tolist():
        word = data[buffer.start_W[w] : buffer.end_W[w]]
        hash_W[w] = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")
    return hash_W


def _bands(options: DedupOptions) -> tuple[int, int]:
    """(bands, rows of each): as many rows as still find 99% of the pairs at the threshold."""
    fitting = [
        rows
        for rows in range(1, options.permutations + 1)
        if 1 - (1 - options.threshold**rows) ** (options.permutations // rows) >= _RECALL
    ]
    rows = max(fitting, default=1)
    return options.permutations // rows, rows


def _band_hashes(
    flat: NDArray[np.uint64], begin_D: NDArray[np.int64], options: DedupOptions
) -> NDArray[np.uint64]:
    if importlib.util.find_spec("rensa") is None:
        raise ImportError("near duplicates need the library rensa: pip install rensa")
    rensa: Any = importlib.import_module("rensa")
    bands, rows = _bands(options)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        flat, begin_D.astype(np.uint64), options.permutations, options.seed
    )
    digest = np.array(matrix.to_rows(), np.uint32).reshape(len(begin_D) - 1, options.permutations)
    cells = digest[:, : bands * rows].reshape(-1, bands, rows).astype(np.uint64)
    out = np.zeros(cells.shape[:2], np.uint64)
    for row in range(rows):
        out = (out ^ cells[:, :, row]) * np.uint64(_BASE)
        out ^= out >> np.uint64(29)
    return out


@dataclass(slots=True)
class Duplicates:
    """`first_D[d]` is the document that d repeats, d itself where it is kept. `kind_D`: 0 kept, 1 exact, 2
    near. `jaccard`: of near ones with their first. `capped`: documents with more candidates than were
    compared."""

    first_D: NDArray[np.int64]
    kind_D: NDArray[np.uint8]
    jaccard: dict[int, float] = field(default_factory=dict)
    capped: int = 0

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.kind_D == 0

    def clusters(self) -> dict[int, list[int]]:
        """First document -> those that repeat it, in order; only where there are any."""
        out: dict[int, list[int]] = defaultdict(list)
        for d in np.flatnonzero(self.kind_D).tolist():
            out[int(self.first_D[d])].append(d)
        return dict(sorted(out.items()))

    def report(self) -> dict[str, Any]:
        """Counts, and how many clusters have which size (the first included)."""
        sizes = Counter(len(repeats) + 1 for repeats in self.clusters().values())
        return {
            "documents": len(self.first_D),
            "kept": int(self.kept.sum()),
            "exact duplicates": int((self.kind_D == 1).sum()),
            "near duplicates": int((self.kind_D == 2).sum()),
            "clusters by size": dict(sorted(sizes.items())),
            "documents with too many candidates": self.capped,
        }


def resolve(sketches: Sketches, options: DedupOptions) -> Duplicates:
    """Which documents repeat an earlier one. A near duplicate repeats a document that is itself kept, so
    chains of small changes do not run together."""
    count = len(sketches)
    first_D = np.arange(count)
    keys = np.ascontiguousarray(sketches.key_D16).view("V16").ravel()
    _, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first_D[:] = index[inverse.ravel()]
    out = Duplicates(first_D, (first_D != np.arange(count)).astype(np.uint8))
    if options.near and count:
        _resolve_near(sketches, options, out)
        # Exact copies of a document that went as a near duplicate belong to its first.
        out.first_D = out.first_D[out.first_D]
    return out


def _resolve_near(sketches: Sketches, options: DedupOptions, out: Duplicates) -> None:
    alone = np.flatnonzero(out.kind_D == 0)
    alone = alone[np.diff(sketches.begin_D)[alone] > 0]
    shared = np.zeros((len(alone), sketches.band_DB.shape[1]), np.bool_)
    for band in range(shared.shape[1]):
        _, inverse, sizes = np.unique(sketches.band_DB[alone, band], return_inverse=True, return_counts=True)
        shared[:, band] = sizes[inverse] > 1
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(shared.any(1)).tolist():
        d = int(alone[row])
        cells = [(band, int(sketches.band_DB[d, band])) for band in np.flatnonzero(shared[row]).tolist()]
        votes = Counter(other for cell in cells for other in buckets[cell])
        out.capped += len(votes) > options.max_candidates
        mine = _shingles_of(sketches, d)
        # Those that share most bands first, the earliest among equals.
        candidates = sorted(votes, key=lambda other: (-votes[other], other))[: options.max_candidates]
        for other in candidates:
            overlap = _jaccard(mine, _shingles_of(sketches, other))
            if overlap >= options.threshold:
                out.first_D[d], out.kind_D[d], out.jaccard[d] = other, 2, overlap
                break
        else:
            for cell in cells:
                buckets[cell].append(d)


def _shingles_of(sketches: Sketches, d: int) -> NDArray[np.uint32]:
    return np.asarray(sketches.shingle_S[sketches.begin_D[d] : sketches.begin_D[d + 1]])


def _jaccard(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> float:
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


class ExactFilter:
    """Exact duplicates of a stream, in one pass: about 100 bytes are remembered of each document."""

    def __init__(self, options: DedupOptions | None = None) -> None:
        self.options = options or DedupOptions()
        self._place_of: dict[bytes, str] = {}
        self.seen = 0

    def first(self, document: Document) -> str | None:
        """Where the document stood before (its place, or number from 0); None when it is new."""
        name = document.place or str(self.seen)
        self.seen += 1
        key = exact_key(document, self.options)
        found = self._place_of.get(key)
        if found is None:
            self._place_of[key] = name
        return found

    def state(self) -> dict[str, Any]:
        """For `restore`: documents seen, and key in hex -> place."""
        return {"seen": self.seen, "places": {key.hex(): place for key, place in self._place_of.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        self._place_of = {bytes.fromhex(key): place for key, place in state["places"].items()}
