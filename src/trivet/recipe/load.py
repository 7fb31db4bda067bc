"""From a recipe's text to a checked `Recipe`: includes, defaults for stages, overrides, readable errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trivet.recipe.files import find_recipe, merge, read_with_includes
from trivet.recipe.paths import PathError, item_index, override, split_path
from trivet.recipe.problems import SECTIONS, Problem, RecipeError, keys_of, nearest, readable, unknown_key
from trivet.recipe.schema import Recipe, Stage
from trivet.recipe.yamltext import Where, YamlList, YamlMap, YamlProblem, read_yaml

S = TypeVar("S", bound=BaseModel)
Path_ = list[str | int]


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at a path, in a run folder, or carried by trivet under that name.

    Order, later wins: includes, the file, top-level sections as defaults under each stage, the stage,
    overrides. An override is `a.b.c=value` with a YAML value; stages (and tasksets with a name) are named or
    counted from 0: `stages.rl.trainer.lr=1e-4`. Relative includes start at the including file, all other
    relative paths at the working directory. Raises RecipeError with everything that is wrong.
    """
    data = read_with_includes(find_recipe(source))
    problems: list[Problem] = []
    changes = [change for text in overrides if (change := _parse_override(text, problems))]
    _apply([c for c in changes if c[0][0] in SECTIONS], data, problems, check_stages=True)
    defaults = _fold_defaults(data, problems)
    _apply([c for c in changes if c[0][0] not in SECTIONS], data, problems)
    recipe = _validate(data, defaults, problems)
    if recipe is None or problems:
        raise RecipeError(str(source), problems)
    return recipe


def load_section(model: type[S], values: Mapping[str, Any], overrides: Sequence[str] = ()) -> S:
    """One section by itself: `values`, with `key=value` overrides on top. Raises RecipeError."""
    problems: list[Problem] = []
    data = YamlMap()
    data.update(values)
    _apply([c for text in overrides if (c := _parse_override(text, problems))], data, problems)
    if not problems:
        try:
            return model.model_validate(_plain(data))
        except ValidationError as error:
            for item in error.errors(include_url=False):
                where = _where(data, item["loc"])
                label = ".".join(map(str, item["loc"]))
                if item["type"] == "extra_forbidden":
                    known = keys_of(model)
                    text = f"is not a key{nearest(label, known) or '. Known: ' + ', '.join(known)}"
                else:
                    text = readable(item["type"], item["msg"], item.get("input"), item.get("ctx") or {})
                problems.append(Problem(f"{label} {text}", where))
    raise RecipeError(model.__name__, problems)


Change = tuple[list[str], Any, Where]


def _parse_override(text: str, problems: list[Problem]) -> Change | None:
    where = Where(f"override {text!r}")
    key, equals, value = text.partition("=")
    try:
        if not equals:
            raise PathError("an override is written key=value, e.g. stages.rl.trainer.lr=1e-4")
        path = split_path(key)
        if path[0] == "include":
            raise PathError("include cannot be overridden: write a recipe that includes what you need")
        return path, read_yaml(value, where.source, line=0), where
    except (PathError, YamlProblem) as error:
        problems.append(Problem(str(error), where))
        return None


def _apply(
    changes: Sequence[Change], data: YamlMap, problems: list[Problem], check_stages: bool = False
) -> None:
    """Overrides in their order; with `check_stages` those that no stage would notice are refused."""
    for path, value, where in changes:
        setters = _stages_setting(data, path) if check_stages else []
        if setters:
            ways = ", ".join(f"stages.{stage}.{'.'.join(path)}=..." for stage in setters)
            problems.append(Problem(f"is only a default, and stages set it themselves; write {ways}", where))
            continue
        try:
            override(data, path, value)
            _mark(data, path, where)
        except PathError as error:
            problems.append(Problem(str(error), where))


def _stages_setting(data: YamlMap, path: Sequence[str]) -> list[str]:
    """Names of the stages that hold a value of their own at `path`: a default would not reach them."""
    found = []
    stages = data.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        here: Any = stage
        for part in path:
            here = here.get(part) if isinstance(here, dict) else here
        if here is not None and isinstance(stage, dict):
            found.append(str(stage.get("name", index)))
    return found


def _mark(data: Any, path: Sequence[str], where: Where) -> None:
    """Remembers that the value at `path` came from an override."""
    for depth, part in enumerate(path):
        key: Any = part
        if isinstance(data, list):
            key = item_index(data, part, ".".join(path[:depth]))
        if depth == len(path) - 1 and isinstance(data, YamlMap | YamlList):
            data.at[key] = where
        data = data[key]


def _fold_defaults(data: YamlMap, problems: list[Problem]) -> YamlMap:
    """Takes the top-level sections out of `data` and puts them under each stage. Returns them."""
    defaults = YamlMap()
    for key in SECTIONS:
        value, where = data.pop(key, None), data.at.pop(key, None)
        if value is None:
            continue
        wanted = list if key == "tasks" else (dict, str) if key == "algorithm" else dict
        if not isinstance(value, wanted):
            shape = "a list of tasksets" if key == "tasks" else "a section of keys and values"
            problems.append(Problem(f"{key} must be {shape}, not {value!r}", where))
            continue
        defaults[key] = value
        if where:
            defaults.at[key] = where
    stages = data.get("stages")
    if isinstance(stages, YamlList):
        for index, stage in enumerate(stages):
            if isinstance(stage, YamlMap):
                stages[index] = merge(defaults, stage)
                if stage.get("mode") == "bench" and "tasks" not in stage:  # it trains on nothing
                    stages[index].pop("tasks", None)
    return defaults


def _validate(data: YamlMap, defaults: YamlMap, problems: list[Problem]) -> Recipe | None:
    try:
        recipe = Recipe.model_validate(_plain(data))
    except ValidationError as error:
        problems += _problems(error, data, defaults)
        return None
    for index, stage in enumerate(recipe.stages):
        for number in range(len(stage.phases)):
            _check_phase(stage, index, number, data, problems)
    return recipe


def _check_phase(stage: Stage, index: int, number: int, data: YamlMap, problems: list[Problem]) -> None:
    phase = stage.phases[number]
    base: Path_ = ["stages", index, "phases", number, "set"]
    settings: dict[str, Any] = {}
    try:
        settings = stage.settings_at(phase.from_step)
        Stage.model_validate(settings)
    except ValidationError as error:
        for found in _problems(error, {"stages": {index: settings}}, YamlMap(), ["stages", index]):
            key = next((key for key in phase.set if f".{key}" in found.message), "")
            problems.append(Problem(f"phases.{number}.set: {found.message}", _where(data, [*base, key])))
    except ValueError as error:
        problems.append(Problem(f"stages.{index}.phases.{number}.set: {error}", _where(data, base)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _where(data: Any, path: Sequence[Any]) -> Where | None:
    """The line of the deepest part of `path` that was written down."""
    found: Where | None = None
    for part in path:
        if isinstance(data, YamlMap | YamlList):
            found = data.at.get(part, found)
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            break
    return found


def _problems(
    error: ValidationError, data: dict[str, Any], defaults: YamlMap, prefix: Sequence[str | int] = ()
) -> list[Problem]:
    """Pydantic's errors, one sentence each, with lines; what came from a default is reported once."""
    found: dict[Problem, None] = {}
    for item in error.errors(include_url=False):
        path, tags = _walk(data, [*prefix, *item["loc"]], item["type"])
        value = item.get("input")
        if tags and item["loc"][-1] == tags[-1] and not _meant(tags[-1], value, item["type"]):
            continue
        where = _where(data, path)
        shown = path
        if path[:1] == ["stages"] and len(path) > 2 and where and where == _where(defaults, path[2:]):
            shown = path[2:]
        if item["type"] == "extra_forbidden":
            message = unknown_key(path[:-1], str(path[-1]))
            message = message.replace(".".join(map(str, path)), ".".join(map(str, shown)), 1)
        else:
            text = readable(item["type"], item["msg"], value, item.get("ctx") or {})
            label = ".".join(map(str, shown)) or "the recipe"
            message = f"{label} {text}" if not text.startswith("stage ") else text
        found[Problem(message, where)] = None
    return list(found)


def _walk(data: Any, location: Sequence[str | int], kind: str) -> tuple[Path_, list[str]]:
    """Pydantic's location without the names of union members, and those names."""
    path: Path_ = []
    tags: list[str] = []
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(data, dict) and (part in data or (last and kind == "missing")):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not last or kind not in ("missing", "extra_forbidden"):
            tags.append(str(part))
            continue
        path.append(part)
    return path, tags


def _meant(member: str, value: Any, kind: str) -> bool:
    """Of a union's errors (text or section), the one about the member that the user evidently meant."""
    about_text = "str" in member and "dict" not in member
    return about_text != isinstance(value, dict) if kind.endswith("_type") else True
