"""The recipe's reference as Markdown, made from the schema so that it cannot be out of date.

python -m trivet.recipe.reference docs/reference/recipe.md writes the tables between the page's two marks.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trivet.recipe import data, schema

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
_LONGEST = 40  # characters of a default that are shown
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "value"}
_SIGNS = {Gt: ">", Ge: ">=", Lt: "<", Le: "<="}
_ORDER = (
    schema.Recipe,
    schema.Stage,
    schema.Policy,
    schema.TinyModel,
    schema.Tasks,
    schema.Batch,
    schema.Sync,
    schema.Sampling,
    schema.Engine,
    schema.Explorer,
    schema.Window,
    schema.Expert,
    schema.Trainer,
    schema.Lora,
    schema.Checkpoints,
    schema.Eval,
    schema.HeldOut,
    schema.KeepBest,
    schema.Until,
    schema.Phase,
    schema.Runtime,
    schema.Buffer,
    schema.Weights,
    schema.Monitor,
    schema.AuxModel,
    *(data.Data, data.Source, data.Decontaminate, data.Benchmark, data.Deduplicate, data.Near),
    *(data.Compose, data.Pack),
)


def reference() -> str:
    """One table for each section: key, type, default, meaning."""
    blocks = []
    for model in _ORDER:
        about = (model.__doc__ or "").strip().partition("\n")[0]
        blocks.append(
            f"### {_title(model)}\n\n{about}\n\n| key | type | default | meaning |\n|---|---|---|---|"
        )
        blocks[-1] += "".join(f"\n{_row(name, field)}" for name, field in model.model_fields.items())
    return "\n\n".join(blocks)


def _title(model: type[BaseModel]) -> str:
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", model.__name__).lower()
    return {"recipe": "the file", "aux model": "models (each)", "tiny model": "policy.model (tiny)"}.get(
        words, words
    )


def _row(name: str, field: FieldInfo) -> str:
    cells = [f"`{field.alias or name}`", _type(field), _default(field), field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    bounds = [
        f" {sign} {getattr(m, kind.__name__.lower())}"
        for m in field.metadata
        for kind, sign in _SIGNS.items()
        if isinstance(m, kind)
    ]
    return _word(field.annotation) + ",".join(bounds)


def _word(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _word(inner[0])
    if origin is typing.Literal:
        return ", ".join(str(option) for option in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_word(part) for part in inner if part is not type(None))
    if origin is list:
        return f"list of {_word(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)} {_word(inner[0])}s"
    if origin is dict:
        return "section" if inner[1] is Any else f"section of {_word(inner[1])}"
    return f"[{_title(annotation)}](#{_anchor(_title(annotation))})"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).replace(" ", "-")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = (
        field.default
        if field.default is not PydanticUndefined
        else field.get_default(call_default_factory=True)
    )
    if value is None or isinstance(value, BaseModel) or value in ("", [], {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    shown = str(list(value)) if isinstance(value, tuple) else str(value)
    return f"`{shown}`" if len(shown) <= _LONGEST else "see `trivet plan --resolved`"


def replace_between(page: Path, begin: str, end: str, text: str) -> bool:
    """Put `text` between a page's two marks; whether that changed it. Raises ValueError without marks."""
    old = page.read_text(encoding="utf-8")
    head, first, rest = old.partition(begin)
    _, last, tail = rest.partition(end)
    if not (first and last):
        raise ValueError(f"{page}: no {begin} ... {end}")
    new = f"{head}{begin}\n\n{text}\n\n{end}{tail}"
    page.write_text(new, encoding="utf-8")
    return new != old


def write(page: Path) -> bool:
    """Put the tables between the page's marks; whether that changed it. Raises ValueError without marks."""
    return replace_between(page, BEGIN, END, reference())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
