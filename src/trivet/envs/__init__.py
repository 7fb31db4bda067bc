"""What a task is played in."""

from trivet.envs.base import Environment, SingleTurn, judge_group
from trivet.envs.registry import EnvError, environment_names, make_env, register_env

__all__ = [
    "EnvError",
    "Environment",
    "SingleTurn",
    "environment_names",
    "judge_group",
    "make_env",
    "register_env",
]
