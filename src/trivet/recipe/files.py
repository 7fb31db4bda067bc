"""Where recipes come from: files, run folders, and the ones that trivet carries."""

from __future__ import annotations

import os
from pathlib import Path

from trivet.recipe.problems import Problem, RecipeError, nearest
from trivet.recipe.yamltext import Where, YamlMap, YamlProblem, read_yaml

_PACKAGED = Path(__file__).parent.parent / "recipes"
_SUFFIXES = (".yaml", ".yml")


def packaged_recipes() -> dict[str, str]:
    """Name -> one line of description (the file's first comment) of the recipes that trivet carries."""
    found: dict[str, str] = {}
    for path in sorted(_PACKAGED.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[path.relative_to(_PACKAGED).with_suffix("").as_posix()] = first.lstrip("# ").strip()
    return found


def find_recipe(source: str | Path, beside: Path | None = None, where: Where | None = None) -> Path:
    """The file that `source` names: a path, a run folder, or a packaged recipe's name.

    Relative paths start at the folder `beside` (default: the working directory). Raises RecipeError that
    lists the packaged names.
    """
    text = os.fspath(source)
    path = (beside or Path()) / Path(text).expanduser()
    if path.is_file():
        return path
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    packaged = (_PACKAGED / f"{text}.yaml").resolve()
    if packaged.is_file() and packaged.is_relative_to(_PACKAGED.resolve()):
        return packaged
    names = packaged_recipes()
    if text.endswith(_SUFFIXES):
        message = f"there is no file {_shown(path)}"
    elif path.is_dir():
        message = f"the folder {_shown(path)} holds no recipe.yaml"
    else:
        message = f"{text!r} is neither a file nor one of trivet's recipes{nearest(text, names)}"
    raise RecipeError(text, [Problem(f"{message} (trivet's own: {', '.join(names)})", where)])


def _shown(path: Path) -> str:
    """`path` as a person would name it: packaged recipes by name, others relative where that is shorter."""
    resolved = path.resolve()
    if resolved.is_relative_to(_PACKAGED.resolve()):
        return f"<trivet>/{resolved.relative_to(_PACKAGED.resolve()).as_posix()}"
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _read_text(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RecipeError(shown, [Problem(f"cannot be read: {error.strerror}", Where(shown))]) from error
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}): this is no recipe"
        raise RecipeError(shown, [Problem(message, Where(shown))]) from error


def read_with_includes(path: Path, chain: tuple[Path, ...] = ()) -> YamlMap:
    """The file with its includes merged below it: later includes over earlier ones, the file over all.

    Raises RecipeError.
    """
    shown = _shown(path)
    try:
        data = read_yaml(_read_text(path, shown), shown)
    except YamlProblem as error:
        raise RecipeError(shown, [Problem(str(error), error.where)]) from error
    if not isinstance(data, YamlMap):
        what = "is empty" if data is None else "must be keys and values"
        message = f"{what}; the least a recipe needs is `stages:`"
        raise RecipeError(shown, [Problem(message, Where(shown))])
    includes, where = data.pop("include", None) or [], data.at.get("include")
    if isinstance(includes, str):
        includes = [includes]
    chain = (*chain, path.resolve())
    merged = YamlMap()
    for include in includes if isinstance(includes, list) else [includes]:
        if not isinstance(include, str):
            message = f"include must list file names or recipe names, not {include!r}"
            raise RecipeError(shown, [Problem(message, where)])
        found = find_recipe(include, path.parent, where)
        if found.resolve() in chain:
            cycle = " -> ".join(_shown(p) for p in (*chain[chain.index(found.resolve()) :], found))
            raise RecipeError(shown, [Problem(f"include goes round in a circle: {cycle}", where)])
        merged = merge(merged, read_with_includes(found, chain))
    return merge(merged, data)


def merge(base: YamlMap, over: YamlMap) -> YamlMap:
    """`over` on top of `base`: sections key by key, everything else (lists too) replaced. Copies both.

    An algorithm's name and an algorithm's section are one thing: {kind: name}. Another kind replaces the
    whole. An empty section (`trainer:` with nothing below) takes nothing away.
    """
    merged = YamlMap()
    for source in (base, over):
        for key, value in source.items():
            old = merged.get(key)
            if key == "algorithm":
                value = _merge_algorithm(old, value)
            elif isinstance(old, YamlMap) and isinstance(value, YamlMap):
                value = merge(old, value)
            elif isinstance(old, YamlMap) and value is None:
                continue
            merged[key] = _copy(value)
            if key in source.at:
                merged.at[key] = source.at[key]
    return merged


def _merge_algorithm(old: object, new: object) -> object:
    if not isinstance(new, YamlMap):
        same = new is None or (isinstance(old, YamlMap) and old.get("kind") == new)
        return old if same else new
    opened = YamlMap()
    if isinstance(old, str):
        opened["kind"] = old
    elif isinstance(old, YamlMap):
        opened = old
    if "kind" in new and new["kind"] != opened.get("kind"):
        return new
    return merge(opened, new)


def _copy(value: object) -> object:
    """A deep copy with the marks kept: overrides of one stage must not reach another."""
    if isinstance(value, YamlMap):
        copy = YamlMap()
        copy.at = dict(value.at)
        for key, item in value.items():
            copy[key] = _copy(item)
        return copy
    if isinstance(value, list):
        items = type(value)()
        if hasattr(value, "at"):
            items.at = dict(value.at)  # type: ignore[attr-defined]
        items.extend(_copy(item) for item in value)
        return items
    return value
