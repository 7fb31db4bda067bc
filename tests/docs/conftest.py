"""What pages register is forgotten after each test; a small finished run for the pages that look into one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet.algorithms import registry as parts
from trivet.envs import registry as envs
from trivet.recipe import load_recipe
from trivet.tasks.generated import base as generators

_RECIPE = """
name: small
policy: {model: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, mlp: 32, context: 64}}
runtime: {threads: 1}
monitor: {plots: false}
stages:
  - name: rl
    tasks: [{source: "generated:addition", env: math, env_args: {fallback: number}}]
    batch: {prompts: 4, group: 4}
    sampling: {max_tokens: 4}
    steps: 3
"""


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds `runs/small`."""
    from trivet.runtime import run_recipe

    home = tmp_path_factory.mktemp("home")
    path = home / "small.yaml"
    path.write_text(_RECIPE)
    run_recipe(load_recipe(path, [f"output={home}/runs/small"]), quiet=True)
    return home


@pytest.fixture(autouse=True)
def _forget(tmp_path: Path) -> Iterator[None]:
    """Pages are independent: the same name may be registered by several, from files of the same name."""
    tables = [envs._REGISTERED, generators._REGISTERED, *parts._REGISTRY.values()]
    kept, modules = [dict(table) for table in tables], set(sys.modules)
    yield
    for table, before in zip(tables, kept, strict=True):
        for name in set(table) - set(before):
            target = table[name][0] if isinstance(table[name], tuple) else table[name]
            if not target.__module__.startswith("trivet."):  # built-in ones register only once
                del table[name]
        table.update(before)
    for name in set(sys.modules) - modules:
        own = str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path))
        if own or name.startswith("trivet_user_"):
            del sys.modules[name]
