"""The YAML a user writes: schema, loading, overrides, planning. Nothing here imports torch."""

from trivet.recipe.dump import config_hash, dump_recipe
from trivet.recipe.files import find_recipe, packaged_recipes
from trivet.recipe.load import load_recipe, load_section
from trivet.recipe.memory import ModelShape, policy_shape
from trivet.recipe.plan import Plan, StagePlan, derived_steps, plan
from trivet.recipe.problems import Problem, RecipeError
from trivet.recipe.schedule import lag, sampled_after
from trivet.recipe.schema import Recipe, Stage
from trivet.recipe.secret import redact, resolve_secrets

__all__ = [
    "ModelShape",
    "Plan",
    "Problem",
    "Recipe",
    "RecipeError",
    "Stage",
    "StagePlan",
    "config_hash",
    "derived_steps",
    "dump_recipe",
    "find_recipe",
    "lag",
    "load_recipe",
    "load_section",
    "packaged_recipes",
    "plan",
    "policy_shape",
    "redact",
    "resolve_secrets",
    "sampled_after",
]
