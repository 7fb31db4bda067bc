"""The reference page is made from the schema and is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from trivet.recipe import data, schema
from trivet.recipe.reference import reference, write

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipe.md"


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    copy = tmp_path / "recipe.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    assert not write(copy), "run: make docs"


def test_every_key_is_explained() -> None:
    text = reference()
    for model in [*vars(schema).values(), *vars(data).values()]:
        own = (schema.__name__, data.__name__)
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ in own:
            for name, field in model.model_fields.items():
                assert field.description, f"{model.__name__}.{name} says nothing"
                assert f"| `{field.alias or name}` | " in text


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text("nothing")
    with pytest.raises(ValueError, match="tables: begin"):
        write(tmp_path / "x.md")


def test_the_pages_examples_load(tmp_path: Path) -> None:
    from trivet.recipe import load_recipe

    text = PAGE.read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "r.yaml").write_text(example, encoding="utf-8")
    assert [stage.name for stage in load_recipe(tmp_path / "r.yaml").stages] == ["sft", "rl"]
