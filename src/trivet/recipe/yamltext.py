"""YAML as people mean it, with the line of every key.

Scalars follow YAML 1.2's core schema: `1e-4` is a number, `on` and `2024-01-01` are texts; `1_000` is read
as an integer. Double keys, keys that are not text, foreign tags and oversized files are refused.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

_MAX_NODES = 100_000  # aliases can make a short text enormous
_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
    "merge": (r"^<<$", ["<"]),
}


class Where(NamedTuple):
    """A place in a file (`recipe.yaml:12`), or, with line 0, an override as it was typed."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class YamlProblem(ValueError):
    """The text is not the YAML we read; `where` says the line."""

    def __init__(self, where: Where, message: str) -> None:
        super().__init__(message)
        self.where = where


class YamlMap(dict[str, Any]):
    """A mapping that knows where each of its keys was written."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, Where] = {}


class YamlList(list[Any]):
    """A list that knows where each of its items was written."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[int, Where] = {}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (yaml's own protocol)


class _Dumper(yaml.SafeDumper):
    """Quotes what either reading of YAML (1.1 or ours) would take for something else than text."""

    yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Line breaks of Unicode that a single-quoted or plain scalar would fold away.
    style = '"' if any(char in text for char in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)

for _name, (_pattern, _first) in _CORE.items():
    for _char in _first:
        _Loader.yaml_implicit_resolvers.setdefault(_char, []).append((_TAG + _name, re.compile(_pattern)))
for _char, _entries in _Loader.yaml_implicit_resolvers.items():
    _older = _Dumper.yaml_implicit_resolvers.get(_char, [])
    _Dumper.yaml_implicit_resolvers[_char] = [*_entries, *_older]


def read_yaml(text: str, source: str, line: int | None = None) -> Any:
    """`text` as YamlMap, YamlList or a scalar. `line` replaces all lines (0 for overrides).

    Raises YamlProblem.
    """
    builder = _Builder(source, line)
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else builder.build(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context or "not YAML"
        if "\\t" in message:
            message += "; indent with blanks, not tabs"
        where = builder.where(mark) if mark else Where(source)
        raise YamlProblem(where, f"not YAML: {message}") from error
    except yaml.reader.ReaderError as error:
        raise YamlProblem(Where(source), f"not YAML: {error.reason} at position {error.position}") from error
    except RecursionError as error:
        raise YamlProblem(Where(source), "not readable: it is nested too deeply") from error


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that `read_yaml` reads back to equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Builder:
    """Plain data from YAML nodes."""

    def __init__(self, source: str, line: int | None) -> None:
        self.source = source
        self.line = line
        self.nodes = 0

    def where(self, mark: Any) -> Where:
        return Where(self.source, mark.line + 1 if self.line is None else self.line)

    def build(self, node: yaml.Node) -> Any:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise YamlProblem(self.where(node.start_mark), f"more than {_MAX_NODES} values: no recipe")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            items = YamlList()
            for item in node.value:
                items.at[len(items)] = self.where(item.start_mark)
                items.append(self.build(item))
            return items
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode) -> YamlMap:
        mapping = YamlMap()
        merged: list[tuple[YamlMap, Where]] = []
        for key_node, value_node in node.value:
            where = self.where(key_node.start_mark)
            if key_node.tag == _TAG + "merge":
                value = self.build(value_node)
                merged += [(item, where) for item in (value if isinstance(value, list) else [value])]
                continue
            key = self.build(key_node)
            if not isinstance(key, str):
                raise YamlProblem(where, f"the key {key!r} is not a text; put it in quotes")
            if key in mapping:
                raise YamlProblem(where, f"the key {key!r} is already given in line {mapping.at[key].line}")
            mapping[key] = self.build(value_node)
            mapping.at[key] = where
        for item, where in merged:  # explicit keys win, earlier merges win over later ones
            if not isinstance(item, YamlMap):
                raise YamlProblem(where, "`<<` merges mappings only")
            for key in item.keys() - mapping.keys():
                mapping[key] = item[key]
                mapping.at[key] = item.at[key]
        return mapping

    def _scalar(self, node: yaml.Node) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if kind in ("str", "merge"):
            return text
        pattern = _CORE.get(kind, ("(?!)",))[0]
        if not re.match(pattern, text):
            raise YamlProblem(self.where(node.start_mark), f"{text!r} with tag {node.tag} is not supported")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            try:
                return int(text.replace("_", ""), 0 if text[:2] in ("0o", "0x") else 10)
            except ValueError as error:  # thousands of digits
                raise YamlProblem(self.where(node.start_mark), str(error)) from error
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
