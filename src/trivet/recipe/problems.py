"""What is wrong with a recipe, said so that it can be put right: where, what, and the nearest valid key."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from trivet.recipe.schema import Recipe, Stage
from trivet.recipe.secret import redact
from trivet.recipe.yamltext import Where

SECTIONS = (
    "algorithm",
    "batch",
    "sync",
    "sampling",
    "engine",
    "explorer",
    "trainer",
    "checkpoints",
    "eval",
    "tasks",
)
"""Keys that may stand at the top level as defaults for all stages."""

# What other frameworks call it -> our dotted name.
_OTHER_NAMES = {
    "batch_size": "batch.prompts",
    "gradient_clipping": "trainer.clip_grad_norm",
    "group_size": "batch.group",
    "learning_rate": "trainer.lr",
    "lr_scheduler_type": "trainer.schedule",
    "max_grad_norm": "trainer.clip_grad_norm",
    "max_new_tokens": "sampling.max_tokens",
    "max_response_tokens": "sampling.max_tokens",
    "max_steps": "steps",
    "model_path": "policy.model",
    "num_epochs": "epochs",
    "num_generations": "batch.group",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "path": "source",
    "repeat_times": "batch.group",
    "rollouts": "batch.group",
    "save_interval": "checkpoints.every",
    "sync_interval": "sync.interval",
    "sync_offset": "sync.offset",
    "total_steps": "steps",
    "workflow": "env",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong. `where` is None when no line can be named."""

    message: str
    where: Where | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class RecipeError(ValueError):
    """A recipe cannot be used. `problems` holds everything found, not only the first."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = [redact(str(problem)) for problem in self.problems]
        if len(lines) == 1:
            super().__init__(lines[0])
        else:
            super().__init__(f"{source}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.problems)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for the closest of `known`, or nothing."""
    close = difflib.get_close_matches(word, list(known), 1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def section_model(path: Sequence[str | int]) -> type[BaseModel] | None:
    """The schema's class at `path`, None where the schema leaves the keys free."""
    model: Any = Recipe
    for part in path:
        if isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if part not in fields:
            return None
        model = _model_in(fields[part].annotation)
        if model is None:
            return None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as list[Tasks], X | None or dict[str, X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, dict, typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            if found := _model_in(part):
                return found
    return None


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys a user may write in a section."""
    keys = [field.alias or name for name, field in model.model_fields.items()]
    return [*keys, *SECTIONS, "include"] if model is Recipe else keys


def unknown_key(path: Sequence[str | int], key: str) -> str:
    """The message about a key that does not exist, with the nearest one that does."""
    full = ".".join(map(str, [*path, key]))
    model = section_model(path)
    if model is None:
        return f"{full} is not a key"
    known = keys_of(model)
    return f"{full} is not a key{_suggestion(key, known) or '. Known here: ' + ', '.join(known)}"


def _suggestion(key: str, known: Sequence[str]) -> str:
    """By what other frameworks call it, by the same word elsewhere, by likeness; or nothing."""
    synonym = difflib.get_close_matches(key.lower(), _OTHER_NAMES, 1, cutoff=0.8)
    home = _OTHER_NAMES[synonym[0]] if synonym else ""
    if home:
        short = home.rpartition(".")[2]
        return f"; did you mean `{short if short in known else home}`?"
    if key in Stage.model_fields:
        return f"; `{key}` is a key of a stage"
    places = [place for place in _places() if place.rpartition(".")[2] == key]
    if places:
        return f"; there is `{'`, `'.join(places)}`"
    return nearest(key, known)


def _places() -> list[str]:
    """All dotted keys of a recipe; those of a stage as they stand in the stage."""
    found: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            key = prefix + (field.alias or name)
            found.append(key)
            inner = _model_in(field.annotation)
            if inner is not None and inner is not Stage:
                walk(inner, key + ".")

    walk(Stage, "")
    walk(Recipe, "")
    return found


def readable(kind: str, message: str, value: Any, context: dict[str, Any]) -> str:
    """Pydantic's error in the words of a person: what must stand there and what stands there."""
    shown = _describe(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    must = {
        "missing": "is missing; it has no default",
        "int_type": f"must be a whole number, not {shown}",
        "float_type": f"must be a number, not {shown}",
        "bool_type": f"must be true or false, not {shown}",
        "string_type": f"must be a text, not {shown}"
        + ("; put it in quotes" if isinstance(value, int | float) else ""),
        "list_type": f"must be a list, not {shown}; put `- ` before each item",
        "dict_type": f"must be a section of keys and values, not {shown}",
        "model_type": f"must be a section of keys and values, not {shown}",
        "model_attributes_type": f"must be a section of keys and values, not {shown}",
        "finite_number": f"must be a finite number, not {shown}",
        "too_short": "must not be empty",
    }
    if kind in must:
        return must[kind]
    if kind == "literal_error":
        expected = str(context.get("expected", "")).replace("'", "")
        options = expected.replace(" or ", ", ").split(", ")
        return f"must be one of {expected}, not {shown}{nearest(str(value), options)}"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        return f"must be made of letters (a stage's: lower-case), digits, - and _, not {shown}"
    return f"{message[:1].lower()}{message[1:].replace('input should be', 'must be')}, not {shown}".replace(
        "input should be", "must be"
    )


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    return "a list" if isinstance(value, list | tuple) else repr(value)
