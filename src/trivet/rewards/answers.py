"""Reading a final answer out of text, and deciding what can be decided without algebra.

Everything here is exact, pure and takes microseconds; what it leaves undecided goes to a computer algebra
system in a killable process (`rewards.math`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Fallback = Literal["none", "phrase", "number"]

_BOX = re.compile(r"(?P<box>\\(?:boxed|fbox)\b\s*)")
_INSIDE = re.compile(r"(?P<box>\\+(?:boxed|fbox)\b\s*)|\\.|[{}]", re.DOTALL)
_TOKEN = re.compile(r"[^\s$\\{}]")
_PHRASE = re.compile(r"(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*(.+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:\s*/\s*\d+)?")


# -- extraction ----------------------------------------------------------------------------------


def _closing(text: str, opening: int) -> int:
    """Index of the brace that closes the one at `opening`, or -1. Escaped braces are text."""
    depth, i = 0, opening
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return i
        i += 1
    return -1


def balanced(text: str) -> bool:
    """Every brace that opens is closed again; escaped braces are text."""
    wrapped = "{" + text + "}"
    return _closing(wrapped, 0) == len(wrapped) - 1


def last_boxed(text: str) -> str | None:
    """What the last complete `\\boxed{...}` holds (of nested ones the innermost), None without one.

    One pass, however deep boxes are nested: a policy may write anything. A box that is cut off does not
    count, nor does what follows it.
    """
    found: str | None = None
    opened: list[int] = []  # of every open brace: where the box it opens begins, -1 for another brace
    inner: list[str | None] = []  # of every open brace: the last box that ended inside
    place = 0
    while match := (_INSIDE if opened else _BOX).search(text, place):
        place = match.end()
        ended: str | None = None
        if match["box"]:
            if text[place : place + 1] == "{":
                place += 1
                opened.append(place)
                inner.append(None)
            elif token := _TOKEN.match(text, place):  # \boxed 5 holds one token, as in TeX
                ended = token.group()
        elif match.group() == "{":
            opened.append(-1)
            inner.append(None)
        elif match.group() == "}":
            start, ended = opened.pop(), inner.pop()
            if start >= 0 and ended is None:
                ended = text[start : match.start()]
        if ended is None:
            continue
        if opened:
            inner[-1] = ended
        else:
            found = ended
    return found


def extract(text: str, fallback: Fallback = "none") -> str | None:
    """The final answer in `text`: the last box, else (if asked for) what follows the last "answer is", or the
    last number. None when there is none."""
    boxed = last_boxed(text)
    if boxed is not None or fallback == "none":
        return boxed
    phrases = _PHRASE.findall(text)
    if phrases:
        return phrases[-1].strip().rstrip(".")
    if fallback != "number":
        return None
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1].rstrip(",.") if numbers else None


# -- normal form ---------------------------------------------------------------------------------

_REPLACE = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u221e": r"\infty ",
    "\u03c0": r"\pi ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2205": r"\emptyset ",
    "\u00b0": r"^\circ ",
    "{,}": ",",
    "{:}": ":",
    "{.}": ".",
    r"\$": "",
    "$": "",
    r"\%": "%",
    r"\left": "",
    r"\right": "",
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\varnothing": r"\emptyset ",
    r"\displaystyle": "",
}
_REPLACED = re.compile(
    "|".join(
        re.escape(key) + (r"(?![A-Za-z])" if key[-1].isalpha() and key[0] == "\\" else "")
        for key in sorted(_REPLACE, key=len, reverse=True)
    )
)
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|\\(?:thin|med|thick)space\b|~|[\u00a0\u2009\u200a\u202f]")
_NEGATIVE_SPACE = re.compile(r"(?<=\d,)\\!\s*(?=\d)")
_THIN_DIGITS = re.compile(r"(?<=\d)(?:\\[,!;:]|[\u2009\u202f])(?=\d{3}(?!\d))")
_RELATION = {r"\leq": r"\le", r"\geq": r"\ge", r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\neq": r"\ne"}
_RELATIONS = re.compile(r"\\(?:leqslant|geqslant|leq|geq|neq)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textrm|textit|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree\b")
_MONEY = re.compile(r"(?<=\d)\s*(?:dollars?|USD)$")
_OUTER = re.compile(r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", re.DOTALL)


def normalise(answer: str) -> str:
    """Spacing, delimiters, thousands separators, fonts and signs in one form; meaning is not touched."""
    text = answer.strip()
    if outer := _OUTER.match(text):
        text = outer.group(1) or outer.group(2) or ""
    text = _NEGATIVE_SPACE.sub("", text)  # 11,\! 111
    text = _THIN_DIGITS.sub("", text)  # 2\,000
    text = _REPLACED.sub(lambda match: _REPLACE[match.group()], text)
    text = _RELATIONS.sub(lambda match: _RELATION[match.group()], text)
    text = _TEXT.sub(r"\1", text)
    text = _DEGREES.sub("", text)
    text = _MONEY.sub("", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\s+", " ", text).strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def squeeze(text: str) -> str:
    """For comparing normal forms letter by letter: no blanks; plain words without regard to case."""
    bare = text.replace(" ", "")
    return bare.casefold() if len(bare) > 1 and bare.isalpha() else bare


# -- numbers -------------------------------------------------------------------------------------

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"([-+]?)\s*((?:{_INTEGER})(?:\.\d*)?|\.\d+)")
_SCIENTIFIC = re.compile(
    rf"([-+]?\s*(?:{_INTEGER}(?:\.\d*)?|\.\d+))"
    r"(?:[eE]([-+]?\d{1,4})|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\s*\d{1,4})\s*\}|(\d)(?!\d)|(\d{1,4})$))"
)
_RATIO = re.compile(r"([-+]?)\s*(?:(\d+)\s*/\s*(\d+)|\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\})")
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_DIGITS = 400


def decimal(text: str) -> Fraction | None:
    """An integer or decimal, thousands separators allowed, exactly; None for anything else."""
    match = _DECIMAL.fullmatch(text)
    if match is None or len(text) > _DIGITS:
        return None
    value = Fraction(match.group(2).replace(",", "").rstrip(".") or "0")
    return -value if match.group(1) == "-" else value


def number(text: str) -> Fraction | None:
    """`decimal`, or scientific notation, a ratio of integers, a mixed number; exactly."""
    if len(text) > _DIGITS:
        return None
    plain = decimal(text)
    if plain is not None:
        return plain
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa = decimal(match.group(1).strip())
        exponent = next(part for part in match.groups()[1:] if part is not None)
        return None if mantissa is None else mantissa * Fraction(10) ** int(exponent.replace(" ", ""))
    if match := _RATIO.fullmatch(text):
        sign, a, b, c, d = match.groups()
        above, below = int(a or c), int(b or d)
        if below == 0:
            return None
        return Fraction(above, below) * (-1 if sign == "-" else 1)
    if match := _MIXED.fullmatch(text):
        sign, whole, above, below = match.groups()
        if int(below) == 0:
            return None
        return (int(whole) + Fraction(int(above), int(below))) * (-1 if sign == "-" else 1)
    return None


# -- sets and intervals --------------------------------------------------------------------------

_EMPTY = re.compile(
    r"\\emptyset|\\?\{\s*\\?\}|(?:there\s+(?:is|are)\s+)?no\s+(?:real\s+)?(?:solutions?|roots?)|the\s+empty\s+set",
    re.IGNORECASE,
)
_INTERVAL = re.compile(r"[\[(].+,.+[\])]", re.DOTALL)
_OPERATORS = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\lt(?![A-Za-z])|\\gt(?![A-Za-z])|<=|>=|<|>")
_CANONICAL = {r"\le": "<=", r"\ge": ">=", r"\lt": "<", r"\gt": ">"}
_VARIABLE = re.compile(r"[A-Za-z]|\\[a-z]+")


def empty_set(text: str) -> bool:
    """One of the ways to say that nothing satisfies it."""
    return _EMPTY.fullmatch(text.strip()) is not None


def is_interval(text: str) -> bool:
    """Looks like (a, b), [a, b), or a union of such."""
    return all(_INTERVAL.fullmatch(part.strip()) for part in re.split(r"\\cup(?![A-Za-z])", text))


def as_interval(text: str) -> str | None:
    """An inequality in one variable (x >= 0, 1 < x <= 3, 2 > x) as an interval; None for anything else."""
    sides = [side.strip() for side in map(str, _OPERATORS.split(text))]
    operators = [_CANONICAL.get(op, op) for op in map(str, _OPERATORS.findall(text))]
    if not 1 <= len(operators) <= 2 or not all(sides):
        return None
    low, high, low_closed, high_closed = r"-\infty", r"\infty", False, False
    constants = (r"\pi", r"\infty")
    places = [i for i, side in enumerate(sides) if _VARIABLE.fullmatch(side) and side not in constants]
    if len(places) != 1 or (len(operators) == 2 and places != [1]):
        return None
    place = places[0]
    for i, operator in enumerate(operators):
        bound = sides[i if i != place else i + 1]
        # Seen from the variable: is the bound above it?
        above = (operator[0] == "<") == (i >= place)
        closed = operator.endswith("=")
        if above:
            high, high_closed = bound, closed
        else:
            low, low_closed = bound, closed
    if len(operators) == 2 and (low == r"-\infty" or high == r"\infty"):
        return None  # 1 < x > 3
    return f"{'[' if low_closed else '('}{low},{high}{']' if high_closed else ')'}"


# -- verdicts without algebra --------------------------------------------------------------------

_WORDS = re.compile(r"\\|\d|\b(?:pi|e|i|inf|infinity|oo|zero|one|two|three|half)\b", re.IGNORECASE)
_ASSIGNED = re.compile(r"[^=<>]*(?<![<>!:])=(?!=)\s*([^=<>]+)")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_BASE = re.compile(r"_\s*\{?\s*(\d+)\s*\}?$")


def value_of(text: str) -> str:
    """What follows the last equals sign (x = 3 says 3); the text itself without one."""
    match = _ASSIGNED.fullmatch(text)
    while match:
        text = match.group(1).strip()
        match = _ASSIGNED.fullmatch(text)
    return text


def _percent(gold: str, answer: str) -> bool | None:
    """p% is p/100. Only a gold that says percent also takes the bare p (and p/100) for it."""
    marked = gold.endswith("%"), answer.endswith("%")
    if not any(marked):
        return None
    left, right = number(gold.rstrip("% ")), number(value_of(answer).rstrip("% "))
    if left is None or right is None:
        return False if marked == (False, True) else None
    if marked == (False, True):
        return left == right / 100
    return left == right or (not marked[1] and left == right * 100)


def _numbers(gold: str, answer: str) -> bool | None:
    """Decides where the gold is a plain number, as far as that can be exact."""
    left = number(gold)
    if left is None:
        return None
    text = value_of(answer)
    right = number(text)
    if right is None:
        if not _WORDS.search(text) or unevaluated(text):
            return False
        return None
    if left == right:
        return True
    # A decimal close to a ratio is for the algebra's rounding to judge; all else is exact.
    ratios = "/" in gold or "frac" in gold, "/" in text or "frac" in text
    return None if ratios[0] != ratios[1] else False


def quick(gold: str, answer: str) -> bool | None:
    """The verdict on two normal forms, None where algebra has to decide."""
    if squeeze(gold) == squeeze(answer):
        return bool(answer)
    if not answer:
        return False
    if empty_set(gold) or empty_set(answer):
        return empty_set(gold) and empty_set(answer)
    verdict = _percent(gold, answer)
    if verdict is None:
        verdict = _numbers(gold, answer)
    if verdict is None and _CLOCK.fullmatch(gold):
        return False
    bases = _BASE.search(gold), _BASE.search(answer)
    if verdict is None and bases[0] and bases[1] and bases[0].group(1) != bases[1].group(1):
        return False  # 21_7 and 21_8: the algebra drops the base
    return verdict


def align(gold: str, answer: str) -> tuple[str, str]:
    """Interval and inequality in one notation; other pairs as they are."""
    if is_interval(gold) and (interval := as_interval(answer)):
        return gold, interval
    if is_interval(answer) and (interval := as_interval(gold)):
        return interval, answer
    return gold, answer


# -- what is refused before algebra --------------------------------------------------------------

_BIG_POWER = re.compile(r"(?:\^|\*\*)\s*(?:\{([^{}]*)\}|\(([^()]*)\)|([-+]?\d+)|(\{|\())")
_TOWER = re.compile(r"(?:\^|\*\*)\s*\w+\s*(?:\^|\*\*)")
_FACTORIAL = re.compile(r"(\d*)\s*([)}\]])?\s*!")
_BINOMIAL = re.compile(r"binom|\bC\s*\(")
_LONG_NUMBER = re.compile(r"\d{6,}")
_SUM = re.compile(r"\\(?:sum|prod|int|iint|lim)(?![A-Za-z])")


def too_large(text: str, limit: int = 512) -> bool:
    """Evaluating it could take for ever: over `limit` letters, towers of powers, exponents of more than six
    digits, factorials of anything but a number up to 9999, huge binomials, sums and integrals."""
    if len(text) > limit or _SUM.search(text):
        return True
    if _TOWER.search(text):
        return True
    for braces, parens, plain, opening in _BIG_POWER.findall(text):
        exponent = braces or parens or plain
        if opening or "^" in exponent or "!" in exponent or "**" in exponent:
            return True
        if re.search(r"\d{7,}|[eE]\d", exponent.replace(",", "")):
            return True
    for digits, bracket in _FACTORIAL.findall(text):
        if bracket or not digits or len(digits) > 4:
            return True
    return bool(_BINOMIAL.search(text) and (_LONG_NUMBER.search(text) or "^" in text))


_TERM = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_UNEVALUATED = re.compile(rf"[-+(\s]*{_TERM}[)\s]*(?:(?:[-+*]|\\times|\\cdot)[-+(\s]*{_TERM}[)\s]*)+")


def unevaluated(text: str) -> bool:
    """A sum, difference or product of plain numbers (12+35): the question again, not an answer to it."""
    return _UNEVALUATED.fullmatch(text) is not None
