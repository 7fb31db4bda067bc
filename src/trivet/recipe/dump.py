"""A recipe written out in full, and the hash of what decides a policy's behaviour."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from trivet.recipe.schema import Recipe, Stage
from trivet.recipe.yamltext import dump_yaml
from trivet.types import content_hash


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key with its value. `load_recipe` gives it back, equal."""
    header = "# Resolved by trivet: includes, defaults and overrides are worked in.\n"
    return header + dump_yaml(_plain(recipe))


def _plain(value: Any) -> Any:
    """Plain data; keys that are unset (None, the default of every optional key) are left out."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        pairs = ((field.alias or name, getattr(value, name)) for name, field in fields)
        return {key: _plain(item) for key, item in pairs if item is not None}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def config_hash(recipe: Recipe, stage: Stage | str) -> str:
    """16 hexadecimal digits over what, besides the weights, decides how the policy behaves in a stage.

    Policy (model, renderer, template arguments, system prompt), sampling, and each taskset's environment with
    its arguments and its template. Pass rates are comparable only under one hash.
    """
    stage = recipe.stage(stage) if isinstance(stage, str) else stage
    environments = [
        {"env": tasks.env, "args": _plain(tasks.env_args), "template": tasks.template}
        for tasks in stage.tasks
    ]
    policy, sampling = _plain(recipe.policy), _plain(stage.sampling)
    return content_hash({"policy": policy, "sampling": sampling, "environments": environments})
