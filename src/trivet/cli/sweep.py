"""`trivet sweep`: short runs over values of any key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console


def sweep(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file, a run folder or a name from `trivet recipes`")
    ],
    axes: Annotated[
        list[str],
        typer.Argument(metavar="KEY=V1,V2,...", help="e.g. stages.sft.trainer.lr=1e-5,3e-5 (YAML values)"),
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each run")],
    stage: Annotated[str | None, typer.Option(help="Training stage; default: the first")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default: sweeps/NAME")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed rows again")] = False,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep models and checkpoints")] = False,
) -> None:
    """Short runs over all combinations of values, marked stable, spiking or diverging.

    The same command again runs only what has not ended. The table is in sweep.md and sweep.jsonl too.
    """
    from rich.console import Console
    from rich.progress import Progress

    from trivet.recipe import load_recipe
    from trivet.runtime.sweep import Axis, Row, table
    from trivet.runtime.sweep import sweep as run_sweep

    parsed = [Axis.parse(text) for text in axes]
    folder = output or Path("sweeps") / load_recipe(recipe).name

    console = Console()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=None)

        def say(row: Row, done: int, total: int) -> None:
            settings = ", ".join(f"{key}={value}" for key, value in row.settings.items())
            why = f", {row.why[:200]}" if row.why else ""
            progress.console.print(f"{done}/{total}  {settings}: {row.mark}{why}", markup=False)
            progress.update(bar, completed=done, total=total)

        rows = run_sweep(
            *(recipe, parsed),
            steps=steps,
            folder=folder,
            stage=stage,
            workers=workers,
            retry=retry,
            keep_weights=keep_weights,
            say=say,
        )
    _print(console, *table(rows))
    typer.echo(f"{folder / 'sweep.md'}, {folder / 'sweep.jsonl'}")


def _print(console: Console, columns: list[str], cells: list[list[str]]) -> None:
    """The table; what is to be said of its rows stands below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    colours = {"stable": "green", "spiking": "yellow", "diverging": "red", "failed": "red"}
    shown = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for column in columns[:-1]:
        shown.add_column(column, overflow="fold")
    for row in cells:
        shown.add_row(*(Text(cell, colours.get(cell, "")) for cell in row[:-1]))
    console.print(shown)
    varied = columns.index("steps")
    for row in cells:
        if row[-1]:
            settings = ", ".join(f"{key}={value}" for key, value in zip(columns, row[:varied], strict=False))
            console.print(f"{settings}: {row[-1]}", markup=False, highlight=False)
