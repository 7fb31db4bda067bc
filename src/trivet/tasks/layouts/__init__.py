"""The usual layouts of public data sets, recognised by their columns and read without a mapping."""

from trivet.tasks.layouts.base import Dropped, Layout, Made, Row
from trivet.tasks.layouts.code import FUNCTIONAL_PROMPT, STDIO_PROMPT
from trivet.tasks.layouts.code import LAYOUTS as _CODE
from trivet.tasks.layouts.hub import hub_defaults
from trivet.tasks.layouts.rows import LayoutRows, names_only_the_prompt
from trivet.tasks.layouts.talk import LAYOUTS as _TALK

__all__ = [
    "FUNCTIONAL_PROMPT",
    "LAYOUTS",
    "STDIO_PROMPT",
    "Dropped",
    "Layout",
    "LayoutRows",
    "Made",
    "Row",
    "hub_defaults",
    "layout_names",
    "names_only_the_prompt",
    "recognise",
]

LAYOUTS = (*_CODE, *_TALK)


def recognise(row: Row) -> Layout | None:
    """The layout of a row, None for rows of no known one."""
    return next((layout for layout in LAYOUTS if layout.fits(row)), None)


def layout_names() -> list[str]:
    return sorted({layout.name for layout in LAYOUTS})
