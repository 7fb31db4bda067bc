"""Runs a recipe: its stages in order, each from the model the one before left."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivet.algorithms import resolve_all
from trivet.buffer import Ledger
from trivet.monitor import Monitor, StageHandle
from trivet.recipe import Problem, Recipe, RecipeError, Stage, plan, policy_shape, resolve_secrets
from trivet.recipe.supervised import PackedNumbers
from trivet.rewards.load import import_all
from trivet.runtime.bench import bench_stage
from trivet.runtime.build import SetupError, aux_directory, policy_directory
from trivet.runtime.compose import compose_stage
from trivet.runtime.folder import RunFolder
from trivet.runtime.packs import packed_numbers
from trivet.runtime.quiet import hush_libraries
from trivet.runtime.stop import Stopped, StopRequest


@dataclass(slots=True)
class RunResult:
    """Where a run lives, how each stage ended, and whether it was stopped before its end."""

    folder: Path
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def model(self) -> Path | None:
        """The model of the last training stage that is done."""
        models = [facts["model"] for facts in self.stages.values() if facts.get("model")]
        return self.folder / models[-1] if models else None


@dataclass(slots=True)
class Run:
    """What all stages of one process share."""

    recipe: Recipe
    folder: RunFolder
    monitor: Monitor
    ledger: Ledger
    stop: StopRequest
    incarnation: str
    packed: Mapping[str, PackedNumbers] = field(default_factory=dict)  # what packed folders hold, by stage
    limit: int | None = None  # steps a training stage makes at most, whatever its schedule plans for

    def place(self, text: str) -> Path:
        """The directory that `stage:NAME` (what it trained) or `models:NAME` means. Raises SetupError."""
        kind, _, name = text.partition(":")
        if kind == "models":
            return aux_directory(self.recipe, name)
        facts = self.folder.state["stages"].get(name, {})
        inside = facts.get("reward_model") or facts.get("model")
        if inside is None:
            raise SetupError(f"{text}: no stage {name!r} has left a model in {self.folder.path}")
        return self.folder.path / inside

    @property
    def seed_name(self) -> str:
        """What enters every sampling seed; a stage adds its own name."""
        return f"{self.recipe.name}:{self.recipe.seed}"


def run_recipe(
    recipe: Recipe, *, fresh: bool = False, quiet: bool = False, limit: int | None = None
) -> RunResult:
    """Run (or go on with) a recipe in its run folder. `limit`: only the first steps of every training stage,
    under the schedules of the whole one.

    Stages that are done are skipped; one that was interrupted goes on from its last checkpoint. SIGINT and
    SIGTERM end it at a safe point with `stopped` set. Raises RunFolderError, RecipeError and the stages' own
    errors.
    """
    import_all(recipe.imports)
    packed, unread = packed_numbers(recipe)
    plan(recipe, algorithms=resolve_all(recipe), packed=packed).check()
    if unread:
        raise RecipeError(recipe.name, [Problem(text) for text in unread])
    folder = RunFolder.open(recipe, fresh=fresh)
    try:
        monitor = Monitor(folder.path, **recipe.monitor.model_dump(), quiet=quiet)
    except BaseException:  # whatever it is, the lock goes
        folder.close()
        raise
    stop = StopRequest()
    result = RunResult(folder.path)
    try:
        _prepare_process(recipe)
        _introduce(recipe, monitor)
        incarnation = f"{os.getpid()}-{secrets.token_hex(4)}"
        url = resolve_secrets(recipe.buffer.url or "") or f"sqlite:///{folder.path / 'ledger.sqlite'}"
        with stop.handling(), Ledger(url, owner=incarnation, lease_s=recipe.buffer.lease_s) as ledger:
            run = Run(recipe, folder, monitor, ledger, stop, incarnation, packed, limit)
            try:
                asyncio.run(_run_stages(run))
            except Stopped as reason:
                result.stopped = str(reason)
                monitor.info(f"{reason}; start the same command again to go on")
        result.stages = folder.state["stages"]
        monitor.report()
    finally:
        monitor.close()
        folder.close()
    return result


def _introduce(recipe: Recipe, monitor: Monitor) -> None:
    """The run's own facts, for the report."""
    import torch

    shape = policy_shape(recipe)
    monitor.about(
        name=recipe.name,
        device=recipe.runtime.device,
        threads=torch.get_num_threads(),
        parameters=shape.parameters if shape else None,
        seed=recipe.seed,
    )


def _prepare_process(recipe: Recipe) -> None:
    """Threads once for the whole process; nothing but the monitor talks."""
    import torch

    hush_libraries()
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)


async def _run_stages(run: Run) -> None:
    start = policy_directory(run.recipe, run.folder.path)
    models: dict[str, Path] = {"start": start}
    for number, stage in enumerate(run.recipe.stages, 1):
        done = run.folder.state["stages"].get(stage.name)
        if done is None:
            source = list(models)[-1]
            with _header(run, stage, number, source):
                if stage.mode == "bench":
                    facts = await bench_stage(run, stage, models)
                else:
                    facts = await _train(run, stage, models[source])
            run.folder.finish_stage(stage.name, facts)
            done = facts
        if done.get("model"):
            models[stage.name] = run.folder.path / done["model"]


def _header(run: Run, stage: Stage, number: int, source: str) -> StageHandle:
    """Everything logged from here on belongs to `stage`."""
    what = {"train": "supervised", "both": f"reinforcement ({stage.kind})", "bench": "evaluation"}[stage.mode]
    ends = plan(run.recipe, packed=run.packed).stage(stage.name)
    return run.monitor.stage(
        stage.name,
        what=f"stage {number} of {len(run.recipe.stages)}: {what}",
        source="" if stage.mode == "bench" else source,
        until=ends.ends,
        steps=ends.steps,
    )


@contextmanager
def _setup_set_aside() -> Iterator[None]:
    """Spare what stands now from garbage collection: half a million objects of the libraries, looked through
    again and again while rollouts come and go, cost a sixth of a small model's run."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20 * before[0], *before[1:])  # a step's rollouts are thousands of objects, none garbage
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _train(run: Run, stage: Stage, start: Path) -> dict[str, Any]:
    """Run one training stage to its end and export its model."""
    gc.collect()  # what the stage before held in circles, before as much is loaded again
    async with AsyncExitStack() as stack:
        composed = await compose_stage(run, stage, start, stack)
        with _setup_set_aside():
            outcome = await composed.run()
        model = run.folder.stage(stage.name) / "model"
        await composed.in_trainer(lambda: composed.trainer.export(model))
    run.monitor.info(f"stage {stage.name} ended after step {outcome.step}: {outcome.why}; model in {model}")
    inside = str(model.relative_to(run.folder.path))  # a run folder may be moved
    # Not `model`: a reward model is no policy that the next stage could start from.
    key = "model" if composed.algorithm.produces == "policy" else composed.algorithm.produces
    facts = {key: inside, "step": outcome.step, "why": outcome.why, "evals": outcome.evals}
    return facts if outcome.selected is None else facts | {"selected": outcome.selected}
