"""Tasksets made by rule: endless, with known answers, and split by hash so that train and test never meet."""

from trivet.tasks.generated.base import Item, generate, generator_names, register_generator

__all__ = ["Item", "generate", "generator_names", "register_generator"]
