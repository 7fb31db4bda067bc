"""One taskset of a recipe, read or generated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from trivet.recipe import schema
from trivet.tasks.base import Taskset, TasksetError, fingerprint
from trivet.tasks.fields import FieldMap
from trivet.tasks.layouts import (
    Dropped,
    Layout,
    LayoutRows,
    hub_defaults,
    names_only_the_prompt,
    recognise,
)
from trivet.tasks.readers import Record, looks_like_file, read_files, read_hub
from trivet.types import Task

_GENERATED = "generated:"
_GYM = "reasoning_gym:"


def load_tasks(config: schema.Tasks, *, seed: int = 0) -> Taskset:
    """The taskset that `config` describes.

    `skip` and `limit` count rows of the source in its own order; what is left is then shuffled by `seed`.
    Raises TasksetError.
    """
    where = f"tasks {config.name or config.source!r}: "
    dropped: Counter[str] = Counter()
    layout: Layout | None = None
    try:
        if config.source.startswith((_GENERATED, _GYM)):
            tasks = _generated(config)
        else:
            tasks, layout = _read(config, dropped)
    except TasksetError as error:
        raise TasksetError(where + str(error)) from error
    if not tasks:
        causes = ", ".join(f"{cause}: {n}" for cause, n in dropped.items())
        raise TasksetError(f"{where}no task is left" + (f" (dropped: {causes})" if causes else ""))
    if config.shuffle:
        # By name: the order must not depend on the folder the data lies in.
        random.Random(f"{seed}/{config.label}").shuffle(tasks)
    name, env = (layout.name, layout.env) if layout else ("", "")
    if config.source.startswith(_GYM):
        name, env = "reasoning_gym", "puzzle"
    return Taskset(config.label, tasks, fingerprint(tasks), dict(dropped), name, env)


def _generated(config: schema.Tasks) -> list[Task]:
    if config.fields or config.subset:
        raise TasksetError("fields and subset are for files and hub data sets; a generator takes args")
    if config.source.startswith(_GYM):
        from trivet.tasks.gym import generate_puzzles as generate
    else:
        from trivet.tasks.generated import generate
    tasks = generate(config)
    stop = None if config.limit is None else config.skip + config.limit
    return tasks[config.skip : stop]


def records(source: str, subset: str | None, split: str) -> Iterator[Record]:
    """Rows of a file, a glob, or (where no such file is) a hub data set."""
    if looks_like_file(source):
        return read_files(source)
    parent = Path(source).expanduser().parent
    if source.startswith((".", "/", "~")) or (len(Path(source).parts) > 2 and parent.is_dir()):
        return read_files(source)  # which says that there is no such file
    return read_hub(source, *hub_defaults(source, subset, split))


def reader(config: schema.Tasks, first: Record) -> tuple[Callable[[Record], Task], Layout | None, bool]:
    """How rows like `first` become tasks, the layout they were recognised as, and whether the ids are the
    user's own column. A mapping or a template that names columns is followed instead of any layout. Raises
    TasksetError."""
    layout = None
    if not config.fields and names_only_the_prompt(config.template):
        layout = recognise(first.row)
    if layout is not None and layout.make is not None:
        rows = LayoutRows(config, layout)
        return (lambda record: rows.task(record.row, record.place)), layout, False
    if layout is not None and layout.fields:
        config = config.model_copy(update={"fields": dict(layout.fields)})
    fields = FieldMap(config, first)
    return fields.task, layout, "id" in fields.columns


def _read(config: schema.Tasks, dropped: Counter[str]) -> tuple[list[Task], Layout | None]:
    if config.args:
        raise TasksetError(f"args are for generated tasksets; {config.source!r} is read")
    rows = iter(records(config.source, config.subset, config.split))
    first = next(rows, None)
    if first is None:
        raise TasksetError(f"{config.source}: it is empty")
    make, layout, named = reader(config, first)
    stop = None if config.limit is None else config.skip + config.limit

    def every() -> Iterator[Record]:
        yield first
        yield from rows

    tasks: list[Task] = []
    places: dict[str, tuple[str, Task]] = {}
    for record in islice(every(), config.skip, stop):
        try:
            task = make(record)
        except Dropped as cause:
            dropped[str(cause)] += 1
            continue
        if task.id in places:
            place, other = places[task.id]
            if named or task != other:
                raise TasksetError(
                    f"id {task.id!r} stands at {place} and at {record.place}; ids must differ "
                    "(or leave fields.id out: ids are then made from the content)"
                )
            dropped["duplicate"] += 1
            continue
        places[task.id] = record.place, task
        tasks.append(task)
    if not tasks and not dropped:
        raise TasksetError(f"{config.source}: skip={config.skip} leaves no row")
    return tasks, layout
