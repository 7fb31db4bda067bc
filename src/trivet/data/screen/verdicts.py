"""What a pass says about a document, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from trivet.data.screen.documents import Document
from trivet.data.screen.items import PreparedItem

Verdict = Literal["drop", "borderline"]
Borderline = Literal["drop", "keep", "review"]
Decision = Literal["drop", "keep"]
Fate = Literal["clean", "keep", "drop", "held"]
Decisions = Mapping[tuple[str, str], Decision]
"""(document's key, item's name) -> what a person or a judge said."""

Judge = Callable[["Hit", Document], Decision | None]
"""Decides a borderline hit; None leaves it open."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One item found in one document. `hits` of `of` phrases (or windows) were there; `score` is their share,
    or a cosine. `matched` are some of the phrases; `why` says what made a hit borderline or special."""

    item: PreparedItem
    verdict: Verdict
    hits: int
    of: int
    score: float
    matched: tuple[str, ...] = ()
    why: str = ""


class Pass(Protocol):
    """One rule over documents. `check` gives each document's hits, clean ones an empty list;
    `unusable` names the items it cannot find, with reasons: none is left out silently."""

    name: str
    borderline: Borderline

    def check(self, documents: Sequence[Document]) -> list[list[Hit]]: ...

    def unusable(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """One document in one pass. `held`: a borderline hit waits for a decision, and the document with it."""

    name: str
    fate: Fate
    hits: tuple[Hit, ...] = ()
    decisions: tuple[Decision | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One document through the chain: up to the pass that took it out, or all. `allowed` is the reason why a
    document was let through unseen."""

    document: Document
    passes: tuple[PassOutcome, ...] = ()
    allowed: str | None = None

    @property
    def fate(self) -> Literal["keep", "drop", "held"]:
        last = self.passes[-1].fate if self.passes else "clean"
        return last if last in ("drop", "held") else "keep"

    @property
    def taken_by(self) -> str | None:
        """The pass that took the document out."""
        return self.passes[-1].name if self.fate != "keep" else None

    def why(self) -> str:
        """Pass and worst item, for people."""
        if self.fate == "keep":
            return ""
        last = self.passes[-1]
        worst = max(last.hits, key=lambda hit: (hit.verdict == "drop", hit.score, hit.hits))
        return f"{last.name}: {worst.item.item.name} ({worst.hits}/{worst.of}, {worst.score:.2f})"


def decide(
    name: str,
    hits: Sequence[Hit],
    document: Document,
    borderline: Borderline,
    decisions: Decisions,
    judge: Judge | None,
) -> PassOutcome:
    """What becomes of a document with these hits. A decision overrides the rule for its item, either way."""
    if not hits:
        return _clean(name)
    key = document.key()
    made: list[Decision | None] = []
    fates: set[Fate] = set()
    for hit in hits:
        decision = decisions.get((key, hit.item.item.name))
        if decision is None and hit.verdict == "borderline" and judge is not None:
            decision = judge(hit, document)
        made.append(decision)
        if decision is not None or hit.verdict == "drop":
            fates.add(decision or "drop")
        else:
            fates.add("held" if borderline == "review" else borderline)
    fate: Fate = "drop" if "drop" in fates else "held" if "held" in fates else "keep"
    return PassOutcome(name, fate, tuple(hits), tuple(made))


@cache
def _clean(name: str) -> PassOutcome:
    """One for all: nearly every document is clean."""
    return PassOutcome(name, "clean")


def review_row(
    outcome: PassOutcome, hit: Hit, decision: Decision | None, document: Document
) -> dict[str, Any]:
    """One line of a review file. A person writes "drop" or "keep" as its `decision`."""
    prompt = next(iter(document.prompts or document.texts), "")
    return {
        "pass": outcome.name,
        "document": document.key(),
        "source": document.source,
        "place": document.place,
        "item": hit.item.item.name,
        "part": hit.item.item.part,
        "hits": hit.hits,
        "of": hit.of,
        "score": round(hit.score, 4),
        "why": hit.why,
        "matched": list(hit.matched),
        "item_text": "\n".join(hit.item.item.texts)[:2000],
        "prompt": prompt[:2000],
        "fate": outcome.fate,
        "decision": decision,
    }


def load_decisions(path: Path) -> dict[tuple[str, str], Decision]:
    """The decisions in a review file; lines without one are still open. Raises ValueError with the line."""
    out: dict[tuple[str, str], Decision] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                decision = row["decision"]
                key = str(row["document"]), str(row["item"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a line of a review file ({error})") from error
            if decision is None:
                continue
            if decision not in get_args(Decision):
                raise ValueError(f'{path}:{number}: decision {decision!r} is not "drop", "keep" or null')
            if out.setdefault(key, decision) != decision:
                raise ValueError(
                    f"{path}:{number}: {key[1]} was decided otherwise for the same document before"
                )
    return out
