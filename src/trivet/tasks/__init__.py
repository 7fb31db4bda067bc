"""Tasksets: files, hub data sets and generators as lists of tasks with stable ids."""

from trivet.tasks.base import Taskset, TasksetError
from trivet.tasks.load import load_tasks

__all__ = ["Taskset", "TasksetError", "load_tasks"]
