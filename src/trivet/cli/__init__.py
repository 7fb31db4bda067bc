"""The command line: parse, call, print. Everything heavy is imported by the command that needs it.

Exit codes: 0 done; 1 it failed (the message says why); 2 wrong usage or a recipe that cannot be run, nothing
was started; 3 stopped on request, the same command goes on; 130 interrupted at the keyboard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivet.cli.data import data_app
from trivet.cli.play import play
from trivet.cli.score import score
from trivet.cli.sweep import sweep

if TYPE_CHECKING:
    from trivet.algorithms import Algorithm
    from trivet.recipe import Plan, Recipe
    from trivet.recipe.schema import Tasks
    from trivet.recipe.supervised import PackedNumbers

FAILED, USAGE, STOPPED, INTERRUPTED = 1, 2, 3, 130
_PREVIEWED_CHARACTERS = 2000

app = typer.Typer(
    name="trivet",
    help="Post-train open-weight language models: SFT, reinforcement learning, evaluation.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or recipe, 3 stopped on request (run it again to go "
    "on), 130 interrupted. With --debug anywhere, errors come with their traceback.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Make or import a model directory.", no_args_is_help=True, rich_markup_mode=None)
tasks_app = typer.Typer(help="Look at tasks.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model")
app.add_typer(tasks_app, name="tasks")
app.add_typer(data_app, name="data")
app.command()(score)
app.command()(play)
app.command()(sweep)

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A file, a run folder or a name from `trivet recipes`")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="e.g. stages.rl.trainer.lr=1e-4 (YAML values)"),
]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors")] = False,
) -> None:
    """The option is taken out by `main`, so that it may stand anywhere; here it is only documented."""


# -- recipes -------------------------------------------------------------------------------------


@app.command()
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Put an existing run folder aside and start anew")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings only")] = False,
) -> None:
    """Run a recipe, or go on with it where it stopped."""
    from trivet.recipe import load_recipe, plan

    loaded = load_recipe(recipe, overrides or ())
    if dry_run:
        _print_plan(_preview(loaded))
        return
    plan(loaded, algorithms=_algorithms(loaded)).check()
    from trivet.runtime import run_recipe

    result = run_recipe(loaded, fresh=fresh, quiet=quiet)
    if result.stopped:
        typer.echo(f"{result.stopped}; run the same command again to go on", err=True)
        raise typer.Exit(STOPPED)


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the resolved recipe instead")] = False,
) -> None:
    """What a recipe comes to: prompts, rollouts, tokens, steps, memory; and what stands against it."""
    from trivet.recipe import dump_recipe, load_recipe, redact

    loaded = load_recipe(recipe, overrides or ())
    if resolved:
        typer.echo(redact(dump_recipe(loaded)), nl=False)
        return
    _print_plan(_preview(loaded))


@app.command()
def recipes() -> None:
    """The recipes that trivet carries."""
    from trivet.recipe import packaged_recipes

    _print_columns(packaged_recipes())


def _print_plan(preview: Plan) -> None:
    from trivet.recipe import redact

    typer.echo(redact(preview.text()))
    if preview.problems:
        raise typer.Exit(USAGE)


def _algorithms(recipe: Recipe) -> dict[str, Algorithm]:
    """Each training stage's algorithm. Raises AlgorithmError, RecipeError."""
    from trivet.algorithms import resolve_all
    from trivet.rewards.load import import_all

    import_all(recipe.imports)
    return resolve_all(recipe)


def _preview(recipe: Recipe) -> Plan:
    """The plan with the tasks counted; what cannot be read is a problem of the plan."""
    from trivet.recipe import plan

    problems: list[str] = []
    counts = {s.name: _count(recipe, s.name, "tasks", s.tasks, problems) for s in recipe.stages}
    held = {s.name: _count(recipe, s.name, "eval.tasks", s.eval.tasks, problems) for s in recipe.stages}
    packed: dict[str, PackedNumbers] = {}
    if any(stage.packed or stage.held_out for stage in recipe.stages):
        from trivet.runtime.packs import packed_numbers

        packed, unread = packed_numbers(recipe)
        problems += unread
    preview = plan(recipe, counts, eval_tasks=held, algorithms=_algorithms(recipe), packed=packed)
    return replace(preview, problems=(*preview.problems, *problems))


def _count(recipe: Recipe, stage: str, key: str, configs: Sequence[Tasks], problems: list[str]) -> int | None:
    """How many tasks the tasksets hold; None, and a problem, when one cannot be read."""
    from trivet.tasks import TasksetError, load_tasks

    if not configs:
        return None
    try:
        return sum(len(load_tasks(config, seed=recipe.seed).tasks) for config in configs)
    except TasksetError as error:
        problems.append(f"stages.{stage}.{key}: {error}")
        return None


# -- looking -------------------------------------------------------------------------------------


@tasks_app.command("show")
def tasks_show(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="generated:NAME, a data file, or a recipe (all its tasksets)"),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="of the taskset (args.max=99), or of the recipe"),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Tasks to show of each taskset")] = 3,
    seed: Annotated[int, typer.Option(help="Order of shuffled tasks; a recipe brings its own")] = 0,
) -> None:
    """The prompts that come out of a taskset, and what their verifier gets."""
    from trivet.tasks import load_tasks

    shown: dict[str, str] = {}
    for title, config, its_seed in _tasksets(source, overrides or (), seed):
        taskset = load_tasks(config, seed=its_seed)
        if first := shown.get(taskset.fingerprint):
            typer.echo(f"{title}: the same {len(taskset.tasks):,} tasks as {first}")
            continue
        shown[taskset.fingerprint] = title
        typer.echo(f"{title}: {len(taskset.tasks):,} tasks, fingerprint {taskset.fingerprint}")
        if taskset.layout:
            typer.echo(f"  layout {taskset.layout}, for env: {taskset.layout_env}")
        if taskset.dropped:
            typer.echo("  dropped: " + ", ".join(f"{why} {n:,}" for why, n in taskset.dropped.items()))
        for task in taskset.tasks[:count]:
            _print_task(task)


def _tasksets(source: str, overrides: Sequence[str], seed: int) -> Iterator[tuple[str, Tasks, int]]:
    from trivet.recipe import load_recipe, load_section, packaged_recipes
    from trivet.recipe.schema import Tasks

    is_recipe = source.endswith((".yaml", ".yml")) or source in packaged_recipes()
    if not is_recipe and not (Path(source) / "recipe.yaml").is_file():
        config = load_section(Tasks, {"source": source}, overrides)
        yield config.label, config, seed
        return
    recipe = load_recipe(source, overrides)
    for stage in recipe.stages:
        for key, configs in (("tasks", stage.tasks), ("eval.tasks", stage.eval.tasks)):
            for config in configs:
                yield f"stages.{stage.name}.{key} {config.label}", config, recipe.seed


def _print_task(task: Any) -> None:
    typer.echo(f"\n  {task.id}  (environment {task.env})")
    for message in task.messages:
        text = (
            message.text
            if len(message.text) <= _PREVIEWED_CHARACTERS
            else message.text[:_PREVIEWED_CHARACTERS] + " ..."
        )
        typer.echo(f"    {message.role}: " + text.replace("\n", "\n      "))
    if task.payload:
        typer.echo(f"    payload: {task.payload}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    plots: Annotated[bool, typer.Option(help="Draw plots/ too")] = True,
) -> None:
    """Write report.html (and plots/) from what a run folder holds."""
    from trivet.monitor.page import report as write

    typer.echo(str(write(run, plots=plots)))


@app.command()
def doctor() -> None:
    """What this machine offers, what is missing, and how to get it."""
    from trivet.doctor import examine, healthy

    findings = examine()
    width = max(len(finding.topic) for finding in findings)
    marks = {"ok": "ok", "note": "note", "missing": "MISSING"}
    for finding in findings:
        typer.echo(f"{marks[finding.status]:<7}  {finding.topic:<{width}}  {finding.value}")
        if finding.hint:
            typer.echo(f"{'':<7}  {'':<{width}}  -> {finding.hint}")
    if not healthy(findings):
        typer.echo("\nSomething essential is missing; see the lines above.", err=True)
        raise typer.Exit(FAILED)


@app.command()
def version() -> None:
    """Versions of trivet and of what it stands on."""
    import platform
    from importlib import metadata

    import trivet

    found = {"trivet": trivet.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "renderers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    _print_columns(found)


def _print_columns(rows: Mapping[str, str]) -> None:
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")


# -- models --------------------------------------------------------------------------------------


@model_app.command("tiny")
def model_tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="e.g. hidden=128 layers=4 seed=1")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is there")] = False,
) -> None:
    """Make a tiny model from random initialisation."""
    from trivet.recipe import load_section
    from trivet.recipe.schema import TinyModel

    config = load_section(TinyModel, {}, settings or ())
    from trivet.render.tiny import make_tiny

    typer.echo(str(make_tiny(config, directory, force=force)))


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="smollm2, or a .gguf file")],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY")],
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is there")] = False,
) -> None:
    """Turn a GGUF file into a model directory that can be trained (float32)."""
    from trivet.render.imports import import_gguf

    typer.echo(str(import_gguf(source, directory, force=force)))


@app.command()
def chat(
    model: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its last model) or a model directory"),
    ],
    stage: Annotated[str | None, typer.Option(help="Of a run folder: this stage's model")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer")] = 256,
    seed: Annotated[int, typer.Option(help="Same seed, same answers")] = 0,
) -> None:
    """Talk to a model. An empty line starts over, end of input (Ctrl-D) ends."""
    from trivet.chat import open_chat

    with open_chat(
        model, stage=stage, system=system, temperature=temperature, max_tokens=max_tokens, seed=seed
    ) as talk:
        typer.echo(f"{talk.title}; an empty line starts over, Ctrl-D ends", err=True)
        while (line := _read_line()) is not None:
            if line.strip():
                typer.echo(talk.answer(line))
            else:
                talk.start_over()
                typer.echo("(new conversation)", err=True)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


# -- errors --------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs a command and ends the process with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    sys.exit(_run([a for a in arguments if a != "--debug"], debug))


def _run(arguments: list[str], debug: bool) -> int:
    command = typer.main.get_command(app)
    try:
        return command.main(arguments, prog_name="trivet", standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:  # said in a line where it is one of ours, else raised on
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong usage, in the parser's own words
            error.show()  # type: ignore[attr-defined]
            return USAGE
        messages = None if debug else readable_errors(error)
        if messages is None:
            raise
        for message in messages:
            typer.echo(f"error: {message}", err=True)
        if type(error).__name__ == "RecipeError":
            return USAGE
        typer.echo("(--debug shows where it came from)", err=True)
        return FAILED


def readable_errors(error: BaseException) -> list[str] | None:
    """The messages of an error that is meant for people: trivet's own, and the operating system's.

    None for anything else: that is a bug, and its traceback is what helps.
    """
    if isinstance(error, BaseExceptionGroup):
        parts = [readable_errors(part) for part in error.exceptions]
        return None if None in parts else list(dict.fromkeys(m for part in parts for m in part or ()))
    known = type(error).__module__.partition(".")[0] == "trivet"
    if not known and not (isinstance(error, OSError) and error.filename is not None):
        return None
    from trivet.recipe.secret import redact

    return [redact(str(error) or type(error).__name__)]
