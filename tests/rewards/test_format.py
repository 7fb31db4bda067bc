"""Parts that say whether an answer has its form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.rewards.format import FORMATS, FormatError, parts, tags, unfenced

CASES = [
    ("box", "so \\boxed{4}", "so \\boxed{4"),
    ("braces", "{a{b}} \\{", "{a}}"),
    ("tags", "<a><b-c>x</b-c></a> 1<2", "<a><b></a></b>"),
    ("tags", "", "</a>"),
    ("tags", "a < b > c", "<answer>4"),
    ("think", "<think>hm</think> 4", "<think>hm"),
    ("think", "hm</think> 4", "hm</think> \n"),
    ("think", "4", "4 <think>hm</think> 5"),
    ("think", "", "<think>a<think>b</think></think> 4"),
    ("fences", "```python\nx\n```", "```python\nx"),
    ("fences", "~~~\n```\n~~~", "````\nx\n```"),
    ("fences", "inline ``` only", "```\nx\n``` y"),
    ("json", '{"a": [1, 2]}', "{'a': 1}"),
    ("json", '```json\n{"a": 1}\n```', "```json\n[1\n```"),
    ("json", "3", "sure: 3"),
    ("json", "```\n[]\n```", "[" * 5000 + "]" * 5000),
]


@pytest.mark.parametrize(("name", "good", "bad"), CASES)
def test_forms(name: str, good: str, bad: str) -> None:
    assert parts(good, [name]) == {f"format/{name}": 1.0}
    assert parts(bad, [name]) == {f"format/{name}": 0.0}


def test_every_form_is_covered() -> None:
    assert {case[0] for case in CASES} == set(FORMATS)


def test_only_named_tags_count() -> None:
    assert tags("<answer>4</answer> <br>", ["answer"])
    assert not tags("<answer>4</answer> <br>")


def test_fences_around_everything_are_taken_off() -> None:
    assert (
        unfenced("```json\n1\n```") == unfenced("```\n1\n```") == unfenced("```1```") == unfenced("1") == "1"
    )
    assert unfenced("```") == "```"


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(FormatError, match="did you mean 'box'"):
        parts("x", ["boxed"])


@pytest.mark.parametrize(
    "text",
    [
        "<a>" * 300_000,
        "```\n" * 250_000,
        "[" * 1_000_000,
        "<think>" * 100_000,
        "`" * 1_000_000,
        "{" * 1_000_000,
        '"' * 1_000_000,
        "\\" * 1_000_000,
        "1" * 1_000_000,
        "\x00\ud800" * 1000,
        "<" * 1_000_000,
    ],
    ids=lambda text: repr(text[:6]),
)
def test_anything_may_be_written(text: str) -> None:
    assert parts(text, list(FORMATS)).keys() == {f"format/{name}" for name in FORMATS}


@given(st.text('<>/ab`~{}[]\\"\n1 ', max_size=60))
def test_forms_never_raise(text: str) -> None:
    parts(text, list(FORMATS))
