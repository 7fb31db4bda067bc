"""Tool definitions: from OpenAI's wrapping, Anthropic's names, JSON text and nested columns to one form.

Ours is the bare function: `{"name": ..., "description": ..., "parameters": JSON schema}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.formats.literal import NotReadable, read_value
from trivet.data.record import RecordDropped

_COLUMNS = ("tools", "functions", "available_tools")


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools a row declares. Raises RecordDropped (bad_tools)."""
    for key in _COLUMNS:
        value = row.get(key)
        if value:
            return read_tools(value)
    return []


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The definitions of a list, of one object, or of their text. Raises RecordDropped (bad_tools)."""
    if isinstance(value, str):
        if not value.strip():
            return []
        try:
            value = read_value(value)[0]
        except NotReadable as error:
            raise RecordDropped("bad_tools", f"tools cannot be read: {error}") from None
    if value is None:
        return []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise RecordDropped("bad_tools", f"tools is a {type(value).__name__}; it must be a list")
    return [one_tool(tool) for tool in value]


def one_tool(tool: Any) -> dict[str, Any]:
    """One definition. Raises RecordDropped (bad_tools)."""
    if isinstance(tool, str):
        try:
            tool = read_value(tool)[0]
        except NotReadable:
            raise RecordDropped("bad_tools", f"tool {tool[:60]!r} is no definition") from None
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(name, str) or not name:
        raise RecordDropped("bad_tools", f"a tool has no name: {str(tool)[:120]}")
    out = {str(key): _without_nulls(item) for key, item in inner.items() if item is not None}
    if "input_schema" in out and "parameters" not in out:  # Anthropic's name for it
        out = {("parameters" if key == "input_schema" else key): item for key, item in out.items()}
    return out


def _without_nulls(value: Any) -> Any:
    """Columnar files fill the keys a schema lacks with null; a default or constant of null is meant."""
    if isinstance(value, dict):
        return {
            key: item if key in ("default", "const", "enum", "examples") else _without_nulls(item)
            for key, item in value.items()
            if item is not None or key in ("default", "const")
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def parameter_types(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Parameter -> declared type, of the tool of that name."""
    for tool in tools:
        if tool.get("name") == name:
            parameters = tool.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            if isinstance(properties, dict):
                return {k: v.get("type") for k, v in properties.items() if isinstance(v, dict)}
    return {}
