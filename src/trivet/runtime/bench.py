"""Bench stages: every model of the run so far against every held-out taskset, as one table."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.evals import Evaluation
from trivet.recipe import Stage
from trivet.runtime.build import Held, context_for, load_held, located, longest_prompt, model_context
from trivet.runtime.compose import open_engine, open_evaluator, open_renderer

if TYPE_CHECKING:
    from trivet.runtime.pipeline import Run


async def bench_stage(run: Run, stage: Stage, models: Mapping[str, Path]) -> dict[str, Any]:
    """Play `eval.tasks` with each model in `models` (name -> directory); same seeds for all."""
    run.monitor.rewind(stage.name, -1)  # a table that was broken off is begun anew
    results: dict[str, list[Evaluation]] = {}
    for place, (name, directory) in enumerate(models.items()):
        async with AsyncExitStack() as stack:
            held = await load_held(located(stage, run.place), run.recipe.seed, stack)
            results[name] = await _bench(run, stage, held, directory, place, name, stack)
    _show(run, stage, results)
    return {
        "evals": {
            f"{name}/{r.name}/{key}": value
            for name, evaluations in results.items()
            for r in evaluations
            for key, value in r.metrics.items()
        }
    }


async def _bench(
    run: Run, stage: Stage, held: list[Held], directory: Path, place: int, name: str, stack: AsyncExitStack
) -> list[Evaluation]:
    renderer = open_renderer(run, directory)
    tasks = [task for part in held for task in part.tasks]
    limit = model_context(directory)
    context = context_for(stage, longest_prompt(tasks, renderer, run.recipe.policy.system_prompt), limit)
    engine = open_engine(run, stage, directory, context, stack)
    evaluator = open_evaluator(run, stage, held, engine, renderer, context)
    return await evaluator.run_all(place, suffix=f"@{name}")


def _show(run: Run, stage: Stage, results: Mapping[str, list[Evaluation]]) -> None:
    ks = stage.eval.k
    rows = []
    for name, evaluations in results.items():
        for r in evaluations:
            m = r.metrics
            cells = [f"{m[f'pass@{k}']:.1%} ({m[f'pass@{k}/low']:.1%}-{m[f'pass@{k}/high']:.1%})" for k in ks]
            rows.append([name, r.name, *cells, f"{m['length']:.1f}", f"{m['truncated']:.1%}"])
    columns = ["model", "tasks", *(f"pass@{k} (95%)" for k in ks), "tokens", "cut off"]
    run.monitor.table(f"bench {stage.name}", columns, rows)
