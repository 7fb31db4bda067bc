"""From a row of a known layout to a task."""

from __future__ import annotations

import re

from trivet.recipe import schema
from trivet.tasks.base import TasksetError
from trivet.tasks.layouts.base import Dropped, Layout, Made, Row
from trivet.types import Message, SchemaError, Task, canonical_json

_PLACE = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
PLAIN = "{prompt}"


def names_only_the_prompt(template: str) -> bool:
    """The template needs no column of the source: it can be used with any layout."""
    return {name for _, name in _PLACE.findall(template) if name} <= {"prompt"}


class LayoutRows:
    """Makes the tasks of a source in a known layout.

    A template of the user's own says itself how to answer: the layout's system prompt is then left out.
    """

    def __init__(self, config: schema.Tasks, layout: Layout) -> None:
        if layout.make is None:
            raise ValueError(f"layout {layout.name} is read by its fields")
        self.config, self.layout, self.make = config, layout, layout.make

    def task(self, row: Row, place: str) -> Task:
        """Raises Dropped with the cause, and TasksetError for a template that has nothing to fill in."""
        made = self.make(row)
        try:
            canonical_json(made.payload)  # refuses dates, bytes and NaN
        except (TypeError, ValueError) as error:
            raise Dropped("not_json") from error
        try:
            return Task(
                env=self.config.env,
                messages=self._messages(made, place),
                payload=made.payload,
                id=made.id,
                tags=tuple(dict.fromkeys((*self.config.tags, *made.tags))),
                source=self.config.source,
                licence=self.config.licence,
            )
        except SchemaError as error:
            raise Dropped("bad_messages") from error

    def _messages(self, made: Made, place: str) -> tuple[Message, ...]:
        if made.messages:
            if self.config.template != PLAIN:
                raise TasksetError(
                    f"{place}: a template is for prompts, but {self.layout.name} rows are read as messages"
                )
            return made.messages
        text = _PLACE.sub(
            lambda m: "{" + m.group(1) + "}" if m.group(1) else made.prompt, self.config.template
        )
        user = Message("user", text)
        if made.system and self.config.template == PLAIN:
            return (Message("system", made.system), user)
        return (user,)
