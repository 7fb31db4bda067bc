"""The rules of screening said as plainly as Python allows: slow, and what the fast scanners must equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trivet.data.screen.words import normalise


def words_hits(phrases: Sequence[str], texts: Sequence[str]) -> set[str]:
    """Phrases that stand on word borders within one text."""
    padded = [f" {normalise(text)} " for text in texts]
    return {phrase for phrase in phrases if any(f" {phrase} " in text for text in padded)}


def substring_hits(phrases: Sequence[str], texts: Sequence[str]) -> set[str]:
    """Phrases that are substrings of all texts, normalised and put one after the other."""
    whole = " ".join(text for text in map(normalise, texts) if text)
    return {phrase for phrase in phrases if phrase in whole}


def shared_windows(item: str, texts: Sequence[str], characters: int = 60) -> set[str]:
    """Windows of `characters` characters of the normalised item that stand in a normalised text."""
    normal = normalise(item)
    windows = {normal[i : i + characters] for i in range(len(normal) - characters + 1)}
    haystack = [normalise(text) for text in texts]
    return {window for window in windows if any(window in text for text in haystack)}


def prefix_hash(text: str, characters: int = 400) -> str:
    """SHA-256 of the first `characters` characters of the normalised text."""
    return hashlib.sha256(normalise(text)[:characters].encode()).hexdigest()
