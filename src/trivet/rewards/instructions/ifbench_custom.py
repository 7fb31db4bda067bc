"""IFBench's kinds that belong to one prompt each, written from the prompts."""

from __future__ import annotations

import csv
import re
import unicodedata
from datetime import date
from itertools import pairwise

from trivet.rewards.format import unfenced
from trivet.rewards.instructions.base import kind
from trivet.rewards.instructions.split import lines, listed, sentences, terms

_QUOTED = re.compile(r'"([^"\n]*)"')
_QUESTION = re.compile(r"^[^\S\n]*[*#_]{0,4}[^\S\n]?Question\b", re.MULTILINE)
_OPTION = re.compile(r"^[^\S\n]*[*_(]{0,3}[A-Za-z1-9][).:]", re.MULTILINE)
_ITEM = re.compile(r"^(?:[*\u2022+-]|\d{1,3}[.)])\s+")

# By latitude, from the highest; all above 45 degrees north.
_CAPITALS = listed(
    """
    reykjavik helsinki oslo tallinn stockholm riga moscow copenhagen vilnius minsk dublin berlin
    amsterdam warsaw london brussels kyiv prague luxembourg paris vienna bratislava budapest vaduz
    chisinau bern ljubljana zagreb
    """
)
_SAME = {"kiev": "kyiv", "luxembourg city": "luxembourg", "berne": "bern"}
_AFRICA = frozenset(
    listed(
        """
    algeria, angola, benin, botswana, burkina faso, burundi, cabo verde, cameroon, central african
    republic, chad, comoros, democratic republic of the congo, republic of the congo, djibouti, egypt,
    equatorial guinea, eritrea, eswatini, ethiopia, gabon, gambia, ghana, guinea, guinea-bissau, ivory
    coast, kenya, lesotho, liberia, libya, madagascar, malawi, mali, mauritania, mauritius, morocco,
    mozambique, namibia, niger, nigeria, rwanda, sao tome and principe, senegal, seychelles, sierra
    leone, somalia, south africa, south sudan, sudan, tanzania, togo, tunisia, uganda, zambia, zimbabwe,
    cape verde, congo, congo (congo-brazzaville), democratic republic of congo, dr congo, cote d'ivoire,
    swaziland, the gambia, congo (democratic republic of the), congo (republic of the), western sahara
    """
    )
)


def _plain(text: str) -> str:
    """Small letters without accents."""
    decomposed = unicodedata.normalize("NFKD", text.replace("\u2019", "'"))
    return "".join(char for char in decomposed if not unicodedata.combining(char)).strip().lower()


def _table(text: str, delimiter: str, header: list[str], rows: int) -> bool:
    """A header and so many rows, each with the header's number of fields."""
    if len(text) > 100_000:
        return False
    try:
        found = [row for row in csv.reader(unfenced(text).splitlines(), delimiter=delimiter) if row]
    except csv.Error:  # a field over the module's limit, a NUL
        return False
    return (
        len(found) == rows + 1
        and [field.strip().strip('"') for field in found[0]] == header
        and all(len(row) == len(header) for row in found)
    )


@kind("custom:csv_city")
def csv_city(text: str) -> bool:
    """Seven rows with commas under ID, Country, City, Year, Count."""
    return _table(text, ",", ["ID", "Country", "City", "Year", "Count"], 7)


@kind("custom:csv_special_character")
def csv_special_character(text: str) -> bool:
    """Fourteen rows with commas, one field with a special character in double quotes."""
    header = ["ProductID", "Category", "Brand", "Price", "Stock"]
    special = any(
        any(not char.isalnum() and not char.isspace() for char in field) for field in _QUOTED.findall(text)
    )
    return _table(text, ",", header, 14) and special


@kind("custom:csv_quotes")
def csv_quotes(text: str) -> bool:
    """Three rows with tabs, every field in double quotes."""
    header = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    fields = [
        field.strip() for row in unfenced(text).splitlines() if row.strip() for field in row.split("\t")
    ]
    quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)
    return quoted and _table(text, "\t", header, 3)


@kind("custom:date_format_list")
def date_list(text: str) -> bool:
    """Dates YYYY-MM-DD with commas between them, nothing else."""
    try:
        found = [date.fromisoformat(one.strip()) for one in text.strip().rstrip(".").split(",")]
    except ValueError:
        return False
    return len(found) > 1 and all(len(one.strip()) == 10 for one in text.strip().rstrip(".").split(","))


@kind("custom:european_capitals_sort")
def capitals(text: str) -> bool:
    """Europe's capitals above 45 degrees north by latitude, with commas between them."""
    if len(text) > 2_000:
        return False
    found = [_plain(one) for one in text.strip().rstrip(".").split(",")]
    return [_SAME.get(one, one) for one in found] == list(_CAPITALS)


@kind("custom:mcq_count_length")
def multiple_choice(text: str) -> bool:
    """Four questions marked "Question", each longer than the one before, with five options; nothing first."""
    places = [match.start() for match in _QUESTION.finditer(text)]
    if len(places) != 4 or text[: places[0]].strip():
        return False
    lengths = []
    for begin, end in pairwise([*places, len(text)]):
        block = text[begin:end]
        options = [match.start() for match in _OPTION.finditer(block)]
        if len(options) != 5:
            return False
        lengths.append(len(block[: options[0]].strip()))
    return all(a < b for a, b in pairwise(lengths))


@kind("custom:multiples")
def multiples(text: str) -> bool:
    """The multiples of 7 from 10 to 50, in order, and no other number."""
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


@kind("custom:reverse_newline")
def reverse_newline(text: str) -> bool:
    """At least 50 countries of Africa, one a line, from Z to A, nothing else."""
    if len(text) > 10_000:
        return False
    found = [_plain(_ITEM.sub("", line)) for line in lines(text)]
    return len(found) >= 50 and set(found) <= _AFRICA and all(a > b for a, b in pairwise(found))


@kind("custom:sentence_alphabet")
def sentence_alphabet(text: str) -> bool:
    """26 sentences whose first letters are a to z."""
    found = [terms(sentence) for sentence in sentences(text)]
    return [one[0][0].lower() for one in found if one] == list("abcdefghijklmnopqrstuvwxyz")


@kind("custom:word_reverse")
def word_reverse(text: str) -> bool:
    """A sentence about the bald eagle with its words from the last to the first."""
    found = " ".join(word.lower() for word in terms(text))
    return "eagle bald" in found and "bald eagle" not in found


@kind("custom:character_reverse")
def character_reverse(text: str) -> bool:
    """A sentence about the bald eagle with its letters from the last to the first."""
    folded = text.lower()
    return "elgae dlab" in folded and "bald eagle" not in folded
