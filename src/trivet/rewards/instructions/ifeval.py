"""The 25 kinds of IFEval (Zhou et al. 2023, Instruction-Following Evaluation for Large Language Models).

Written from the data set's prompts and its paper. Words and phrases are taken literally, not as patterns.
"""

from __future__ import annotations

import re

from trivet.rewards.format import is_json
from trivet.rewards.instructions.base import RELATIONS, kind
from trivet.rewards.instructions.language import is_language
from trivet.rewards.instructions.split import count_word, sentences, terms, words

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_BULLET = re.compile(r"^[^\S\n]*(?:\*(?!\*)|-)", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_DIVIDER = re.compile(r"\*\*\*")
_POSTSCRIPT = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}


# -- case ----------------------------------------------------------------------------------------


@kind("change_case:capital_word_frequency", capital_frequency="count", capital_relation="relation")
def capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Words all of whose letters are capitals ("I" and "A" among them)."""
    count = sum(word.isupper() for word in terms(text))
    return RELATIONS[capital_relation](count, capital_frequency)


@kind("change_case:english_capital")
def english_capital(text: str) -> bool:
    return text.isupper() and is_language(text, "en")


@kind("change_case:english_lowercase")
def english_lowercase(text: str) -> bool:
    return text.islower() and is_language(text, "en")


# -- combination ---------------------------------------------------------------------------------


@kind("combination:repeat_prompt", prompt_to_repeat="text")
def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@kind("combination:two_responses")
def two_responses(text: str) -> bool:
    """Two different texts with ****** between them (and, if at all, before the first and after the last)."""
    pieces = [piece.strip() for piece in text.split("******")]
    if "" in pieces[1:-1]:
        return False
    given = [piece for piece in pieces if piece]
    return len(given) == 2 and given[0] != given[1]


# -- content and form ----------------------------------------------------------------------------


@kind("detectable_content:number_placeholders", num_placeholders="count")
def placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many [...] that begin and end on one line."""
    count = 0
    for line in text.split("\n"):
        place = 0
        while (begin := line.find("[", place)) >= 0 and (end := line.find("]", begin)) >= 0:
            count, place = count + 1, end + 1
    return count >= num_placeholders


@kind("detectable_content:postscript", postscript_marker="text")
def postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    known = _POSTSCRIPT.get(marker)
    return known.search(text.lower()) is not None if known else marker.lower() in text.lower()


@kind("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    """Exactly one of "My answer is yes.", "My answer is no.", "My answer is maybe."."""
    return sum(answer in text for answer in _ANSWERS) == 1


@kind("detectable_format:json_format")
def json_format(text: str) -> bool:
    return is_json(text)


@kind("detectable_format:multiple_sections", section_spliter="text", num_sections="count")
def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many marks "Section 1", "Section 2" ..., in the marker's own case."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", text)) >= num_sections


@kind("detectable_format:number_bullet_lists", num_bullets="count")
def bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that begin with * or -."""
    return len(_BULLET.findall(text)) == num_bullets


@kind("detectable_format:number_highlighted_sections", num_highlights="count")
def highlights(text: str, *, num_highlights: int) -> bool:
    """At least so many *...* or **...** on one line."""
    found = _HIGHLIGHT.findall(text)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


@kind("detectable_format:title")
def title(text: str) -> bool:
    """Something inside <<...>> on one line."""
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return True
    return False


# -- keywords ------------------------------------------------------------------------------------


@kind("keywords:existence", keywords="texts")
def keywords(text: str, *, keywords: list[str]) -> bool:
    """Each occurs, also inside of a longer word ("experiences" holds "experience")."""
    folded = text.lower()
    return all(word.strip().lower() in folded for word in keywords)


@kind("keywords:forbidden_words", forbidden_words="texts")
def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """None stands in the text by itself."""
    return not any(count_word(text, word.strip()) for word in forbidden_words)


@kind("keywords:frequency", keyword="text", frequency="count", relation="relation")
def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return RELATIONS[relation](text.lower().count(keyword.strip().lower()), frequency)


@kind("keywords:letter_frequency", letter="letter", let_frequency="count", let_relation="relation")
def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter (or sign), whatever its case."""
    return RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency)


@kind("language:response_language", language="language")
def response_language(text: str, *, language: str) -> bool:
    return is_language(text, language)


# -- length --------------------------------------------------------------------------------------


@kind(
    "length_constraints:nth_paragraph_first_word",
    num_paragraphs="count",
    nth_paragraph="ordinal",
    first_word="text",
)
def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs with an empty line between them, and the first word of one of them."""
    blocks = [block.strip() for block in text.split("\n\n") if block.strip()]
    if len(blocks) != num_paragraphs or nth_paragraph > len(blocks):
        return False
    word = blocks[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("\"'\u201c\u2018*_").lower()
    return re.split(r"[.,?!'\":;*_\u201d\u2019]", word, maxsplit=1)[0] == first_word.strip().lower()


@kind("length_constraints:number_paragraphs", num_paragraphs="count")
def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """So many paragraphs with *** between them."""
    pieces = [piece.strip() for piece in _DIVIDER.split(text)]
    return "" not in pieces[1:-1] and sum(bool(piece) for piece in pieces) == num_paragraphs


@kind("length_constraints:number_sentences", num_sentences="count", relation="relation")
def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return RELATIONS[relation](len(sentences(text)), num_sentences)


@kind("length_constraints:number_words", num_words="count", relation="relation")
def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """Runs of letters and digits."""
    return RELATIONS[relation](len(words(text)), num_words)


# -- the rest ------------------------------------------------------------------------------------


@kind("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return "," not in text


@kind("startend:end_checker", end_phrase="text")
def end_phrase(text: str, *, end_phrase: str) -> bool:
    """The phrase ends the text, whatever its case, but for quotation marks around it all."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


@kind("startend:quotation")
def quotation(text: str) -> bool:
    """Double quotation marks around all of it."""
    bare = text.strip()
    return len(bare) > 2 and bare[0] == '"' and bare[-1] == '"'
