"""What a known layout is, and what its readers share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trivet.data.shapes import plain_message
from trivet.types import Message, SchemaError

Row = Mapping[str, Any]


class Dropped(Exception):
    """A row that gives no task; the argument is the cause it is counted under."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a row says: a prompt (or whole messages), what the verifier needs, and the source's own id."""

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    system: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of one well-known form.

    A row is recognised by `columns` (all must be there; of a tuple one) and, where those are not enough, by
    `test`. Rows are read by `make`, or (None) as any other source is, with `fields` as if the user had
    written them. `env` is the environment that judges such tasks.
    """

    name: str
    env: str
    columns: tuple[str | tuple[str, ...], ...]
    make: Callable[[Row], Made] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    test: Callable[[Row], bool] | None = None

    def fits(self, row: Row) -> bool:
        for wanted in self.columns:
            names = (wanted,) if isinstance(wanted, str) else wanted
            if not any(name in row for name in names):
                return False
        return self.test is None or self.test(row)


# -- reading what a row holds ----------------------------------------------------------------------


def text(row: Row, *names: str) -> str:
    """The first of these columns that holds text other than blanks, "" without one."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return ""


def needed(row: Row, *names: str, cause: str = "no_prompt") -> str:
    """`text`; raises Dropped(cause) without any."""
    found = text(row, *names)
    if not found:
        raise Dropped(cause)
    return found


def decoded(value: Any, cause: str = "bad_json") -> Any:
    """JSON in a text column; what is no text stays as it is. Raises Dropped(cause)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Dropped(cause) from error


def own_id(layout: str, value: Any) -> str:
    """`layout/ID`: ids of two data sets must not meet in one run. "" without an id."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return ""
    return f"{layout}/{str(value).rpartition('/')[2]}"


def labels(*values: Any) -> tuple[str, ...]:
    """Values of category columns as tags, blanks left out."""
    found = [value for value in values if isinstance(value, str) and value.strip()]
    return tuple(dict.fromkeys(value.strip() for value in found))


def conversation(value: Any, cause: str = "bad_messages") -> tuple[Message, ...]:
    """Messages as data sets write them: a list of role and content, or of from and value; JSON; or one text
    (a user's). Raises Dropped(cause)."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = decoded(value, cause)
    if isinstance(value, str) and value.strip():
        return (Message("user", value),)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise Dropped(cause)
    try:
        return tuple(message(one) for one in value)
    except (SchemaError, TypeError) as error:
        raise Dropped(cause) from error


def message(value: Any) -> Message:
    """One message; keys that are not ours are left out, text in parts is joined. Raises SchemaError."""
    if not isinstance(value, Mapping):
        raise SchemaError(f"a message is an object, not a {type(value).__name__}")
    given = plain_message({key: item for key, item in value.items() if item is not None})
    content = given.get("content", "")
    if isinstance(content, list):
        media = [part for part in content if not isinstance(part, Mapping) or part.get("type") != "text"]
        if media:
            raise SchemaError("a message holds media")
        content = "\n".join(str(part.get("text", "")) for part in content)
    return Message.from_dict({"role": given.get("role"), "content": content})
