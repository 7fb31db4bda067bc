"""YAML as people mean it: numbers, lines, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trivet.recipe.yamltext import Where, YamlMap, YamlProblem, dump_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),  # YAML 1.1 reads a text here
        ("6E4", 6e4),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),  # not octal
        ("0x1f", 31),
        ("0o17", 15),
        ("-3", -3),
        ("on", "on"),  # not a truth value
        ("yes", "yes"),
        ("True", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),  # not a date
        ("1:30", "1:30"),  # not base 60
        ("'1e-4'", "1e-4"),
        ("-.inf", -math.inf),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    read = read_yaml(text, "f")
    assert read == value
    assert type(read) is type(value)


def test_lines_of_keys_and_items() -> None:
    data = read_yaml("a: 1\n\nb:\n  - x\n  # remark\n  - y: 2\n", "f.yaml")
    assert data.at == {"a": Where("f.yaml", 1), "b": Where("f.yaml", 3)}
    assert [str(where) for where in data["b"].at.values()] == ["f.yaml:4", "f.yaml:6"]
    assert data["b"][1].at["y"].line == 6


def test_merge_keys_give_way_to_explicit_ones() -> None:
    data = read_yaml("base: &b {x: 1, y: 2}\nz:\n  <<: *b\n  y: 3\n", "f")
    assert data["z"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\na: 2", 2, "already given in line 1"),
        ("a:\n\t- b", 2, "tabs"),
        ("a: [1", 1, "expected"),
        ("1: 2", 1, "put it in quotes"),
        ("a: 1\nb: !!python/object:os.system x", 2, "not supported"),
        ("a: &x [*x]", 0, "nested too deeply"),
        ("a: 1\n---\nb: 2", 2, "another document"),
        ("a: \x00", 0, "special characters"),
        ("a: *b", 1, "undefined alias"),
        ("[" * 1500, 0, "nested too deeply"),
        ("a: !!int foo", 1, "not supported"),
    ],
)
def test_refusals_name_the_line(text: str, line: int, message: str) -> None:
    with pytest.raises(YamlProblem, match=message) as caught:
        read_yaml(text, "f")
    assert caught.value.where == Where("f", line)


def test_aliases_cannot_explode() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(YamlProblem, match="more than"):
        read_yaml(text, "f")


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_data = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@given(_data)
def test_what_is_written_is_read_back(data: Any) -> None:
    text = dump_yaml(data)
    assert _plain(read_yaml(text, "f")) == data
    assert yaml.safe_load(text) == data  # other readers of YAML agree


def test_a_map_compares_like_a_dict() -> None:
    assert isinstance(read_yaml("a: 1", "f"), YamlMap)
    assert read_yaml("a: 1", "f") == {"a": 1}
