"""The prefix pass and the character pass."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trivet.data.screen.characters import CharacterIndex
from trivet.data.screen.documents import Batch, Document
from trivet.data.screen.items import PreparedItems
from trivet.data.screen.verdicts import Borderline, Hit
from trivet.data.screen.words import normalise

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """The first `characters` characters of the normalised first prompt equal the item's. Nothing is ever
    borderline."""

    characters: int = 400


class PrefixPass:
    """Hash table of the questions' beginnings."""

    name = "prefix_hash"
    borderline: Borderline = "keep"

    def __init__(self, items: PreparedItems, options: PrefixOptions | None = None) -> None:
        self.options = options or PrefixOptions()
        self.items = items
        self._items_of: dict[bytes, list[int]] = defaultdict(list)
        for i, prepared in enumerate(items):
            if prepared.usable and prepared.item.part == "question":
                self._items_of[self._hash(" ".join(prepared.words))].append(i)

    def _hash(self, text: str) -> bytes:
        return hashlib.sha256(text[: self.options.characters].encode()).digest()

    def unusable(self) -> dict[str, str]:
        """Items this pass cannot find, and why."""
        out = {}
        for prepared in self.items:
            if not prepared.usable:
                out[prepared.item.label] = prepared.why or prepared.status
            elif prepared.item.part == "answer":
                out[prepared.item.label] = "an answer begins no prompt"
        return out

    def check(self, documents: Sequence[Document]) -> list[list[Hit]]:
        out: list[list[Hit]] = []
        for document in documents:
            prefix = normalised_prefix(next(iter(document.prompts), ""), self.options.characters)
            found = self._items_of.get(self._hash(prefix), []) if prefix else []
            out.append([Hit(self.items.items[i], "drop", 1, 1, 1.0, (prefix[:100],)) for i in found])
        return out


def normalised_prefix(text: str, characters: int) -> str:
    """`normalise(text)[:characters]` without normalising all of a long text."""
    cut = 4 * characters
    while cut < len(text):
        # The last word may be cut short; what stands before it is final.
        head = normalise(text[:cut]).rpartition(" ")[0]
        if len(head) >= characters:
            return head[:characters]
        cut *= 4
    return normalise(text)[:characters]


@dataclass(frozen=True, slots=True)
class CharacterOptions:
    """Dropped when at least `min_shared` windows of `characters` characters of the normalised item stand in
    the document, and at least `min_share` of the item's windows; fewer are borderline. Five windows are no
    more than 64 characters, which formulas of speech reach ("substituting the first equation into the second
    equation we get"); `min_share=0` is the bare rule."""

    characters: int = 60
    min_shared: int = 5
    min_share: float = 0.2
    borderline: Borderline = "keep"


class CharacterPass:
    """All character windows of all items in one index."""

    name = "char_60gram"

    def __init__(self, items: PreparedItems, options: CharacterOptions | None = None) -> None:
        self.options = options = options or CharacterOptions()
        self.borderline: Borderline = options.borderline
        self.items = items
        texts = [
            [" ".join(segment) for segment in prepared.segments] if prepared.usable else []
            for prepared in items
        ]
        self.index = CharacterIndex.build(texts, options.characters)
        self._of = [
            len({t[k : k + options.characters] for t in some for k in range(len(t) - options.characters + 1)})
            for some in texts
        ]

    def unusable(self) -> dict[str, str]:
        """Items this pass cannot find, and why."""
        return {
            prepared.item.label: f"under {self.options.characters} characters of its own"
            if prepared.usable
            else prepared.why
            for of, prepared in zip(self._of, self.items, strict=True)
            if not of
        }

    def check(self, documents: Sequence[Document]) -> list[list[Hit]]:
        out: list[list[Hit]] = []
        batch = Batch.of(documents)
        for shared in self.index.scan_buffer(batch.buffer, batch.size_D):
            hits = []
            for i, windows in sorted(shared.items()):
                of = self._of[i]
                few = len(windows) < min(self.options.min_shared, of)
                small = len(windows) < self.options.min_share * of
                hits.append(
                    Hit(
                        self.items.items[i],
                        "borderline" if few or small else "drop",
                        len(windows),
                        of,
                        len(windows) / of,
                        tuple(windows[:_SHOWN]),
                        "few windows" if few else "small share" if small else "",
                    )
                )
            out.append(hits)
        return out
