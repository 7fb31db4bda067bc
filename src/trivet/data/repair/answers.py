"""How an answer states its result: once, in a box."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import islice

from trivet.data.formats.chat import Chat
from trivet.data.record import RecordDropped

MARKS, BOXED, SUFFIX = "calculator_marks_removed", "answer_suffix_boxed", "answer_suffix_removed"
_BOX = "\\boxed{"
_LONGEST = 80  # characters of a stated result; what is longer is prose
_COMPARED = 300  # characters of a box that are still compared
_MOST = 8  # statements at the end of one answer; a text of more is something else

# All patterns are bounded or meet bounded text: a message of megabytes costs no more than its length.
_CALCULATION = re.compile(r"<<([-+*/0-9.,()=$% ]{0,200})>>")
_HASH = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*([^\n#]{1,80})\Z")
_ANSWER_IS = re.compile(
    r"(?:\A|\n|(?<=[.!?$] ))(?:so,? |thus,? |hence,? |therefore,? )?the (?:final )?answer is:?[ \t]{0,9}"
    r"(\S[^\n]{0,80})\Z",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"([-+]?)(\d{1,30})(?:\.(\d{1,30}))?")
_RATIO = re.compile(r"([-+]?)(?:\\frac\{(\d{1,30})\}\{(\d{1,30})\}|\\frac(\d)(\d)|(\d{1,30})/(\d{1,30}))")
_WORDS = ("yes", "no", "true", "false")


class Conflict(ValueError):
    """One answer states two different results."""


def calculator_marks(chat: Chat) -> None:
    """The marks of a calculator, as in `3*6=<<3*6=18>>18`, go (`calculator_marks_removed`)."""
    for draft in chat.drafts:
        text = draft.content
        if draft.role == "assistant" and isinstance(text, str) and "<<" in text and ">>" in text:
            draft.content = _without_calculations(text)
            if draft.content != text:
                chat.mark(MARKS)


def answer_suffixes(chat: Chat) -> None:
    """ "#### X" at the end becomes "The answer is \\boxed{X}." (`answer_suffix_boxed`); a statement that
    repeats the box goes (`answer_suffix_removed`). Raises RecordDropped (answer_conflict) when two differ."""
    for draft in chat.drafts:
        text = draft.content
        if draft.role != "assistant" or not isinstance(text, str):
            continue
        if "####" in text or _BOX in text:
            try:
                draft.content, mark = settle(text)
            except Conflict as error:
                raise RecordDropped("answer_conflict", str(error)) from None
            if mark:
                chat.mark(mark)


def settle(text: str) -> tuple[str, str]:
    """(the text with one statement of its result, what was done or ""). Raises Conflict."""
    if "####" not in text and _BOX not in text:
        return text, ""
    body, stated = _peel(text.rstrip())
    if len(stated) > _MOST:
        return text, ""
    box = last_box(body)
    values = [value for _, value, _ in stated] + ([] if box is None else [box])
    if len(values) < 2 and not any(kind == "hash" for kind, _, _ in stated):
        return text, ""
    for value in values[1:]:
        same = same_answer(values[0], value)
        if same is False:
            raise Conflict(f"two answers: {values[0][:40]!r} and {value[:40]!r}")
        if same is None:
            return text, ""  # not comparable: left as it is
    if box is not None:
        return body, SUFFIX
    statement = next((said for kind, _, said in reversed(stated) if kind == "box"), None)
    if statement is not None:
        return f"{body}\n\n{statement}".lstrip(), SUFFIX
    value = next(value for kind, value, _ in stated if kind == "hash")
    return f"{body}\n\nThe answer is {_BOX}{value}}}.".lstrip(), BOXED


def _without_calculations(text: str) -> str:
    bare = text
    for _ in range(_MOST):  # nested ones need a pass each
        before, bare = bare, _CALCULATION.sub(_unless_sum, bare)
        if bare == before:
            return bare if bare.strip() else text
    return text


def _unless_sum(found: re.Match[str]) -> str:
    """Nothing for a calculation, which has a digit on both sides of an equals sign."""
    left, _, right = found[1].partition("=")
    return "" if any(map(str.isdigit, left)) and any(map(str.isdigit, right)) else found[0]


def _peel(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """(what stands before the statements at the end, the statements as (kind, value, words), last first)."""
    stated: list[tuple[str, str, str]] = []
    while len(stated) <= _MOST:
        tail = text[-200:]
        if "####" in tail and (found := _HASH.search(tail)):
            kind, value = "hash", found[1].strip()
            if _headings(text[: len(text) - len(tail) + found.start()], value):
                return text, stated
        elif found := _ANSWER_IS.search(tail):
            value = found[1].strip().rstrip(". ")
            kind, value = _kind(value)
            before = text[: len(text) - len(tail) + found.start()]
            other = stated[0][1] if stated else _stated_before(before)
            if kind == "plain" and (other is None or same_answer(other, value) is None):
                return text, stated  # nothing it could repeat
        else:
            return text, stated
        if not _stands_for_a_result(value):
            return text, stated
        stated.append((kind, value, found[0].strip()))
        text = text[: len(text) - len(tail) + found.start()].rstrip()
    return text, stated


def _kind(value: str) -> tuple[str, str]:
    """("box", what is in it) for a box alone, else ("plain", the words)."""
    inner = last_box(value)
    return ("box", inner) if inner is not None and value.strip("$ ").startswith(_BOX) else ("plain", value)


def _stated_before(text: str) -> str | None:
    found = _HASH.search(text.rstrip()[-200:])
    return found[1].strip() if found else last_box(text)


def _headings(text: str, value: str) -> bool:
    """Lines that begin with "####" and are no results: the text is a document."""
    if "\n####" not in text and not text.startswith("####"):
        return False
    lines = (line.lstrip("# \t") for line in text.split("\n") if line.startswith("####"))
    return any(same_answer(line, value) is None for line in islice(lines, _MOST))


def _stands_for_a_result(value: str) -> bool:
    if not value or len(value) > _LONGEST or _braces_open(value):
        return False
    word = value.strip("()$ .").lower()
    return any(c.isdigit() or c == "\\" for c in value) or len(word) == 1 or word in _WORDS


def _braces_open(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return True
    return depth != 0


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{...} that is closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for at in range(start + len(_BOX), len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start + len(_BOX) : at].strip()
    return None


def same_answer(one: str, other: str) -> bool | None:
    """Whether two stated results are the same; None where they cannot be compared."""
    if one == other:
        return True
    if max(len(one), len(other)) > _COMPARED:
        return None
    first, second = _plain(one), _plain(other)
    if first == second:
        return True
    numbers = _number(first), _number(second)
    if None not in numbers:
        return numbers[0] == numbers[1]
    # Two choices differ; two expressions, or a choice and its value, may be the same in other words.
    return False if all((len(v) == 1 and v.isalpha()) or v in _WORDS for v in (first, second)) else None


def _plain(value: str) -> str:
    """Without units, signs of money, spacing and the letter it is named by."""
    value = re.sub(r"\\(?:text|mathrm|textbf)\{\s*([^{}]*?)\s*\}", r"\1", value)
    value = re.sub(r"\\[,!;: ]|\\left|\\right|\\%|\\\$|[$%~]|\^\\circ|\\[()\[\]]", "", value)
    value = re.sub(r"\\[dt]frac", r"\\frac", value).strip().rstrip(".").strip()
    value = re.sub(r"^[A-Za-z]\s*=\s*", "", value)
    value = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", value)
    if found := re.fullmatch(r"([-+]?\d[\d./]*)\s*[A-Za-z][A-Za-z .]*", value):  # a unit
        value = found[1].rstrip(".")
    value = re.sub(r"\s+", "", value).lower()
    return value.strip("()") if len(value) == 3 else value  # the choice (B)


def _number(value: str) -> Fraction | None:
    if found := _NUMBER.fullmatch(value):
        size = Fraction(int(found[2] + (found[3] or "")), 10 ** len(found[3] or ""))
    elif found := _RATIO.fullmatch(value):
        top, bottom = next(
            pair for pair in (found.group(2, 3), found.group(4, 5), found.group(6, 7)) if pair[0]
        )
        if not int(bottom):
            return None
        size = Fraction(int(top), int(bottom))
    else:
        return None
    return -size if found[1] == "-" else size
