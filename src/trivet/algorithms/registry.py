"""Names for parts, and from a recipe's words to an Algorithm.

    algorithm: grpo
    algorithm: {kind: grpo, credit: mean_only, clip: 0.2, tis: [0.5, 2.0]}
    algorithm: {kind: grpo, credit: {kind: my_package.credit:Mine, power: 2}}
    algorithm: {kind: grpo, credit: {kind: path/to/parts.py:Mine, power: 2}}

A part is a function whose keyword-only parameters are its options, or a class whose constructor takes them
and whose instances are called. What a part says about itself (its traits) stands in its decorator or in
attributes of the same names. Options are checked against their annotations (pydantic's rules: bounds go in
`Annotated[float, Field(gt=0)]`). Nothing here imports torch: planning resolves algorithms too.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from trivet.algorithms.base import NEEDS, UNITS, Algorithm, AlgorithmError, Part, StreamSpec
from trivet.recipe import Recipe
from trivet.recipe.userfile import LoadError, load_file

PartSpec = str | dict[str, Any]
"""A part as a recipe writes it: its name, or {kind: name, option: value, ...}."""

T = TypeVar("T", bound=Callable[..., Any])

_TRAITS: dict[str, tuple[str, ...]] = {
    "shaping": (),
    "credit": ("group_min", "columns", "greedy"),
    "mask": (),
    "aggregation": (),
    "objective": (
        *("level", "unit", "advantage", "ratio", "behaviour", "entropy", "group_min", "model", "column"),
    ),
    "correction": ("level", "unit", "ratio", "behaviour"),
    "control": (),
    "algorithm": ("extends",),
}
_REGISTRY: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {role: {} for role in _TRAITS}


def _register(role: str, name: str, traits: dict[str, Any]) -> Callable[[T], T]:
    unknown = sorted(set(traits) - {*_TRAITS[role], "needs"})
    if unknown:
        raise AlgorithmError(f"{role} {name!r}: unknown trait(s) {unknown}; it may have {_TRAITS[role]}")

    def decorate(target: T) -> T:
        old = _REGISTRY[role].get(name)
        if old is not None and _origin(old[0]) != _origin(target):
            raise AlgorithmError(
                f"{role} {name!r} is already {_where(old[0])}; give {_where(target)} another name"
            )
        _REGISTRY[role][name] = (target, traits)
        return target

    return decorate


def _origin(target: Any) -> tuple[str, str]:
    """(file, name): the same for a file that is imported as a module and loaded by its path."""
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    return os.path.realpath(file) if file else target.__module__, target.__qualname__


def _where(target: Any) -> str:
    return f"{target.__module__}:{target.__qualname__}"


def register_shaping(name: str, **traits: Any) -> Callable[[T], T]:
    """`shaping(batch) -> reward_N`. Traits: `needs`."""
    return _register("shaping", name, traits)


def register_credit(name: str, **traits: Any) -> Callable[[T], T]:
    """`credit(batch) -> advantage`. Traits: `needs`, `group_min`, `columns` (further ones it returns),
    `greedy` (compares with the policy's greedy answer: one attempt of each group is played so)."""
    return _register("credit", name, traits)


def register_mask(name: str, **traits: Any) -> Callable[[T], T]:
    """`mask(batch) -> keep`. Traits: `needs`."""
    return _register("mask", name, traits)


def register_aggregation(name: str, **traits: Any) -> Callable[[T], T]:
    """`aggregation(batch, mask_T) -> weight_T`. Traits: `needs`."""
    return _register("aggregation", name, traits)


def register_objective(name: str, **traits: Any) -> Callable[[T], T]:
    """`objective(inputs) -> (loss, stats)`. Traits: `needs`, `level`, `unit`, `advantage` (proportional to
    one), `ratio` (reads proximal_P), `behaviour` (reads behaviour_P), `entropy`, `group_min`, `model`,
    `column` (a further column of the credit it reads; tokens without it leave its denominators)."""
    return _register("objective", name, traits)


def register_correction(name: str, **traits: Any) -> Callable[[T], T]:
    """`correction(inputs) -> (factor, stats)`. Traits: `needs`, `level`, `unit`, `ratio` (of proximal over
    behaviour), `behaviour`."""
    return _register("correction", name, traits)


def register_control(name: str, **traits: Any) -> Callable[[T], T]:
    """`control(scale, step, metrics) -> scale`: moves a stream's scale after each step."""
    return _register("control", name, traits)


def register_algorithm(name: str, *, extends: Callable[..., Any] | None = None) -> Callable[[T], T]:
    """`builder(*, option=default, ...) -> Algorithm`; its parameters are the recipe's options.

    `extends`: a builder it hands its `**parts` to; that one's options are options of this one too.
    """
    return _register("algorithm", name, {} if extends is None else {"extends": extends})


def registered(role: str) -> list[str]:
    """Names known for a role: shaping, credit, mask, aggregation, objective, correction, control,
    algorithm."""
    return sorted(_REGISTRY[role])


def lookup(role: str, name: str) -> tuple[Any, Mapping[str, Any]]:
    """(the function or class registered under a name or at `place:name`, its traits). Raises
    AlgorithmError."""
    return _lookup(role, name)


# -- building ------------------------------------------------------------------------------------


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'? Known: ..." for an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    close.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters first
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known) or 'none'}"


def _lookup(role: str, name: str) -> tuple[Any, dict[str, Any]]:
    if ":" not in name:
        if name not in _REGISTRY[role]:
            raise AlgorithmError(f"unknown {role} {name!r}{nearest(name, _REGISTRY[role])}")
        return _REGISTRY[role][name]
    place, _, attribute = name.rpartition(":")
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # importing runs anybody's code
        why = (
            str(error)
            if isinstance(error, AlgorithmError | LoadError)
            else f"{type(error).__name__}: {error}"
        )
        raise AlgorithmError(f"{role} {name!r} cannot be imported: {why}") from error
    target = getattr(module, attribute, None)
    if target is None:
        near = difflib.get_close_matches(attribute, dir(module), 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AlgorithmError(f"{role} {name!r} cannot be imported: {place} has no {attribute!r}{hint}")
    if not callable(target):
        raise AlgorithmError(f"{role} {name!r} is not callable")
    roles = [role_ for role_, parts in _REGISTRY.items() if any(t is target for t, _ in parts.values())]
    if roles and role not in roles:
        article = "an" if roles[0][0] in "aeiou" else "a"
        raise AlgorithmError(f"{name!r} is {article} {roles[0]}, not a {role}")
    # Its decorator, if it has one, has told what it needs.
    return target, next((traits for known, traits in _REGISTRY[role].values() if known is target), {})


def _file(path: Path) -> ModuleType:
    """A Python file as a module; one that was loaded before, under whatever name, is not loaded again."""
    file = path.expanduser().resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("__file__") == str(file):  # lazy modules stay asleep
            return module
    return load_file(file)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a part or an algorithm: its default (`REQUIRED`: none) and its type."""

    default: Any
    hint: Any


REQUIRED: Any = inspect.Parameter.empty


def options_of(target: Any) -> dict[str, Option]:
    """The options a target takes: keyword-only parameters of a function, all of a constructor; of a builder
    that extends another also that one's."""
    parameters = inspect.signature(target).parameters
    whole = inspect.isclass(target)
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if whole else set())
    own = {name: Option(p.default, _hint(target, p)) for name, p in parameters.items() if p.kind in kinds}
    known = (traits for known, traits in _REGISTRY["algorithm"].values() if known is target)
    extended = next(known, {}).get("extends")
    return own if extended is None else {**options_of(extended), **own}


def _hint(target: Any, parameter: inspect.Parameter) -> Any:
    """The parameter's annotation as a type; Any when there is none or it only exists for type checkers."""
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    function = target.__init__ if inspect.isclass(target) else target
    names = getattr(inspect.unwrap(function), "__globals__", {})
    holder = type("_", (), {"__annotations__": {parameter.name: parameter.annotation}})
    try:
        return get_type_hints(holder, globalns=names, include_extras=True)[parameter.name]
    except NameError:
        return Any


def _check_options(what: str, target: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    known = options_of(target)
    out: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise AlgorithmError(f"{what}: unknown option {name!r}{nearest(name, known)}")
        try:
            out[name] = TypeAdapter(known[name].hint).validate_python(value)
        except ValidationError as error:
            reasons = "; ".join(e["msg"] for e in error.errors())
            raise AlgorithmError(f"{what}: option {name}={value!r} does not fit: {reasons}") from error
        if not _sound(out[name]):
            raise AlgorithmError(f"{what}: option {name}={value!r} does not fit: it must be a finite number")
    missing = [n for n, p in known.items() if p.default is REQUIRED and n not in out]
    if missing:
        raise AlgorithmError(f"{what}: needs option(s) {', '.join(missing)}")
    return out


def _sound(value: Any) -> bool:
    """No number in it is NaN, and none but the bounds of a range is infinite."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple):
        return not any(isinstance(v, float) and math.isnan(v) for v in value)
    return True


def _named(what: str, spec: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        raise AlgorithmError(f"{what}: write a name or {{kind: name, option: value}}, not {spec!r}")
    return spec["kind"], {k: v for k, v in spec.items() if k != "kind"}


def make_part(role: str, spec: PartSpec | Part) -> Part:
    """A part of `role` from its recipe form. Raises AlgorithmError with the nearest name."""
    if isinstance(spec, Part):
        return spec
    name, options = _named(role, spec)
    target, traits = _lookup(role, name)
    what = f"{role} {name!r}"
    bound = _check_options(what, target, options)
    try:
        call: Any = target(**bound) if inspect.isclass(target) else partial(target, **bound)
    except (ValueError, TypeError) as error:
        raise AlgorithmError(f"{what}: {error}") from error
    # What a class or instance says about itself may depend on its options, so it goes before the decorator's.
    source = call if inspect.isclass(target) else target  # the instance, or the function
    found = {t: getattr(source, t) for t in (*_TRAITS[role], "needs") if hasattr(source, t)}
    merged = {**traits, **found}
    needs = frozenset(merged.pop("needs", ()))
    if not needs <= NEEDS:
        raise AlgorithmError(f"{what} needs {sorted(needs - NEEDS)}; what can be provided is {sorted(NEEDS)}")
    _check_traits(what, merged)
    return Part(role, name, call, bound, needs, merged)


def _check_traits(what: str, traits: Mapping[str, Any]) -> None:
    """Refuse words that nothing reads: a misspelt level would quietly be "token"."""
    for name, known in (("level", ("token", "unit")), ("unit", UNITS)):
        if traits.get(name, known[0]) not in known:
            raise AlgorithmError(f"{what}: {name} {traits[name]!r} is none of {', '.join(map(repr, known))}")
    if "unit" in traits and traits.get("level") != "unit":
        raise AlgorithmError(f"{what}: unit {traits['unit']!r} is for parts of level 'unit'; set level too")
    smallest = traits.get("group_min", 1)
    if not isinstance(smallest, int) or smallest < 1:
        raise AlgorithmError(f"{what}: group_min {smallest!r} is no number of rollouts")


def make_parts(role: str, specs: Sequence[PartSpec]) -> tuple[Part, ...]:
    return tuple(make_part(role, spec) for spec in specs)


def resolve(spec: str | Mapping[str, Any]) -> Algorithm:
    """The algorithm a recipe names: "grpo" or {kind: grpo, option: value, ...}.

    Raises AlgorithmError: unknown names and options (with the nearest one), values out of bounds, and
    combinations that cannot work (with the reason).
    """
    name, options = _named("algorithm", spec)
    builder, _ = _lookup("algorithm", name)
    what = f"algorithm {name!r}"
    bound = _check_options(what, builder, options)
    try:
        algorithm = builder(**bound)
    except AlgorithmError:
        raise
    except (ValueError, TypeError) as error:
        raise AlgorithmError(f"{what}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise AlgorithmError(
            f"{what}: {_where(builder)} returned {type(algorithm).__name__}, not an Algorithm"
        )
    defaults = {n: p.default for n, p in options_of(builder).items()}
    algorithm = replace(algorithm, kind=name, options={**defaults, **bound})
    check(algorithm)
    return algorithm


def resolve_all(recipe: Recipe) -> dict[str, Algorithm]:
    """The algorithms of a recipe's training stages by name, of their phases as `stage@step`.

    Raises what `resolve` raises.
    """
    out: dict[str, Algorithm] = {}
    for stage in recipe.stages:
        if stage.mode != "bench":
            variants = {stage.name: stage}
            variants |= {f"{stage.name}@{p.from_step}": stage.at(p.from_step) for p in stage.phases}
            for name, variant in variants.items():
                try:
                    out[name] = resolve(variant.algorithm)
                except AlgorithmError as error:
                    raise AlgorithmError(f"stages.{name}: {error}") from error
    return out


def check(algorithm: Algorithm) -> None:
    """Refuse combinations that cannot work. Raises AlgorithmError with the reason."""
    what = f"algorithm {algorithm.kind!r}"
    if not algorithm.streams:
        raise AlgorithmError(f"{what} has no stream: nothing would be trained")
    names = [s.name for s in algorithm.streams]
    if len(set(names)) < len(names) or any("/" in n or n in ("max", "sum") for n in names):
        raise AlgorithmError(f"{what}: stream names {names} must differ, hold no '/' and not be max or sum")
    credited = [s for s in algorithm.streams if s.objective.traits.get("advantage")]
    if credited and algorithm.credit is None:
        raise AlgorithmError(
            f"{what}: objective {credited[0].objective.name!r} needs an advantage; set credit"
        )
    if algorithm.credit is not None and not credited:
        objectives = ", ".join(repr(s.objective.name) for s in algorithm.streams)
        raise AlgorithmError(
            f"{what}: credit {algorithm.credit.name!r} would be computed for no objective. If one of "
            f"{objectives} multiplies by the advantage, let it say so: register_objective(name, "
            f"advantage=True), or advantage = True in its class; else drop the credit"
        )
    for stream in algorithm.streams:
        if not math.isfinite(stream.scale):
            raise AlgorithmError(
                f"{what}: stream {stream.name!r} has scale {stream.scale}; set a finite number"
            )
        _check_stream(what, stream, algorithm.proximal)
    _check_models(what, algorithm)


def _check_models(what: str, algorithm: Algorithm) -> None:
    """A policy is trained by its own streams, a critic beside it; a reward model has outputs of one kind."""
    models = {stream.model for stream in algorithm.streams}
    if algorithm.produces == "policy" and "policy" not in models:
        raise AlgorithmError(
            f"{what} trains a critic only, and nothing for the policy; add an objective of the policy"
        )
    if algorithm.produces == "reward_model" and "policy" in models:
        raise AlgorithmError(
            f"{what} trains a reward model, but has an objective of the policy; drop one of both"
        )
    given = algorithm.credit.traits.get("columns", ()) if algorithm.credit else ()
    for objective in (stream.objective for stream in algorithm.streams):
        column = objective.traits.get("column")
        if column is not None and column not in given:
            name = repr(algorithm.credit.name) if algorithm.credit else "there is none"
            raise AlgorithmError(
                f"{what}: objective {objective.name!r} reads the credit's column {column!r}, which "
                f"the credit ({name}) does not give; gae and returns give 'return', "
                "kto_reference 'reference_kl'"
            )


def _check_stream(what: str, stream: StreamSpec, proximal: str | None) -> None:
    if stream.objective.traits.get("ratio") and proximal is None:
        raise AlgorithmError(
            f"{what}: objective {stream.objective.name!r} takes a ratio to the proximal policy; "
            "set proximal to recompute or behaviour"
        )
    for correction in stream.corrections:
        if correction.traits.get("ratio") and proximal != "recompute":
            raise AlgorithmError(
                f"{what}: correction {correction.name!r} weighs proximal over behaviour, which is 1 "
                f"everywhere with proximal: {proximal}; use proximal: recompute, or drop the correction"
            )
    parts = [p for p in (stream.objective, *stream.corrections) if p.traits.get("level") == "unit"]
    units = sorted({p.traits.get("unit", "row") for p in parts})
    if len(units) > 1:
        raise AlgorithmError(
            f"{what}: stream {stream.name!r} mixes units {units} of {[p.name for p in parts]}; "
            "a stream has one unit"
        )
