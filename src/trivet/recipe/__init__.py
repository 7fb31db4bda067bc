"""The YAML a user writes: schema, loading, overrides, planning. Nothing here imports torch."""

from trivet.recipe.dump import config_hash, dump_recipe
from trivet.recipe.files import find_recipe, packaged_recipes
from trivet.recipe.load import load_recipe
from trivet.recipe.problems import Problem, RecipeError
from trivet.recipe.schema import Recipe, Stage
from trivet.recipe.secret import redact, resolve_secrets

__all__ = [
    "Problem",
    "Recipe",
    "RecipeError",
    "Stage",
    "config_hash",
    "dump_recipe",
    "find_recipe",
    "load_recipe",
    "packaged_recipes",
    "redact",
    "resolve_secrets",
]
