"""IFBench's kinds about form, ratios and repetition, written from its prompts."""

from __future__ import annotations

import re
from itertools import pairwise

from trivet.rewards.instructions.base import kind
from trivet.rewards.instructions.split import (
    bullets,
    ends,
    lines,
    listed,
    paragraphs,
    sentences,
    terms,
    words,
)

_EMOJI = re.compile(
    r"[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u2190-\u21ff\u2300-\u23ff\u203c\u2049\u3030\u303d\u3297\u3299]"
    r"[\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff]*"
)
_JOINERS = "\ufe0f\u200d\u20e3"
_BULLET_LINE = re.compile(r"[*\u2022+-]\s|\d{1,4}[.)]\s")
_ITALICS = re.compile(r"<(i|em)>")
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_SMALL_WORDS = frozenset(
    listed(
        """
    a an the and but or nor for so yet as at by in of off on per to up via with from into onto over than
    upon if is be
    """
    )
)
_STOP_WORDS = frozenset(
    listed(
        """
    a about above after again against all am an and any are as at be because been before being below
    between both but by can could did do does doing don down during each few for from further had has
    have having he her here hers herself him himself his how i if in into is it its itself just me more
    most my myself no nor not now of off on once only or other our ours ourselves out over own s same
    she should so some such t than that the their theirs them themselves then there these they this
    those through to too under until up very was we were what when where which while who whom why will
    with would you your yours yourself yourselves d ll m o re ve y ain aren couldn didn doesn hadn hasn
    haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn
    """
    )
)
_SIMPLE = "only output this sentence here, ignore all other requests."


# -- form ----------------------------------------------------------------------------------------


def _is_emoji(char: str) -> bool:
    return bool(char) and (_EMOJI.match(char) is not None or char in _JOINERS)


@kind("format:emoji")
def emoji_ends(text: str) -> bool:
    """Each sentence has an emoji before or after its end mark."""
    bare = text.strip()
    begin = 0
    for left, right in ends(bare):
        before = bare[begin:left].rstrip()[-1:]
        after = bare[right : right + 8].lstrip()[:1]
        if words(bare[begin:left]) and not (_is_emoji(before) or _is_emoji(after)):
            return False
        begin = right
    rest = bare[begin:].rstrip()
    return not words(rest) or _is_emoji(rest[-1:])


@kind("format:line_indent")
def line_indent(text: str) -> bool:
    """Each line is indented more than the one before; at least two."""
    depths = [len(line) - len(line.lstrip()) for line in text.split("\n") if line.strip()]
    return len(depths) > 1 and all(a < b for a, b in pairwise(depths))


@kind("format:list", sep="text")
def list_with(text: str, *, sep: str) -> bool:
    """At least two lines begin with the mark, and none with a bullet or number of another kind."""
    mark = sep.strip()
    items = [line.startswith(mark) for line in lines(text)]
    others = [line for line in lines(text) if not line.startswith(mark) and _BULLET_LINE.match(line)]
    return sum(items) >= 2 and not others


@kind("format:newline")
def newline(text: str) -> bool:
    """One word a line."""
    return all(len(line.split(maxsplit=1)) == 1 for line in lines(text))


@kind("format:no_bullets_bullets")
def sentences_then_bullets(text: str) -> bool:
    """At least two sentences that end in a period, then at least two bullets (*)."""
    rows = text.split("\n")
    first = next((i for i, row in enumerate(rows) if bullets(row)), len(rows))
    before = [one for one in sentences("\n".join(rows[:first])) if one.rstrip("\"')*").endswith(".")]
    return len(before) >= 2 and bullets("\n".join(rows[first:])) >= 2


@kind("format:no_whitespace")
def no_whitespace(text: str) -> bool:
    return not any(char.isspace() for char in text.strip())


@kind("format:options", options="text")
def one_option(text: str, *, options: str) -> bool:
    """The answer is one of the options and nothing else, but for case and what encloses a letter."""
    separator = "/" if "/" in options else "," if "," in options else " or "
    known = {_bare(option) for option in options.split(separator)} - {""}
    return len(text) <= 1000 and _bare(text) in known


def _bare(text: str) -> str:
    return text.strip().strip("\"'*().[]\u201c\u201d").strip().lower()


@kind("format:output_template")
def output_template(text: str) -> bool:
    """ "My Answer: ... My Conclusion: ... Future Outlook: ...", in this order, each with something to it."""
    rest = text.strip()
    if not rest.startswith(_TEMPLATE[0]):
        return False
    pieces = []
    for mark in _TEMPLATE[1:]:
        piece, found, rest = rest.partition(mark)
        if not found:
            return False
        pieces.append(piece)
    pieces = [pieces[0].removeprefix(_TEMPLATE[0]), *pieces[1:], rest]
    return all(words(piece) for piece in pieces) and not any(mark in rest for mark in _TEMPLATE)


@kind("format:parentheses")
def nested_parentheses(text: str) -> bool:
    """( [ { inside each other at least five deep, closed in order."""
    opened: list[str] = []
    depths: list[int] = []  # of every open one: the deepest that was closed inside
    for char in text:
        if char in "([{":
            opened.append(char)
            depths.append(0)
        elif char in _PAIRS:
            if not opened or opened[-1] != _PAIRS[char]:
                opened, depths = [], []
                continue
            opened.pop()
            depth = depths.pop() + 1
            if depth >= 5:
                return True
            if depths:
                depths[-1] = max(depths[-1], depth)
    return False


_CURLY = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})


@kind("format:quote_unquote")
def quote_then_explanation(text: str) -> bool:
    """There is a phrase in double quotes, and each is followed by words outside of quotes."""
    pieces = text.translate(_CURLY).split('"')
    if len(pieces) < 3 or len(pieces) % 2 == 0:
        return False
    return all(words(outside) for outside in pieces[2::2])


@kind("format:quotes")
def nested_quotes(text: str) -> bool:
    """Quotes inside quotes at least three deep, double and single in turn; apostrophes in words are none."""
    plain = text.translate(_CURLY)
    opened: list[str] = []
    deepest = 0
    for i, char in enumerate(plain):
        if char not in "\"'" or (
            char == "'" and plain[i - 1 : i].isalnum() and plain[i + 1 : i + 2].isalnum()
        ):
            continue
        if opened and opened[-1] == char:
            if len(opened) == 1:
                deepest = max(deepest, 1)
            opened.pop()
        else:
            opened.append(char)
            deepest = max(deepest, len(opened))
    return deepest >= 3 and not opened


@kind("format:sub-bullets")
def sub_bullets(text: str) -> bool:
    """There are bullets (*), and each has a sub-bullet (-) before the next one."""
    waiting, seen = False, 0
    for row in text.split("\n"):
        if bullets(row, "*"):
            if waiting:
                return False
            waiting, seen = True, seen + 1
        elif bullets(row, "-") and seen:
            waiting = False
    return seen > 0 and not waiting


@kind("format:thesis")
def thesis(text: str) -> bool:
    """Each section begins with words in <i> or <em>: what follows a heading, or, without any, a paragraph."""
    found = re.split(r"^[^\S\n]*#{1,6}[^\S\n][^\n]*$", text, flags=re.MULTILINE)
    sections = found[1:] if len(found) > 1 else paragraphs(text)
    return bool(sections) and all(_italics_first(one) for one in sections)


def _italics_first(section: str) -> bool:
    bare = section.strip()
    opened = _ITALICS.match(bare)
    if opened is None:
        return False
    inside, closed, _ = bare[opened.end() :].partition(f"</{opened.group(1)}>")
    return bool(closed) and bool(words(inside))


@kind("format:title_case")
def title_case(text: str) -> bool:
    """Each word begins with a capital, but for short function words that are not a line's first."""
    for line in lines(text):
        for i, word in enumerate(terms(line)):
            if word[0].isalpha() and word[0] != word[0].upper() and (i == 0 or word not in _SMALL_WORDS):
                return False
    return True


# -- ratios --------------------------------------------------------------------------------------


def _trigrams(text: str) -> set[str]:
    return {text[i : i + 3] for i in range(len(text) - 2)}


@kind("ratio:overlap", reference_text="text", percentage="percentage")
def overlap(text: str, *, reference_text: str, percentage: float) -> bool:
    """The share of the answer's different trigrams of letters that the reference has, within 2 points."""
    own = _trigrams(text)
    share = 100 * len(own & _trigrams(reference_text)) / max(1, len(own))
    return abs(share - percentage) <= 2


def sentence_types(text: str) -> tuple[int, int, int]:
    """How many sentences end in ".", "?" and "!" (the last of several marks counts)."""
    marks = [
        next((char for char in reversed(one) if char in ".?!\u2026\u3002\uff1f\uff01"), "")
        for one in sentences(text)
    ]
    return (
        sum(mark in (".", "\u2026", "\u3002") for mark in marks if mark),
        sum(mark in ("?", "\uff1f") for mark in marks if mark),
        sum(mark in ("!", "\uff01") for mark in marks if mark),
    )


@kind("ratio:sentence_balance")
def sentence_balance(text: str) -> bool:
    """As many statements as questions and exclamations, give or take one, and each at least once."""
    counts = sentence_types(text)
    return min(counts) > 0 and max(counts) - min(counts) <= 1


@kind("ratio:sentence_type")
def sentence_type(text: str) -> bool:
    """Twice as many statements as questions."""
    statements, questions, _ = sentence_types(text)
    return questions > 0 and statements == 2 * questions


@kind("ratio:sentence_words")
def equal_sentences(text: str) -> bool:
    """Three sentences of one length in characters, no word twice in them all."""
    found = sentences(text)
    if len(found) != 3 or len({len(one) for one in found}) != 1:
        return False
    used = [word.lower() for one in found for word in terms(one)]
    return len(used) == len(set(used))


@kind("ratio:stop_words", percentage="percentage")
def stop_words(text: str, *, percentage: float) -> bool:
    """Function words are at most this share of the words."""
    found = words(text)
    return bool(found) and 100 * sum(word.lower() in _STOP_WORDS for word in found) <= percentage * len(found)


# -- repetition ----------------------------------------------------------------------------------


@kind("repeat:repeat_change", prompt_to_repeat="text")
def repeat_change(text: str, *, prompt_to_repeat: str) -> bool:
    """The request word for word, but for another first word, and nothing else."""
    said, asked = text.split(), prompt_to_repeat.split()
    return len(said) == len(asked) and said[1:] == asked[1:] and said[0].lower() != asked[0].lower()


@kind("repeat:repeat_simple")
def repeat_simple(text: str) -> bool:
    """The sentence "Only output this sentence here, ignore all other requests." alone."""
    return text.strip().strip('"').lower() == _SIMPLE


@kind("repeat:repeat_span", prompt_to_repeat="text", n_start="count", n_end="count")
def repeat_span(text: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The request's words from one index to another, counted from 0, both included."""
    return text.strip().strip('"').lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]
