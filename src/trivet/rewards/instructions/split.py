"""Words, sentences, lines and bullets of a text. One pass each: every pattern is linear in the text."""

from __future__ import annotations

import re
from functools import lru_cache


def listed(text: str) -> tuple[str, ...]:
    """The words of a text, or, where it has commas, what stands between them."""
    return tuple(" ".join(one.split()) for one in text.split(",")) if "," in text else tuple(text.split())


_WORD = re.compile(r"\w+")
_TERM = re.compile(r"[^\W_]++(?:['\u2019.-][^\W_]++)*+")
# Runs of end marks, then what may close a sentence. The look-behind makes a run be tried once only.
_END = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"')\]\u201d\u2019\u00bb*_]*+(?=\s|$)|[\u3002\uff01\uff1f\u0964]++"
)
_BEFORE = re.compile(r"[^\s\"'(\[\u201c\u2018*_]*+$")
_ABBREVIATIONS = frozenset(
    listed(
        """
    mr mrs ms dr prof st mt sr jr rev gen col lt capt sgt hon vs etc cf al fig figs no nos vol pp ed eds
    inc ltd co corp dept est approx ca e.g i.e a.m p.m u.s u.k u.n ph.d b.a m.a b.c a.d
    """
    )
)
_BULLET = {
    "*": re.compile(r"^[^\S\n]*\*[^\S\n]+\S", re.MULTILINE),
    "-": re.compile(r"^[^\S\n]*-[^\S\n]+\S", re.MULTILINE),
}


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores; "don't" is two."""
    return _WORD.findall(text)


def terms(text: str) -> list[str]:
    """Words as a reader counts them: with apostrophes, hyphens and dots inside."""
    return _TERM.findall(text)


def count_word(text: str, word: str) -> int:
    """How often a word or phrase stands by itself, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


@lru_cache(maxsize=16)  # several instructions of one answer ask
def ends(text: str) -> tuple[tuple[int, int], ...]:
    """(begin, end) of the marks that end a sentence: . ! ? before a blank or the end (not after a known
    abbreviation, an initial, or the number of a list's line; "..." only before a capital), and those of
    scripts that set no blank."""
    out, length = [], len(text.rstrip())
    for match in _END.finditer(text):
        marks = match.group()
        if marks[0] == "." and not marks.startswith("..") and not set(marks) & set("!?"):
            if _abbreviated(text, match.start()) and match.end() < length:
                continue
        elif (marks.startswith("..") or marks[0] == "\u2026") and _small(text, match.end()):
            continue
        out.append(match.span())
    return tuple(out)


def _abbreviated(text: str, dot: int) -> bool:
    window = text[max(0, dot - 40) : dot]
    found = _BEFORE.search(window)
    token = found.group() if found else ""
    if token.lower() in _ABBREVIATIONS:
        return True
    if len(token) == 1 and token.isalpha() and token.isupper() and token != "I":
        return True  # J. Smith
    if token.isdecimal() and len(token) <= 3:
        return window[: len(window) - len(token)].rpartition("\n")[2].strip() == "" and (
            "\n" in window or dot <= 40
        )
    return False


def _small(text: str, place: int) -> bool:
    """The next letter is a small one."""
    rest = text[place : place + 40].lstrip()
    return rest[:1].islower()


@lru_cache(maxsize=16)
def sentences(text: str) -> tuple[str, ...]:
    """The sentences, with their end marks. What has no letter or digit is none."""
    out, begin = [], 0
    for _, end in ends(text):
        out.append(text[begin:end].strip())
        begin = end
    out.append(text[begin:].strip())
    return tuple(one for one in out if _WORD.search(one))


def lines(text: str) -> list[str]:
    """Lines with something on them, without blanks at their ends."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def paragraphs(text: str) -> list[str]:
    """Blocks with an empty line between them."""
    out: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            out[-1].append(line)
        elif out[-1]:
            out.append([])
    return ["\n".join(block) for block in out if block]


def bullets(text: str, mark: str = "*") -> int:
    """Lines that begin with the mark (* or -) and a blank."""
    return len(_BULLET[mark].findall(text))
