"""IFBench's kinds about counts, words and sentences (Pyatkin et al. 2025, Generalizing Verifiable Instruction
Following), written from its prompts. Words are `split.terms` unless a kind says otherwise."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from trivet.rewards.instructions.base import kind
from trivet.rewards.instructions.split import count_word, lines, listed, sentences, terms, words

_CONJUNCTIONS = frozenset({"for", "and", "nor", "but", "or", "yet", "so"})
_PRONOUNS = frozenset(
    listed(
        """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself
    she her hers herself it its itself they them their theirs themselves this that these those who whom
    whose which what someone somebody something anyone anybody anything everyone everybody everything
    nobody nothing none each either neither both few many several all any some one ones another other
    others whoever whatever
    """
    )
)
_NUMBER = re.compile(r"(?<![\w.,])\d++(?:[.,]\d++)*+(?!\w)")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")
_NAMES = re.compile(r"list of person names:([^.]*)", re.IGNORECASE)
_VOWELS = frozenset("aeiou")
_SYLLABLE = re.compile(r"[aeiouy]+")
_LONGEST = 60  # letters of a word: what is longer is none


# -- counts --------------------------------------------------------------------------------------


@kind("count:conjunctions", small_n="count")
def conjunctions(text: str, *, small_n: int) -> bool:
    """At least so many different ones of for, and, nor, but, or, yet, so."""
    return len(_CONJUNCTIONS & {word.lower() for word in words(text)}) >= small_n


@kind(
    "count:keywords_multiple",
    keyword1="text",
    keyword2="text",
    keyword3="text",
    keyword4="text",
    keyword5="text",
)
def keywords_multiple(text: str, **keywords: str) -> bool:
    """The five keywords exactly 1, 2, 3, 5 and 7 times."""
    times = dict(
        zip(("keyword1", "keyword2", "keyword3", "keyword4", "keyword5"), (1, 2, 3, 5, 7), strict=True)
    )
    return all(count_word(text, keywords[name].strip()) == count for name, count in times.items())


@kind("count:numbers", N="count")
def numbers(text: str, *, N: int) -> bool:
    """Exactly so many numerals; 1,250.5 is one."""
    return len(_NUMBER.findall(text)) == N


@kind("count:person_names", N="count", prompt="prompt")
def person_names(text: str, *, N: int, prompt: str) -> bool:
    """At least so many different ones of the prompt's list of names; without a list nothing holds."""
    found = _NAMES.search(prompt)
    names = {name.strip() for name in found.group(1).split(",")} - {""} if found else set()
    return bool(names) and len(names & set(words(text))) >= N


@kind("count:pronouns", N="count")
def pronouns(text: str, *, N: int) -> bool:
    return sum(word.lower() in _PRONOUNS for word in words(text)) >= N


@kind("count:punctuation")
def punctuation(text: str) -> bool:
    """Each of . , ; : ? ! and an interrobang (?!, !?, or the sign)."""
    interrobangs = ("?!", "!?", "\u203d")
    return all(mark in text for mark in ".,;:?!") and any(mark in text for mark in interrobangs)


@kind("count:unique_word_count", N="count")
def unique_words(text: str, *, N: int) -> bool:
    return len({word.lower() for word in words(text)}) >= N


@kind("count:word_count_range", min_words="count", max_words="count")
def word_count_range(text: str, *, min_words: int, max_words: int) -> bool:
    """Runs of letters and digits, as IFEval counts them."""
    return min_words <= len(words(text)) <= max_words


@kind("count:words_japanese", N="ordinal")
def words_japanese(text: str, *, N: int) -> bool:
    """Every Nth of what stands between blanks has a Japanese letter."""
    nth = text.split()[N - 1 :: N]
    return bool(nth) and all(_JAPANESE.search(word) for word in nth)


# -- words ---------------------------------------------------------------------------------------


def _initials(text: str) -> list[str]:
    return [word[0].lower() for word in terms(text)]


@kind("words:alphabet")
def alphabet(text: str) -> bool:
    """Each word begins with the letter after the one before, z before a."""
    letters = [ord(letter) - ord("a") for letter in _initials(text)]
    return all(0 <= one < 26 for one in letters) and all((a + 1) % 26 == b for a, b in pairwise(letters))


@kind("words:consonants")
def consonant_clusters(text: str) -> bool:
    """Each word has two consonants in a row."""

    def cluster(word: str) -> bool:
        marks = [char.isalpha() and char not in _VOWELS for char in word.lower()]
        return any(a and b for a, b in pairwise(marks))

    return all(cluster(word) for word in terms(text))


@kind("words:keywords_specific_position", keyword="text", n="ordinal", m="ordinal")
def keyword_position(text: str, *, keyword: str, n: int, m: int) -> bool:
    """The nth sentence's mth word."""
    found = sentences(text)
    inside = terms(found[n - 1]) if n <= len(found) else []
    return m <= len(inside) and inside[m - 1].lower() == keyword.strip().lower()


@kind("words:last_first")
def last_first(text: str) -> bool:
    """Each sentence begins with the word the one before ended with; at least two sentences."""
    found = [[word.lower() for word in terms(sentence)] for sentence in sentences(text)]
    return len(found) > 1 and all(a and b and a[-1] == b[0] for a, b in pairwise(found))


@kind("words:no_consecutive")
def no_consecutive(text: str) -> bool:
    """No two words in a row begin with the same letter."""
    return all(a != b for a, b in pairwise(_initials(text)))


def syllables(word: str) -> int:
    """An estimate for English: groups of vowels, without a silent e at the end; at least 1."""
    lower = word.lower()
    count = len(_SYLLABLE.findall(lower))
    if lower.endswith("e") and not lower.endswith(("le", "ee", "ie", "oe", "ye")) and count > 1:
        count -= 1
    return max(count, 1)


@kind("words:odd_even_syllables")
def odd_even_syllables(text: str) -> bool:
    """Words with odd and even numbers of syllables take turns. Syllables are estimated, see `syllables`."""
    return all((syllables(a) + syllables(b)) % 2 for a, b in pairwise(terms(text)))


@kind("words:palindrome")
def palindromes(text: str) -> bool:
    """At least ten different palindromes of five letters or more."""
    found = {word.lower() for word in words(text) if 5 <= len(word) <= _LONGEST}
    return sum(word == word[::-1] and word.isalpha() for word in found) >= 10


@kind("words:paragraph_last_first")
def paragraph_last_first(text: str) -> bool:
    """Each line ends with the word it began with."""
    inside = [[word.lower() for word in terms(line)] for line in lines(text)]
    return all(one and one[0] == one[-1] for one in inside)


@kind("words:prime_lengths")
def prime_lengths(text: str) -> bool:
    """Each word's number of letters is prime."""
    lengths = {len(word) for word in terms(text)}
    return all(1 < n <= _LONGEST and all(n % d for d in range(2, n)) for n in lengths)


@kind("words:repeats", small_n="count")
def repeats(text: str, *, small_n: int) -> bool:
    """No word more than so many times, whatever its case."""
    counts = Counter(word.lower() for word in terms(text))
    return max(counts.values(), default=0) <= small_n


@kind("words:vowel")
def vowels(text: str) -> bool:
    """At most three of the vowels a, e, i, o, u."""
    return len(_VOWELS & set(text.lower())) <= 3


@kind("words:words_position", keyword="text")
def words_position(text: str, *, keyword: str) -> bool:
    """The second word and the last but one."""
    found = [word.lower() for word in terms(text)]
    return len(found) > 2 and found[1] == found[-2] == keyword.strip().lower()


# -- sentences -----------------------------------------------------------------------------------


def _alliteration(sentence: str) -> int:
    """The longest run of words with one first letter."""
    best = run = 0
    before = ""
    for letter in _initials(sentence):
        run = run + 1 if letter == before else 1
        best, before = max(best, run), letter
    return best


@kind("sentence:alliteration_increment")
def alliteration_increment(text: str) -> bool:
    """Each sentence's longest run of words with one first letter is longer than the one before's."""
    runs = [_alliteration(sentence) for sentence in sentences(text)]
    return len(runs) > 1 and all(a < b for a, b in pairwise(runs))


@kind("sentence:increment", small_n="count")
def increment(text: str, *, small_n: int) -> bool:
    """Each sentence has so many words more than the one before; at least two sentences."""
    lengths = [len(terms(sentence)) for sentence in sentences(text)]
    return len(lengths) > 1 and all(b - a == small_n for a, b in pairwise(lengths))


@kind("sentence:keyword", N="ordinal", word="text")
def sentence_keyword(text: str, *, N: int, word: str) -> bool:
    """The Nth sentence has the word."""
    found = sentences(text)
    return len(found) >= N and count_word(found[N - 1], word.strip()) > 0
