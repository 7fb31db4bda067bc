"""Benchmark items made ready to be looked for, with guards against what everybody writes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trivet.data.screen.allow import Allow
from trivet.data.screen.words import PHRASE_WORDS, split_words

Part = Literal["question", "answer"]

INSTRUCTIONS = (
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Let's think step by step and output the final answer within \\boxed{}.",
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
    "Answer the following multiple choice question. The last line of your response should be of the "
    "following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step "
    "before answering.",
    "You will be given a question (problem specification) and will generate a correct Python program that "
    "matches the specification and passes all tests.",
)
"""Instructions that evaluation harnesses glue to items. They are cut before phrases are taken."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question or one reference answer of a benchmark. `texts`: usually one; the messages of a
    conversation stay apart, and no phrase crosses two."""

    benchmark: str
    id: str
    texts: tuple[str, ...]
    part: Part = "question"
    place: str = ""

    @property
    def name(self) -> str:
        """Benchmark and item, whichever part."""
        return f"{self.benchmark}/{self.id}"

    @property
    def label(self) -> str:
        """Benchmark, item and part."""
        return self.name if self.part == "question" else f"{self.name}:{self.part}"


@dataclass(frozen=True, slots=True)
class Guards:
    """Against false positives.

    An item with fewer than `min_words` words of its own has no phrases; a question is then compared whole
    with each prompt, if it has `whole_min_words`. An answer needs `answer_min_words`: short ones ("return
    sorted(x)") are everybody's. A phrase that `boilerplate_share` of a benchmark's distinct items have in
    common, and at least `boilerplate_items` of them, is boilerplate: the words it covers are cut from every
    item, as are `instructions`. A phrase in `frequent_share` of the corpus sample's documents, and in at
    least `frequent_documents`, is frequent: it is listed and weighs nothing.
    """

    min_words: int = PHRASE_WORDS
    answer_min_words: int = 16
    whole_min_words: int = 3
    boilerplate_share: float = 0.05
    boilerplate_items: int = 5
    instructions: tuple[str, ...] = INSTRUCTIONS
    frequent_share: float = 0.005
    frequent_documents: int = 20

    @classmethod
    def off(cls) -> Guards:
        """The bare rule."""
        return cls(
            answer_min_words=PHRASE_WORDS,
            boilerplate_share=math.inf,
            instructions=(),
            frequent_share=math.inf,
        )


Status = Literal["phrases", "whole", "short", "short_answer", "empty", "duplicate", "allowed"]
UNUSABLE: tuple[Status, ...] = ("short", "short_answer", "empty", "duplicate", "allowed")


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item as words. `segments` are what is left of it after boilerplate was cut; `status` says how it is
    looked for, or why it is not; `why` is for people."""

    item: Item
    status: Status
    words: tuple[str, ...]
    segments: tuple[tuple[str, ...], ...]
    why: str = ""

    @property
    def cut(self) -> int:
        """Words of boilerplate."""
        return len(self.words) - sum(map(len, self.segments))

    @property
    def usable(self) -> bool:
        return self.status not in UNUSABLE

    def whole_texts(self) -> list[str]:
        """Normalised texts that a prompt equal to the item would have, with its boilerplate and without."""
        bare = " ".join(word for segment in self.segments for word in segment)
        return [text for text in dict.fromkeys((" ".join(self.words), bare)) if text]


@dataclass(slots=True)
class PreparedItems:
    """All items, the unusable ones too, and what was taken for boilerplate: (benchmark, run of words) ->
    items it was cut from."""

    items: list[PreparedItem]
    guards: Guards
    allow: Allow
    boilerplate: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[PreparedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def statuses(self) -> dict[str, Counter[str]]:
        """Per benchmark: how many items are looked for and how, and how many not and why."""
        out: dict[str, Counter[str]] = defaultdict(Counter)
        for prepared in self.items:
            out[prepared.item.benchmark][prepared.status] += 1
        return dict(out)

    def unusable(self) -> list[PreparedItem]:
        return [prepared for prepared in self.items if not prepared.usable]


def prepare_items(
    items: Iterable[Item], guards: Guards | None = None, allow: Allow | None = None
) -> PreparedItems:
    """Words of every item without its boilerplate, and what becomes of those that have too few."""
    guards, allow = guards or Guards(), allow or Allow()
    out = PreparedItems([], guards, allow)
    known = [words for text in guards.instructions if (words := tuple(split_words(text)))]
    groups: dict[tuple[str, Part], list[tuple[Item, list[list[str]]]]] = defaultdict(list)
    for item in items:
        groups[item.benchmark, item.part].append((item, [split_words(text) for text in item.texts]))
    for group in groups.values():
        shared = _shared_phrases([texts for _, texts in group], guards)
        seen: dict[tuple[str, ...], Item] = {}
        for item, texts in group:
            words = tuple(word for text in texts for word in text)
            segments, cut = _cut(texts, known, shared)
            status, why = _status(item, words, segments, guards, allow, seen.get(words))
            seen.setdefault(words, item)
            out.items.append(PreparedItem(item, status, words, segments, why))
            out.boilerplate.update((item.benchmark, run) for run in set(cut))
    return out


def _shared_phrases(items: Sequence[list[list[str]]], guards: Guards) -> set[tuple[str, ...]]:
    """Runs of eight words that too many distinct items have in common."""
    n = PHRASE_WORDS
    counts: Counter[tuple[str, ...]] = Counter()
    distinct = {tuple(map(tuple, texts)) for texts in items}
    least = max(guards.boilerplate_items, guards.boilerplate_share * len(distinct))
    if len(distinct) < least:
        return set()
    for texts in distinct:
        counts.update({words[i : i + n] for words in texts for i in range(len(words) - n + 1)})
    return {phrase for phrase, count in counts.items() if count >= least}


def _cut(
    texts: Sequence[list[str]], known: Sequence[tuple[str, ...]], shared: set[tuple[str, ...]]
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """Segments that are left, and the runs of words that were cut."""
    segments: list[tuple[str, ...]] = []
    cut: list[str] = []
    for words in texts:
        boiler = [False] * len(words)
        for i in range(len(words)):
            if shared and tuple(words[i : i + PHRASE_WORDS]) in shared:
                boiler[i : i + PHRASE_WORDS] = [True] * PHRASE_WORDS
            for run in known:
                if words[i] == run[0] and tuple(words[i : i + len(run)]) == run:
                    boiler[i : i + len(run)] = [True] * len(run)
        begin = 0
        for i in range(1, len(words) + 1):
            if i == len(words) or boiler[i] != boiler[begin]:
                if boiler[begin]:
                    cut.append(" ".join(words[begin:i]))
                else:
                    segments.append(tuple(words[begin:i]))
                begin = i
    return tuple(segments), cut


def _status(
    item: Item,
    words: tuple[str, ...],
    segments: tuple[tuple[str, ...], ...],
    guards: Guards,
    allow: Allow,
    first: Item | None,
) -> tuple[Status, str]:
    own = sum(map(len, segments))
    if not words:
        return "empty", "no letters or digits"
    reason = allow.item(item.name)
    if reason is not None:
        return "allowed", reason
    if first is not None:
        return "duplicate", f"the same text as {first.name}"
    floor = guards.min_words if item.part == "question" else guards.answer_min_words
    longest = max((len(segment) for segment in segments), default=0)
    if own >= floor and longest >= PHRASE_WORDS:
        return "phrases", ""
    seen = f"{own} words of its own" + (f", {len(words) - own} of boilerplate" if own < len(words) else "")
    if item.part == "answer":
        return "short_answer", f"{seen}; an answer needs {floor}"
    if own >= guards.whole_min_words:
        return "whole", f"{seen}; compared whole with each prompt"
    return "short", f"{seen}; too common to be looked for"
