"""A whole build: sources -> pieces -> examples -> (copies, mix) -> packs, over several processes.

Every phase leaves files that are there whole or not at all, and a phase does not do again what is there: a
build that was killed goes on, and the output is the same to the byte. Memory holds a few numbers per example,
the text of one piece's batch per process, and one window of packs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trivet.data.choose import composed, distinct, load_columns
from trivet.data.formats import FORMATS, UNKNOWN, detect
from trivet.data.formats.mapping import check_mapping
from trivet.data.pack import write_packs
from trivet.data.prepare import Job, Preparer
from trivet.data.read import Row, on_disk, pieces, read
from trivet.data.repair import switched_off
from trivet.data.report import write_report
from trivet.data.screen.report import ScreenReport
from trivet.data.screens import build_screen
from trivet.data.shards import BLOCK_ROWS, FORMAT, MANIFEST, file_entry, file_hash, write_json
from trivet.data.tally import SourceTally, Tally, added
from trivet.data.work import alone_in, run_jobs
from trivet.recipe import Recipe
from trivet.recipe.data import Data, Source
from trivet.recipe.schema import TinyModel
from trivet.types import canonical_json

INPUTS = ".inputs"
"""What the examples were made from, by sizes and times: tells whether they can stay."""
_ENOUGH_ROWS = 1000  # from so many on a source's share of bad rows is looked at while it is read
_HEAD_ROWS = 32


class BuildError(RuntimeError):
    """A build cannot go on; says at what and what to do."""


Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to prepare pieces; plain data."""

    data: dict[str, Any]
    tokenizer: str | None
    kind: str
    template_args: dict[str, Any] = field(default_factory=dict)

    def preparer(self) -> Preparer:
        data = Data.model_validate(self.data)
        screen = build_screen(data.decontaminate)[0] if data.decontaminate is not None else None
        return Preparer(
            data, screen=screen, tokenizer=self.tokenizer, kind=self.kind, template_args=self.template_args
        )


def setup_of(recipe: Recipe) -> Setup:
    """Raises BuildError when examples are to be rendered and there is no tokenizer."""
    data = _data(recipe)
    for source in data.sources:
        _check_names(source)
    tokenizer = data.tokenizer
    if tokenizer is None and not isinstance(recipe.policy.model, TinyModel):
        tokenizer = recipe.policy.model
    if not data.render:
        tokenizer = None
    elif tokenizer is None:
        raise BuildError(
            "examples are rendered with a tokenizer and the recipe names none: set policy.model or "
            "data.tokenizer to a model's directory, or data.render to false"
        )
    return Setup(data.model_dump(), tokenizer, recipe.policy.renderer, dict(recipe.policy.template_args))


def _check_names(source: Source) -> None:
    """Raises BuildError for a format or repair that does not exist."""
    if source.format != "auto" and source.format not in FORMATS:
        known = ", ".join(FORMATS)
        raise BuildError(f"source {source.label!r}: no format {source.format!r} (there are auto, {known})")
    try:
        switched_off(source.repairs)
    except KeyError as error:
        raise BuildError(f"source {source.label!r}: {error.args[0]}") from error


def _data(recipe: Recipe) -> Data:
    if recipe.data is None:
        raise BuildError("the recipe has no data section")
    return recipe.data


def output_of(recipe: Recipe) -> Path:
    """The build's folder."""
    return Path(_data(recipe).output.replace("{name}", recipe.name))


def build(
    recipe: Recipe,
    *,
    say: Say = lambda text: None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Build the recipe's data section into its folder; the manifest.

    Where only the mix or the packing changed, the examples of the finished build are mixed and packed anew.
    Raises BuildError, SourceError, WorkError and the like; what was done by then stays done.
    """
    data, setup, out = _data(recipe), setup_of(recipe), output_of(recipe)
    with alone_in(out):
        jobs = plan_jobs(data)
        _check_outside(out, used_files(setup, jobs))
        mark = fingerprint(setup, jobs)
        manifest = _finished(out, mark)
        if manifest is None:
            manifest = _examples(recipe, data, setup, jobs, mark, say, progress)
        else:
            say(f"the examples of {out} are built already")
        manifest = mix_and_pack(recipe, out, manifest, progress)
        if not (out / "report.html").exists():
            write_report(out)
        shutil.rmtree(out / "work", ignore_errors=True)
        return manifest


def _examples(
    recipe: Recipe, data: Data, setup: Setup, jobs: list[Job], mark: str, say: Say, progress: Progress
) -> dict[str, Any]:
    """Everything up to the examples: the manifest without a mix."""
    out = output_of(recipe)
    work = out / "work"
    preparer = setup.preparer()  # here first: what is wrong with the recipe is said once and plainly
    _begin(work, out, mark, say)
    for label, forms in forms_of(data, jobs).items():
        say(f"{label}: {', '.join(f'{n} file(s) {form}' for form, n in forms.items())}")
    tally, report = _prepare(data, setup, preparer, jobs, work, progress)
    for text in doubts(tally):
        say(text)
    names = [job.name for job in jobs]
    columns = load_columns([work / f"{name}.parquet" for name in names])
    keep_N, copies = distinct(data, work, names, columns)
    examples = _write_examples(out, work, jobs, keep_N, columns["piece"], progress)
    _reviews(out, work, jobs)
    manifest = {
        "format": FORMAT,
        "name": recipe.name,
        "configuration": data.model_dump(exclude={"workers", "output"}),
        "tokenizer": preparer.tokenizer_hash,
        "tokenizer_path": setup.tokenizer,
        "sources": {label: one.to_dict() for label, one in tally.items()},
        "screen": report.to_dict() if data.decontaminate is not None else None,
        "copies": copies,
        "examples": {"rows": int(keep_N.sum()), "files": examples},
        "files": input_files(jobs),
    }
    if fingerprint(setup, jobs) != mark:
        (work / "inputs").write_text("")  # what was made of them may not stay
        raise BuildError("input files changed while they were read; run the command again")
    write_json(out / MANIFEST, manifest)
    (out / INPUTS).write_text(mark)
    return manifest


# -- mixing and packing --------------------------------------------------------------------------


def mix(recipe: Recipe, out: Path, manifest: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    """(repeat_N: how often each example of a build is used, the composition), by the recipe's compose.

    What is longer than a pack is no part of the mix, and counted by source (`too_long`).
    """
    data = _data(recipe)
    columns = load_columns([out / entry["name"] for entry in manifest["examples"]["files"]])
    fits_N = np.ones(len(columns["tokens"]), bool)
    if data.pack is not None:
        fits_N = columns["tokens"] <= data.pack.length
    if not fits_N.any():
        raise BuildError(
            f"no example fits a pack of {data.pack.length if data.pack else 0} tokens (the shortest has "
            f"{columns['tokens'].min()}): raise data.pack.length"
        )
    repeat_N, composition = composed(data, columns, fits_N, seed=recipe.seed)
    count_S = np.bincount(columns["source"][~fits_N], minlength=len(columns["sources"]))
    too_long = {str(name): int(n) for name, n in zip(columns["sources"], count_S, strict=True) if n}
    return repeat_N, composition | {"too_long": too_long}


def mix_and_pack(recipe: Recipe, out: Path, manifest: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The manifest with composition and packs; packs of the same mix that are there stay."""
    data = _data(recipe)
    settings = [data.model_dump(include={"compose", "pack"}), recipe.seed, manifest["examples"]["files"]]
    mark = hashlib.sha256(canonical_json(settings).encode()).hexdigest()
    if manifest.get("mixed") == mark and _there(out, (manifest["packs"] or {}).get("files", ())):
        return manifest
    plain = {k: v for k, v in manifest.items() if k not in ("mixed", "composition", "packs")}
    repeat_N, composition = mix(recipe, out, plain)  # a mix that cannot be leaves the packs that are there
    note = out / "packed" / "mix"
    if not note.is_file() or note.read_text() != mark:
        shutil.rmtree(out / "packed", ignore_errors=True)
    write_json(out / MANIFEST, plain)  # whoever reads it now sees that there are no packs
    (out / "report.html").unlink(missing_ok=True)
    packs = None
    if data.pack is not None and manifest["tokenizer"]:
        note.parent.mkdir(exist_ok=True)
        note.write_text(mark)
        files = [entry["name"] for entry in manifest["examples"]["files"]]
        packs = write_packs(out, files, repeat_N, data.pack, seed=recipe.seed, progress=progress)
        note.unlink()
    configuration = plain["configuration"] | data.model_dump(include={"compose", "pack"})
    done = plain | {"configuration": configuration, "composition": composition, "packs": packs, "mixed": mark}
    write_json(out / MANIFEST, done)
    return done


# -- what there is to do -------------------------------------------------------------------------


def plan_jobs(data: Data) -> list[Job]:
    """The pieces of all sources, in order, with the form of each one's file. Raises SourceError and
    MappingError."""
    out: list[Job] = []
    for index, source in enumerate(data.sources):
        check_mapping(source.fields)
        forms: dict[str, str | None] = {}
        for piece in pieces(
            source.source, subset=source.subset, split=source.split, size=data.piece_mb << 20
        ):
            if piece.path not in forms:
                forms[piece.path] = None if source.fields else _form(source.format, piece)
            out.append(Job(f"part-{len(out):05d}", index, piece, forms[piece.path]))
    return out


def _form(given: str, piece: Any) -> str | None:
    if given != "auto":
        return given
    rows = (row.row for row in read(piece) if isinstance(row, Row))
    form = detect(rows, _HEAD_ROWS)
    return None if form == UNKNOWN else form


def forms_of(data: Data, jobs: list[Job]) -> dict[str, dict[str, int]]:
    """Source -> form -> files."""
    out: dict[str, dict[str, int]] = {source.label: {} for source in data.sources}
    files = {(job.source, job.piece.path): job.form for job in jobs}
    for (source, _), form in files.items():
        known = out[data.sources[source].label]
        name = "by the recipe's fields" if data.sources[source].fields else form or "of no known form"
        known[name] = known.get(name, 0) + 1
    return out


def fingerprint(setup: Setup, jobs: list[Job]) -> str:
    """What the examples are a function of: configuration, tokenizer, template files, and the inputs by size
    and time of change. A change means that nothing old may be used."""
    data = {k: v for k, v in setup.data.items() if k not in ("workers", "output", "compose", "pack")}
    stats = []
    for name in used_files(setup, jobs):
        path = Path(name)
        stats.append([name, *((s.st_size, s.st_mtime_ns) if path.is_file() and (s := path.stat()) else ())])
    parts = [FORMAT, data, setup.kind, setup.template_args, [job.piece.to_dict() for job in jobs], stats]
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def used_files(setup: Setup, jobs: list[Job]) -> list[str]:
    """Everything on disk that a build reads."""
    files = [job.piece.path for job in jobs if job.piece.kind != "hub"]
    data_files = setup.data["decontaminate"] or {}
    files += [one["source"] for one in data_files.get("benchmarks", ()) if on_disk(one["source"])]
    files += [str(data_files[k]) for k in ("allow", "decisions") if data_files.get(k)]
    files += [source["chat_template"] for source in setup.data["sources"] if source["chat_template"]]
    if setup.tokenizer is not None:
        files += [str(Path(setup.tokenizer) / name) for name in ("tokenizer.json", "chat_template.jinja")]
        files.append(str(Path(setup.tokenizer) / "tokenizer_config.json"))
    return list(dict.fromkeys(files))


def _check_outside(out: Path, files: list[str]) -> None:
    for name in files:
        if Path(name).resolve().is_relative_to(out.resolve()):
            raise BuildError(
                f"{name} lies in the build's own folder {out}, which a build empties: copy it elsewhere and "
                "name the copy"
            )


def input_files(jobs: list[Job]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of every input file."""
    paths = dict.fromkeys(job.piece.path for job in jobs if job.piece.kind != "hub")
    return [
        {"name": name, "bytes": Path(name).stat().st_size, "sha256": file_hash(Path(name))} for name in paths
    ]


def _finished(out: Path, mark: str) -> dict[str, Any] | None:
    try:
        same = (out / INPUTS).read_text() == mark
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = same and manifest.get("format") == FORMAT and _there(out, manifest["examples"]["files"])
    return manifest if whole else None


def _there(out: Path, files: Iterable[Mapping[str, Any]]) -> bool:
    """The files of a manifest are there, with their sizes."""
    paths = [(out / entry["name"], entry["bytes"]) for entry in files]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _is_build(out: Path) -> bool:
    if (out / "work" / "inputs").is_file():
        return True
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"format", "examples", "configuration"} <= manifest.keys()


def _begin(work: Path, out: Path, mark: str, say: Say) -> None:
    """An own folder of unfinished work; what is left of a build of other inputs is removed."""
    note = work / "inputs"
    if note.is_file() and note.read_text() == mark:
        say("going on with what was done before")
        return
    if any(out.iterdir()) and not _is_build(out):
        raise BuildError(f"{out} holds other things than a build: choose another data.output, or empty it")
    work.mkdir(exist_ok=True)
    note.write_text("")  # from here on the folder is known for a build's, whatever is left of it
    for name in ("examples", "packed", "review"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (INPUTS, MANIFEST, "report.html"):
        (out / name).unlink(missing_ok=True)
    for path in work.iterdir():
        if path != note:
            path.unlink()
    note.write_text(mark)


# -- preparing -----------------------------------------------------------------------------------


def _prepare_one(preparer: Preparer, given: tuple[Job, str]) -> None:
    job, folder = given
    preparer.prepare(job, Path(folder))


def _prepare(
    data: Data, setup: Setup, preparer: Preparer, jobs: list[Job], work: Path, progress: Progress
) -> tuple[Tally, ScreenReport]:
    from os import cpu_count

    todo = [(job, str(work)) for job in jobs if not (work / f"{job.name}.json").exists()]
    done = {job.name for job in jobs} - {job.name for job, _ in todo}
    results = {name: json.loads((work / f"{name}.json").read_text()) for name in sorted(done)}
    tally = added(_tally(one) for one in results.values())
    progress("preparing", len(done), len(jobs))
    workers = min(data.workers or cpu_count() or 1, len(todo))
    make, given = (Setup.preparer, (setup,)) if workers > 1 else (lambda own: own, (preparer,))
    for (job, _), _none in run_jobs(todo, _prepare_one, make, given, workers=workers, what="preparing"):
        results[job.name] = one = json.loads((work / f"{job.name}.json").read_text())
        tally = added([tally, _tally(one)])
        progress("preparing", len(results), len(jobs))
        label = data.sources[job.source].label
        _check_bad(label, tally[label], data.max_bad, finished=False)
    tally = added(_tally(results[job.name]) for job in jobs)  # in order, whoever was first
    report = ScreenReport()
    for job in jobs:
        report.merge(ScreenReport.from_dict(results[job.name]["screen"]))
    for source in data.sources:
        one = tally.setdefault(source.label, SourceTally())
        _check_bad(source.label, one, data.max_bad, finished=True)
    if not any(one.examples for one in tally.values()):
        raise BuildError(f"no example is left: {_why(tally)}")
    return tally, report


def _tally(result: Mapping[str, Any]) -> Tally:
    return {result["source"]: SourceTally.from_dict(result["tally"])}


def _check_bad(label: str, one: SourceTally, most: float, *, finished: bool) -> None:
    bad = sum(one.bad.values())
    if not bad or (one.rows < _ENOUGH_ROWS and not finished) or bad <= most * one.rows:
        return
    causes = ", ".join(f"{cause} {n}" for cause, n in one.bad.most_common())
    cause = one.bad.most_common(1)[0][0]
    places = "".join(f"\n  {place}: {text}" for place, text in one.seen.get(cause, []))
    raise BuildError(
        f"source {label!r}: {bad} of {one.rows} rows cannot be read ({causes}), more than data.max_bad "
        f"({most:.0%}). The first of them:{places}\nMend the data, say how it is written (format, fields), "
        "or raise data.max_bad"
    )


def doubts(tally: Tally) -> Iterator[str]:
    """What a person should look at although the build goes on."""
    for label, one in tally.items():
        if one.rows and not one.examples:
            causes = ", ".join(f"{cause} {n}" for cause, n in (one.bad + one.dropped).most_common(3))
            yield f"WARNING: source {label!r} gave nothing: {one.rows} rows, {causes}"
        for place, text in one.seen.get("unreadable_file", []):
            yield f"WARNING: source {label!r}: {place} breaks off ({text}); the rest is not in the set"


def _why(tally: Tally) -> str:
    total = added([{"all": one} for one in tally.values()]).get("all", SourceTally())
    causes = total.bad + total.dropped
    return ", ".join(f"{cause} {n}" for cause, n in causes.most_common()) or "the sources are empty"


# -- leaving ---------------------------------------------------------------------------------------


def _keep_rows(_state: None, given: tuple[str, str, np.ndarray]) -> None:
    """Copy the kept rows (bool _N) of a piece's shard into a file of the output."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, target, kept_N = given
    if kept_N.all():
        link = Path(target).with_name(f".{Path(target).name}.link")
        link.unlink(missing_ok=True)
        try:
            link.hardlink_to(source)
        except OSError:  # a file system without links
            shutil.copyfile(source, link)
        link.rename(target)
        return
    partial = Path(target).with_name(f".{Path(target).name}.partial")
    start = 0
    with (
        pq.ParquetFile(source) as file,
        pq.ParquetWriter(partial, file.schema_arrow, compression="zstd") as out,
    ):
        for batch in file.iter_batches(BLOCK_ROWS):
            mask = kept_N[start : start + batch.num_rows]
            start += batch.num_rows
            if mask.any():
                out.write_batch(batch.filter(pa.array(mask)))
    partial.rename(target)


def _write_examples(
    out: Path, work: Path, jobs: list[Job], keep_N: np.ndarray, piece_N: np.ndarray, progress: Progress
) -> list[dict[str, Any]]:
    """`examples/`: what is kept of every piece, a file each where there is anything."""
    folder = out / "examples"
    folder.mkdir(exist_ok=True)
    wanted = []
    for index, job in enumerate(jobs):
        mask = keep_N[piece_N == index]
        if mask.any():
            wanted.append((str(work / f"{job.name}.parquet"), str(folder / f"{job.name}.parquet"), mask))
    for done, given in enumerate(wanted):
        if not Path(given[1]).exists():
            _keep_rows(None, given)
        progress("writing examples", done + 1, len(wanted))
    return [file_entry(out, Path(target), int(mask.sum())) for _, target, mask in wanted]


def _reviews(out: Path, work: Path, jobs: list[Job]) -> None:
    """The borderline hits of all pieces, in order, as one file for a person."""
    parts = [path for job in jobs if (path := work / f"{job.name}.review.jsonl").exists()]
    if not parts:
        return
    (out / "review").mkdir(exist_ok=True)
    with open(out / "review" / "contamination.jsonl", "w", encoding="utf-8") as file:
        for path in parts:
            file.write(path.read_text(encoding="utf-8"))
