"""`trivet data`: build, inspect, decontaminate, compose, pack, report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from trivet.data.report import Table
    from trivet.recipe import Recipe

data_app = typer.Typer(
    help="From raw chats to a clean, packed training set.", no_args_is_help=True, rich_markup_mode=None
)

_WIDE = 240

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with a data section")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="What `trivet data build` wrote")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="e.g. data.pack.length=4096 (YAML values)")
]


def _load(recipe: str, overrides: list[str] | None) -> Recipe:
    from trivet.recipe import load_recipe

    return load_recipe(recipe, overrides or ())


@contextmanager
def _console(quiet: bool = False) -> Iterator[Console]:
    from rich.console import Console

    # Into a file or a pipe tables are as wide as they need to be.
    yield Console(quiet=quiet, highlight=False, width=None if sys.stdout.isatty() else _WIDE)


class _Bars:
    """One bar for each phase that is under way."""

    def __init__(self, console: Console, quiet: bool) -> None:
        from trivet.monitor.progress import Board

        self._board = Board(console, quiet=quiet)
        self._bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        bar = self._bars.get(what)
        if bar is None:
            bar = self._bars[what] = self._board.add(what, total)
        bar.advance(done - bar.done)
        if done >= total:
            bar.close()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()


@data_app.command("build")
def build_command(
    recipe: RecipeName,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors")] = False,
) -> None:
    """Build the data section of a recipe, or go on with it where it was stopped."""
    from trivet.data.build import build, output_of
    from trivet.data.report import tables_of

    loaded = _load(recipe, overrides)
    with _console(quiet) as console:
        bars = _Bars(console, quiet)
        try:
            manifest = build(loaded, say=lambda text: console.print(text, markup=False), progress=bars)
        finally:
            bars.close()
        for table in tables_of(manifest):
            _print(console, table)
        console.print(f"report: {output_of(loaded) / 'report.html'}", markup=False)


@data_app.command("report")
def report_command(folder: Folder) -> None:
    """Print a build's tables and write its report.html and figures anew."""
    from trivet.data.report import tables_of, write_report
    from trivet.data.shards import read_manifest

    with _console() as console:
        for table in tables_of(read_manifest(folder)):
            _print(console, table)
        console.print(f"report: {write_report(folder)}", markup=False)


def _print(console: Console, table: Table) -> None:
    from rich.table import Table as Grid
    from rich.text import Text

    from trivet.data.report import number
    from trivet.monitor.safe_text import printable

    grid = Grid(title=table.title, title_justify="left", box=None, header_style="dim", pad_edge=False)
    for i, name in enumerate(table.columns):
        right = all(isinstance(row[i], int | float) for row in table.rows)
        shortest = max((len(str(row[i])) for row in table.rows if not right), default=0)
        least = None if right else min(20, shortest)
        grid.add_column(name, justify="right" if right else "left", overflow="fold", min_width=least)
    for row in table.rows:
        grid.add_row(*(Text(printable(number(value))) for value in row))
    console.print(grid)
    console.print()


@data_app.command("inspect")
def inspect_command(
    folder: Folder,
    which: Annotated[str, typer.Argument(metavar="EXAMPLE", help="Number (from 0) or id")] = "0",
    source: Annotated[str | None, typer.Option(help="Count the examples of this source only")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids too")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Marks instead of colours")] = False,
) -> None:
    """Show one example as it will be trained: trained, context, and what was stripped from its source."""
    import numpy as np

    from trivet.data.inspect import Span, find, spans, stripped
    from trivet.data.shards import ShardError, read_manifest
    from trivet.recipe.data import Data
    from trivet.render import load_tokenizer

    manifest = read_manifest(folder)
    row = find(folder, which, source)
    if row["ids"] is None:
        raise ShardError(
            f"{folder} was built without tokens (data.render: false): nothing shows what is trained"
        )
    tokenizer = load_tokenizer(manifest["tokenizer_path"])
    shown = spans(
        np.asarray(row["ids"]),
        np.asarray(row["train"], np.float32),
        lambda part: tokenizer.decode(part.tolist(), skip_special_tokens=False),
    )
    gone = stripped(row, Data.model_validate(manifest["configuration"]))
    with _console() as console:
        done = f"; {', '.join(row['done'])}" if row["done"] else ""
        console.print(f"{row['id']} ({row['place']}, part {row['part']}{done})", markup=False)
        console.print(f"{row['tokens']} tokens, {row['trained']} trained", markup=False)
        for span in shown:
            _span(console, span, plain)
            if ids:
                console.print(" ".join(map(str, span.ids)), style="cyan", markup=False, soft_wrap=True)
        console.print()
        for message, text in gone.items():
            console.print(f"stripped from message {message}:", style="dim", markup=False)
            _span(console, Span(text, "stripped"), plain)
            console.print()


_MARKS = {"trained": ("[[", "]]"), "context": ("", ""), "stripped": ("~~", "~~")}
_STYLES = {"trained": "bold green", "context": "dim", "stripped": "red strike"}


def _span(console: Console, span: Any, plain: bool) -> None:
    from rich.text import Text

    from trivet.monitor.safe_text import printable

    before, after = _MARKS[span.kind] if plain else ("", "")
    style = "" if plain else _STYLES[span.kind]
    console.print(Text(f"{before}{printable(span.text)}{after}", style), end="", soft_wrap=True)


@data_app.command("decontaminate")
def decontaminate_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Prompts or conversations: file or glob")],
    benchmark: Annotated[
        list[str], typer.Option("--benchmark", "-b", help="NAME=FILE; may be given several times")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Rows that are kept, as JSON lines")],
    passes: Annotated[
        list[str] | None, typer.Option("--pass", "-p", help="In order; default: sampled_8gram")
    ] = None,
    borderline: Annotated[str, typer.Option(help="drop, keep or review (left out, and written)")] = "review",
    allow: Annotated[str | None, typer.Option(help="File of items that may stay, with reasons")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output")] = False,
) -> None:
    """Take rows that hold benchmark items out of any file, prompts of RL tasks too."""
    from trivet.data.decontaminate import decontaminate

    with _console() as console:
        report = decontaminate(
            source,
            benchmark,
            output,
            passes=passes or ["sampled_8gram"],
            borderline=borderline,
            allow=allow,
            force=force,
        )
        console.print(report, markup=False)


@data_app.command("compose")
def compose_command(recipe: RecipeName, overrides: Overrides = None) -> None:
    """What the recipe's compose section would make of a finished build; nothing is written."""
    from trivet.data.build import mix, output_of
    from trivet.data.report import mix_tables
    from trivet.data.shards import read_manifest

    loaded = _load(recipe, overrides)
    folder = output_of(loaded)
    with _console() as console:
        for table in mix_tables(mix(loaded, folder, read_manifest(folder))[1]):
            _print(console, table)


@data_app.command("pack")
def pack_command(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Mix and pack the examples of a finished build anew, by the recipe's compose and pack sections."""
    from trivet.data.build import mix_and_pack, output_of
    from trivet.data.report import tables_of, write_report
    from trivet.data.shards import read_manifest
    from trivet.data.work import alone_in

    loaded = _load(recipe, overrides)
    folder = output_of(loaded)
    read_manifest(folder)
    with _console() as console:
        bars = _Bars(console, False)
        try:
            with alone_in(folder):
                manifest = mix_and_pack(loaded, folder, read_manifest(folder), bars)
        finally:
            bars.close()
        for table in tables_of(manifest):
            if table.title.startswith(("Mix", "Asked", "Packs")):
                _print(console, table)
        console.print(f"report: {write_report(folder)}", markup=False)
