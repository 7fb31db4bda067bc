"""Texts as words: the normal form that screening compares, and which phrases of an item are looked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"[^\W_]+")  # runs of letters and digits of any script, no underscore
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")

PHRASE_WORDS = 8
"""Words of a phrase. Shorter ones are shared by chance, longer ones are broken by every edit."""

SAMPLED_PHRASES = 20
"""Phrases sampled from one item."""


def split_words(text: str) -> list[str]:
    """Lower-cased runs of letters and digits, in order."""
    return _WORD.findall(text.lower())


def normalise(text: str) -> str:
    """Lower case, runs of letters and digits joined by single blanks. Markup, punctuation and line breaks
    leave no trace."""
    return " ".join(split_words(text))


def sampled_starts(windows: int, samples: int = SAMPLED_PHRASES) -> list[int]:
    """Which of `windows` start positions are sampled: all if there are few, else evenly spaced ones, the
    first and the last among them."""
    if windows <= samples:
        return list(range(max(0, windows)))
    if samples == 1:
        return [0]
    return [round(i * (windows - 1) / (samples - 1)) for i in range(samples)]


def window_starts(segments: Iterable[Sequence[str]], n: int = PHRASE_WORDS) -> list[tuple[int, int]]:
    """(segment, word) of every run of `n` words that lies within one segment."""
    return [(s, i) for s, words in enumerate(segments) for i in range(len(words) - n + 1)]


def phrases(
    segments: Sequence[Sequence[str]], n: int = PHRASE_WORDS, samples: int | None = SAMPLED_PHRASES
) -> list[str]:
    """Distinct phrases of `n` words in order of appearance: `samples` evenly spaced ones, or all (None)."""
    starts = window_starts(segments, n)
    chosen = starts if samples is None else [starts[i] for i in sampled_starts(len(starts), samples)]
    return list(dict.fromkeys(" ".join(segments[s][i : i + n]) for s, i in chosen))


def _table() -> bytes:
    """Byte -> itself in lower case where it is a letter or digit, else a blank. Bytes from 128 on stay: they
    belong to letters, since `fold` has removed everything else outside ASCII."""
    table = bytearray(b" " * 256)
    for byte in range(256):
        if byte >= 128 or chr(byte).isalnum():
            table[byte] = ord(chr(byte).lower()) if byte < 128 else byte
    return bytes(table)


BYTE_TABLE = _table()


class _Folded(dict[str, str]):
    """A character outside ASCII -> its lower-case letters and digits, blanks for all else; filled on
    demand."""

    def __missing__(self, character: str) -> str:
        folded = "".join(c if c.isalnum() else " " for c in character.lower())
        self[character] = folded
        return folded


_FOLDED = _Folded()


def fold(text: str) -> bytes:
    """UTF-8 of a text in which every character outside ASCII is a lower-case letter, a digit or gone. With
    `BYTE_TABLE` applied its words are exactly those of `split_words`."""
    if text.isascii():
        return text.encode()
    if "Σ" in text:  # the one letter whose lower case depends on its neighbours
        text = text.lower()
    return _NOT_ASCII.sub(lambda run: "".join(map(_FOLDED.__getitem__, run[0])), text).encode()
