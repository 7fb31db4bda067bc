"""Short runs of one recipe over the values of any of its keys, and a table of how they went.

Every combination of values is a row: a run of its own, in a folder and a process of its own. A row that has
ended, well or not, has `row.json` in its folder and is not run again; a row that was cut goes on.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trivet.recipe import Recipe, RecipeError, dump_recipe, load_recipe
from trivet.recipe.schema import Stage
from trivet.recipe.yamltext import YamlProblem, read_yaml
from trivet.runtime.folder import write_atomically
from trivet.runtime.verdict import verdict
from trivet.types import content_hash

_START_S = 600.0  # beyond its steps' own deadlines: loading, compiling, writing the model
_TERM_S = 60.0  # for a run that was asked to end
_LONGEST = 80  # characters of a row's folder name


class SweepError(ValueError):
    """A sweep cannot be started as asked; says what to write."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One key and the values it takes, as they are written in an override."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """`trainer.lr=1e-5,3e-5`; values are YAML, so `[0.9,0.95],[0.9,0.99]` are two. Raises SweepError."""
        key, equals, values = text.partition("=")
        if not equals or not key.strip() or not values.strip():
            raise SweepError(f"{text!r}: write KEY=VALUE,VALUE,... such as trainer.lr=1e-5,3e-5")
        try:
            found = read_yaml(f"[{values}]", f"{key}=", line=0)
        except YamlProblem as error:
            raise SweepError(f"{text!r}: the values are no YAML: {error}") from error
        if not all(v is not None for v in found):
            raise SweepError(f"{text!r}: a value is empty; write null where nothing is meant")
        shown = tuple(_written(value) for value in found)
        double = sorted({v for v in shown if shown.count(v) > 1})
        if double:
            raise SweepError(f"{text!r}: {', '.join(double)} comes twice")
        return cls(key.strip(), shown)


def _written(value: Any) -> str:
    """A value in one line of YAML."""
    if isinstance(value, str | bool | int | float):
        return json.dumps(value) if isinstance(value, str | bool) else str(value)
    return json.dumps(value)


@dataclass(slots=True)
class Row:
    """One combination: its settings, and how its run went. `mark` also `failed`; losses in nats or as the
    objective has them."""

    name: str
    settings: dict[str, str]
    steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    max_grad_norm: float | None = None
    mark: str = ""
    why: str = ""
    seconds: float = 0.0
    recipe: Recipe | None = field(default=None, repr=False)

    def record(self) -> dict[str, Any]:
        """JSON-able, without the recipe."""
        out = asdict(Row(**{**{f: getattr(self, f) for f in _PLAIN}, "recipe": None}))
        out.pop("recipe")
        return out


_PLAIN = (
    *("name", "settings", "steps", "first_loss", "last_loss", "max_grad_norm"),
    *("mark", "why", "seconds"),
)


def rows_of(source: str, axes: Sequence[Axis], *, steps: int, stage: str | None, folder: Path) -> list[Row]:
    """All combinations, the last axis fastest. A combination that makes no recipe is a failed row.

    Raises SweepError where a key comes twice or no combination can be loaded.
    """
    keys = [axis.key for axis in axes]
    double = sorted({key for key in keys if keys.count(key) > 1})
    if double:
        raise SweepError(f"{', '.join(double)} comes twice: give all its values behind one =")
    rows = []
    for values in itertools.product(*(axis.values for axis in axes)):
        settings = dict(zip(keys, values, strict=True))
        try:
            loaded = load_recipe(source, [f"{key}={value}" for key, value in settings.items()])
            short = _short(loaded, stage)
            row = Row(_folder_name(settings, [steps, dump_recipe(short)]), settings)
            row.recipe = short.model_copy(update={"output": str(folder / row.name)})
        except RecipeError as error:
            row = Row(_folder_name(settings, []), settings, mark="failed", why=str(error))
        rows.append(row)
    if all(row.recipe is None for row in rows):
        raise SweepError(f"none of {len(rows)} combinations can be run. The first: {rows[0].why}")
    return rows


def _folder_name(settings: Mapping[str, str], what: Sequence[Any]) -> str:
    """Readable, and another one for other settings, another recipe, another number of steps."""
    words = "_".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()) or "as-it-is"
    plain = re.sub(r"[^\w.=+-]+", "-", words)[:_LONGEST].strip("-.") or "row"
    return f"{plain}~{content_hash([*what, *sorted(settings.items())])[:6]}"


def _short(recipe: Recipe, name: str | None) -> Recipe:
    """The recipe cut down to one training stage, without evaluations and without a place of its own."""
    known = {stage.name: stage for stage in recipe.stages if stage.mode != "bench"}
    chosen = next(iter(known), None) if name is None else name
    if chosen is None or chosen not in known:
        raise SweepError(f"{chosen or 'no'!r} is no training stage; there is {', '.join(known) or 'none'}")
    data: dict[str, Any] = known[chosen].model_dump(by_alias=True)
    data |= {"keep_best": None, "held_out": None, "until": None}
    data["eval"]["tasks"] = []
    if all(data[key] is None for key in ("steps", "epochs", "max_seconds")):
        data["steps"] = 10**9  # it ended by an evaluation; here the number of steps does
    short = Stage.model_validate(data)
    return recipe.model_copy(update={"stages": [short], "output": "row"})


# -- running -------------------------------------------------------------------------------------


def sweep(
    source: str,
    axes: Sequence[Axis],
    *,
    steps: int,
    folder: Path,
    stage: str | None = None,
    workers: int = 1,
    retry: bool = False,
    keep_weights: bool = False,
    say: Callable[[Row, int, int], None] = lambda row, done, total: None,
) -> list[Row]:
    """Run what has not ended yet and return all rows, in the order of the grid.

    The first `steps` steps of the stage (default: the first that trains) are run as they would be in the
    whole run: a schedule goes on as planned. `retry` runs failed rows again; without `keep_weights` a row's
    checkpoints and model are removed once it has ended. `say` is told of each row that ends. Raises
    SweepError.
    """
    rows = rows_of(source, axes, steps=steps, stage=stage, folder=folder)
    folder.mkdir(parents=True, exist_ok=True)
    waiting: list[Row] = []
    for row in rows:
        if row.recipe is not None and not _ended(row, folder / row.name, retry):
            waiting.append(row)
    done = len(rows) - len(waiting)
    for row in _run_all(waiting, folder, steps, workers):
        done += 1
        _judge(row, folder / row.name)
        if not keep_weights:
            _strip(folder / row.name)
        write_atomically(folder / row.name / "row.json", json.dumps(row.record(), indent=1))
        say(row, done, len(rows))
    write_tables(folder, rows)
    return rows


def _ended(row: Row, folder: Path, retry: bool) -> bool:
    """Fill in a row that has ended before."""
    path = folder / "row.json"
    if not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("settings") != row.settings or (retry and found.get("mark") == "failed"):
        return False
    for name in _PLAIN:
        setattr(row, name, found[name])
    return True


def _run_all(rows: Sequence[Row], folder: Path, steps: int, workers: int) -> Iterator[Row]:
    """Each row in a process, `workers` at a time; rows as they end. All are ended when the caller is."""
    context = multiprocessing.get_context("spawn")
    left, running = list(rows), {}
    try:
        while left or running:
            while left and len(running) < workers:
                row = left.pop(0)
                running[row.name] = (row, *_start(context, row, folder, steps))
            wait([process.sentinel for _, process, _, _ in running.values()], timeout=1.0)
            for name, (row, process, begin, deadline) in list(running.items()):
                late = time.monotonic() > deadline
                if process.is_alive() and not late:
                    continue
                del running[name]
                _end(process)
                row.seconds = round(time.monotonic() - begin, 3)
                row.why = "took longer than its steps may" if late else _complaint(folder / name, process)
                row.mark = "failed" if row.why else ""
                yield row
    finally:
        for _, process, _, _ in running.values():
            _end(process)


def _start(context: Any, row: Row, folder: Path, steps: int) -> tuple[BaseProcess, float, float]:
    """(the process, when it began, when it must have ended)."""
    assert row.recipe is not None
    own = folder / row.name
    own.mkdir(parents=True, exist_ok=True)
    (own / "error.txt").unlink(missing_ok=True)
    process = context.Process(target=_child, args=(dump_recipe(row.recipe), str(own), steps))
    process.start()
    now = time.monotonic()
    return process, now, now + _START_S + steps * row.recipe.runtime.step_timeout_s


def _end(process: BaseProcess) -> None:
    """Ask for a safe point, then end it; one that has ended is left alone."""
    if process.is_alive():
        process.terminate()
        process.join(_TERM_S)
    if process.is_alive():
        process.kill()
    process.join(_TERM_S)


def _complaint(folder: Path, process: BaseProcess) -> str:
    """Why a run failed; "" where it did not."""
    path = folder / "error.txt"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    code = process.exitcode
    if code:
        return (
            f"the run's process ended by signal {-code}"
            if code < 0
            else f"the run's process ended with {code}"
        )
    return ""


def _child(text: str, folder: str, steps: int) -> None:
    """A row's run, in its process. What goes wrong is written down for the table."""
    from trivet.runtime.pipeline import run_recipe

    os.setpgrp()  # Ctrl-C is the sweep's, which then asks this process for a safe point
    threading.Thread(target=_die_with_parent, daemon=True).start()
    own = Path(folder)
    path = own / "short.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        result = run_recipe(load_recipe(path), quiet=True, limit=steps)
        if result.stopped:
            raise SystemExit(3)
    except Exception as error:  # any failure is a row of the table; its words are kept
        (own / "error.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def _die_with_parent() -> None:
    """A run must not go on in a folder that the next sweep will want; checkpoints are whole at any moment."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _judge(row: Row, folder: Path) -> None:
    """Fill in what the run's metrics say."""
    losses: list[float | None] = []
    norms: list[float | None] = []
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        if "train/loss" in record and not record.get("train/skipped"):
            losses.append(record["train/loss"])
            norms.append(record.get("train/grad_norm"))
    known = [x for x in losses if x is not None]
    heights = [x for x in norms if x is not None]
    row.steps = len(losses)
    row.first_loss, row.last_loss = (losses[0], losses[-1]) if losses else (None, None)
    row.max_grad_norm = max(heights, default=None)
    if "TrainingDiverged" in row.why:
        row.mark = "diverging"
    elif row.mark != "failed":
        row.mark, row.why = verdict(losses, norms) if known else ("failed", "no step was trained")


def _strip(folder: Path) -> None:
    """Remove what a table does not need: weights."""
    for name in ("checkpoints", "model", "weights"):
        for path in folder.glob(f"*/{name}"):
            shutil.rmtree(path)
    shutil.rmtree(folder / "tiny", ignore_errors=True)


# -- the table -----------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: the settings that differ, then what came of them."""
    keys = list(rows[0].settings) if rows else []
    varied = [key for key in keys if len({row.settings[key] for row in rows}) > 1] or keys
    columns = [*short_names(varied), "steps", "first loss", "last loss", "max grad norm", "mark", "why"]
    cells = [
        [
            *(row.settings[key] for key in varied),
            str(row.steps),
            *(_number(x) for x in (row.first_loss, row.last_loss, row.max_grad_norm)),
            row.mark,
            " ".join(row.why.split())[:200],
        ]
        for row in rows
    ]
    return columns, cells


def short_names(keys: Sequence[str]) -> list[str]:
    """The shortest endings of dotted keys that still tell them apart: lr, critic.lr."""
    out = []
    for key in keys:
        parts = key.split(".")
        endings = (".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1))
        others = [f".{other}" for other in keys if other != key]
        out.append(next((e for e in endings if not any(o.endswith(f".{e}") for o in others)), key))
    return out


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    columns, cells = table(rows)
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines) + "\n"


def write_tables(folder: Path, rows: Sequence[Row]) -> None:
    """`sweep.jsonl` and `sweep.md`."""
    records = "".join(json.dumps(row.record()) + "\n" for row in rows)
    write_atomically(folder / "sweep.jsonl", records)
    write_atomically(folder / "sweep.md", markdown(rows))
