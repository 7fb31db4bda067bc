"""`trivet score`: answers that exist already, through any environment's verifier."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from trivet.envs import SingleTurn
    from trivet.recipe.schema import Tasks
    from trivet.rewards.offline import Sample, Scores
    from trivet.tasks.answers import Answers, Pairs

_WIDE = 120  # of tables that go into a file or a pipe


EnvArgs = Annotated[
    list[str] | None,
    typer.Option("--env-arg", metavar="KEY=VALUE", help="of the environment; repeatable"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="how rows are read: fields.answer=gold"),
]
TaskSource = Annotated[
    str | None, typer.Option(metavar="SOURCE", help="Taskset that the rows' ids are of; rows hold answers")
]
PromptsOut = Annotated[
    Path | None, typer.Option(metavar="OUT", help="Write the different prompts as a taskset")
]
ScoresOut = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the scores; go on from those it has")
]
MaxUnscored = Annotated[
    float, typer.Option(min=0, max=1, help="Share of answers without a score that stops it")
]


def score(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL, JSON or Parquet, or a hub data set")],
    overrides: Overrides = None,
    env: Annotated[str | None, typer.Option(help="Environment whose verifier scores")] = None,
    env_arg: EnvArgs = None,
    response: Annotated[str | None, typer.Option(metavar="COLUMN", help="Where the answer stands")] = None,
    tasks: TaskSource = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Rows hold a chosen and a rejected answer")] = False,
    prompts: PromptsOut = None,
    output: ScoresOut = None,
    workers: Annotated[int, typer.Option(min=1, help="Verifier processes; 4 answers at once for each")] = 2,
    max_unscored: MaxUnscored = 0.1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress")] = False,
) -> None:
    """Score answers that exist already with any environment's verifier."""
    from trivet.recipe import load_section
    from trivet.recipe.schema import Tasks

    config = load_section(Tasks, {"source": file}, overrides or ())
    job = _Job(env, env_arg or (), workers, max_unscored, output, quiet)
    if pairs:
        _score_pairs(config, job, prompts)
    else:
        known = None if tasks is None else load_section(Tasks, {"source": tasks, "shuffle": False}, ())
        _score_answers(config, job, response, known, prompts)


class _Job:
    """How to score: what the command line says of it."""

    def __init__(
        self,
        env: str | None,
        pairs: Sequence[str],
        workers: int,
        max_unscored: float,
        output: Path | None,
        quiet: bool,
    ) -> None:
        self.env, self.workers, self.max_unscored, self.output = env, workers, max_unscored, output
        self.quiet = quiet
        self.args = env_args(pairs)

    def run(self, samples: Sequence[Sample], env: str) -> Scores:
        """The samples' scores; a line of progress as they come. Raises EnvError, OfflineError."""
        import json

        from trivet.rewards.offline import score_samples

        verifier = json.dumps([env, self.args], sort_keys=True, default=str)
        board, advance = _progress(len(samples), self.quiet)

        async def judge_all() -> Scores:
            async with make_judge(env, self.args, self.workers) as judged:

                async def judge(sample: Sample) -> Any:
                    return (await judged.verdict(sample.task, sample.message, sample.termination)).reward

                return await score_samples(
                    samples,
                    judge,
                    verifier=verifier,
                    parallel=4 * self.workers,
                    output=self.output,
                    max_unscored=self.max_unscored,
                    advance=advance,
                )

        try:
            return asyncio.run(judge_all())
        finally:
            board()


def env_args(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE arguments of an environment; a.b=1 is {a: {b: 1}}. Raises RecipeError."""
    from trivet.recipe import load_section
    from trivet.recipe.schema import Tasks

    return load_section(Tasks, {"source": "-"}, [f"env_args.{one}" for one in pairs]).env_args


def make_judge(env: str, args: dict[str, Any], workers: int) -> SingleTurn:
    """The environment, which must ask once and score the answer; `workers` go to one that takes them."""
    import inspect

    from trivet.envs import EnvError, SingleTurn, make_env

    made = make_env(env, **args)
    if not isinstance(made, SingleTurn):
        raise EnvError(f"environment {env!r} plays several turns; answers can be scored where there is one")
    if "workers" in inspect.signature(type(made)).parameters and "workers" not in args:
        made = make_env(env, **args, workers=workers)
    assert isinstance(made, SingleTurn)
    return made


def _progress(total: int, quiet: bool) -> tuple[Callable[[], None], Callable[[int], None]]:
    from trivet.monitor.progress import Board

    with_console = _console(stderr=True)
    bar = Board(with_console, quiet=quiet or not sys.stderr.isatty()).add("score", total)
    return bar.close, bar.advance


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDE)


# -- answers ---------------------------------------------------------------------------------------


def _score_answers(
    config: Tasks, job: _Job, response: str | None, known: Tasks | None, prompts: Path | None
) -> None:
    from trivet.envs import EnvError, environment_names
    from trivet.rewards.offline import check_unscored
    from trivet.tasks.answers import export_prompts, read_answers

    found = read_answers(config, response=response, tasks=known)
    env = job.env or found.env
    if not env:
        raise EnvError(f"which environment scores these answers? Say --env NAME ({environment_names()})")
    scores = job.run(found.samples, env)
    _print_answers(found, scores, env, _console())
    if prompts is not None:
        n = export_prompts([sample.task for sample in found.samples], prompts)
        typer.echo(f"{n:,} prompts: {prompts}")
    if job.output is not None:
        typer.echo(f"scores: {job.output}")
    check_unscored(scores, job.max_unscored, job.output)


def _print_answers(found: Answers, scores: Scores, env: str, console: Console) -> None:
    from trivet.rewards.offline import histogram, mean

    values_N, n = scores.values_N, len(scores.rewards)
    title = f"{n:,} answers, environment {env}" + (f", layout {found.layout}" if found.layout else "")
    rows = [("rows read", f"{found.rows:,}", "")]
    rows += [(f"dropped: {cause}", f"{k:,}", "") for cause, k in found.dropped.most_common()]
    rows.append(("scored", f"{len(values_N):,}", f"{len(values_N) / n:.1%}"))
    rows += [(f"unscored: {cause}", f"{k:,}", f"{k / n:.1%}") for cause, k in scores.causes().most_common()]
    if scores.resumed:
        rows.append(("of them kept from before", f"{scores.resumed:,}", ""))
    if len(values_N):
        rows.append(("mean", f"{mean(values_N):.4g}", ""))
    _table(console, title, ("", "n", "share"), rows)
    if not len(values_N):
        return
    bins = histogram(values_N)
    most = max(k for _, k in bins)
    shown = [(name, f"{k:,}", "#" * round(30 * k / most)) for name, k in bins]
    _table(console, "scores", ("score", "n", ""), shown)
    parts = [(name, f"{value:.4g}", f"{k:,}") for name, (value, k) in scores.parts().items()]
    if parts:
        _table(console, "parts", ("part", "mean", "n"), parts)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from trivet.monitor.safe_text import printable

    console.print(Text(printable(title)), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or name == "" else "right")
    for row in rows:
        table.add_row(*(Text(printable(one)) for one in row))
    console.print(table)
    console.print()


# -- pairs -----------------------------------------------------------------------------------------


def _score_pairs(config: Tasks, job: _Job, prompts: Path | None) -> None:
    from trivet.rewards.offline import check_unscored
    from trivet.tasks.answers import export_prompts, read_pairs

    found = read_pairs(config)
    samples = [side for pair in found.pairs for side in pair]
    scores = job.run(samples, job.env) if job.env else None
    _print_pairs(found, scores, config.label, _console())
    if prompts is not None:
        n = export_prompts([chosen.task for chosen, _ in found.pairs], prompts)
        typer.echo(f"{n:,} prompts: {prompts}")
    if job.output is not None and scores is not None:
        typer.echo(f"scores: {job.output} (chosen and rejected by turns)")
    if scores is not None:
        check_unscored(scores, job.max_unscored, job.output)


def _print_pairs(found: Pairs, scores: Scores | None, name: str, console: Console) -> None:
    from trivet.monitor.safe_text import printable

    n = len(found.pairs)
    title = name + (f", layout {found.layout}" if found.layout else "")
    rows = [("rows", f"{found.rows:,}", "")]
    rows += [
        (f"dropped: {cause}", f"{k:,}", f"{k / found.rows:.1%}") for cause, k in found.dropped.most_common()
    ]
    rows.append(("valid pairs", f"{n:,}", f"{n / found.rows:.1%}"))
    _table(console, title, ("", "n", "share"), rows)
    sides = []
    for place, side in enumerate(("chosen", "rejected")):
        letters = [len(pair[place].message.text) for pair in found.pairs]
        words = [len(pair[place].message.text.split()) for pair in found.pairs]
        value, scored = _side(scores, place)
        sides.append((side, f"{scored:,}", value, f"{sum(letters) / n:,.1f}", f"{sum(words) / n:,.1f}"))
    columns = ("side", "scored", "mean score", "mean letters", "mean words")
    _table(console, "answers", columns, sides)
    if scores is None:
        return
    for cause, k in scores.causes().most_common():
        console.print(f"unscored: {printable(cause)} {k:,}", markup=False)
    both = [(a.value, b.value) for a, b in _pairs_of(scores)]
    if both:
        higher, equal = sum(a > b for a, b in both), sum(a == b for a, b in both)
        console.print(
            f"of {len(both):,} pairs with two scores, the chosen answer's is higher in "
            f"{higher / len(both):.1%}, equal in {equal / len(both):.1%}"
        )


def _side(scores: Scores | None, place: int) -> tuple[str, int]:
    """Mean score of one side, and how many of it have one."""
    import numpy as np

    from trivet.rewards.offline import mean
    from trivet.types import Scored

    if scores is None:
        return "", 0
    values = [one.value for one in scores.rewards[place::2] if isinstance(one, Scored)]
    return (f"{mean(np.asarray(values, np.float64)):.4g}" if values else ""), len(values)


def _pairs_of(scores: Scores) -> list[tuple[Any, Any]]:
    from trivet.types import Scored

    sides = zip(scores.rewards[::2], scores.rewards[1::2], strict=True)
    return [(a, b) for a, b in sides if isinstance(a, Scored) and isinstance(b, Scored)]
