"""report.html and figures/ of a build: what was read, dropped, mixed and packed, and what will be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from trivet.data.inspect import rows_of, spans
from trivet.data.screen.report import ScreenReport
from trivet.data.shards import read_manifest
from trivet.monitor.fields import compact
from trivet.monitor.files import write_text
from trivet.monitor.page import POLICY
from trivet.monitor.safe_text import esc
from trivet.monitor.sections import section
from trivet.recipe.data import Data

SHOWN_EXAMPLES = 2  # of each source
_SHOWN_TEXT = 6000
_STYLE = """
.trained { background: var(--good-bg); color: var(--good); } .stripped { background: var(--bad-bg);
  color: var(--bad); text-decoration: line-through; } .context { color: var(--soft); }
td .fill { display: block; height: 8px; border-radius: 4px; background: var(--c); min-width: 1px; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of plain values."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def tables_of(manifest: Mapping[str, Any]) -> list[Table]:
    """Every number of a build that a reader asks for, as tables; empty ones are left out."""
    out = [_sources(manifest), _causes(manifest), _done(manifest), *_contamination(manifest)]
    out += [_copies(manifest), *mix_tables(manifest["composition"]), _packs(manifest)]
    return [table for table in out if table is not None and table.rows]


def _in_order(manifest: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Source and what became of it, as the recipe lists them."""
    labels = [source.label for source in Data.model_validate(dict(manifest["configuration"])).sources]
    return [(label, manifest["sources"][label]) for label in labels]


def _sources(manifest: Mapping[str, Any]) -> Table:
    columns = ("source", "forms", "rows", "unreadable", "dropped", "examples")
    rows = []
    for label, one in _in_order(manifest):
        forms = ", ".join(one["formats"]) or "mapped"
        bad, dropped = (sum(one[name].values()) for name in ("bad", "dropped"))
        rows.append((label, forms, one["rows"], bad, dropped, one["examples"]))
    return Table("Sources", columns, rows)


def _causes(manifest: Mapping[str, Any]) -> Table:
    rows = []
    for label, one in _in_order(manifest):
        for cause, count in sorted({**one["bad"], **one["dropped"]}.items(), key=lambda kv: -kv[1]):
            place, text = one["seen"].get(cause, [["", ""]])[0]
            rows.append((label, cause, count, f"{place}: {text}" if place else ""))
    return Table("Why rows and examples were left out", ("source", "cause", "count", "the first"), rows)


def _done(manifest: Mapping[str, Any]) -> Table:
    rows = [
        (label, kind, name, count)
        for label, one in _in_order(manifest)
        for kind, key in (("repair or split", "done"), ("warning", "warnings"))
        for name, count in sorted(one[key].items(), key=lambda kv: -kv[1])
    ]
    return Table("What was done to examples", ("source", "kind", "name", "examples"), rows)


def _contamination(manifest: Mapping[str, Any]) -> list[Table]:
    if not manifest.get("screen"):
        return []
    report = ScreenReport.from_dict(manifest["screen"])
    out = []
    if rows := report.rows():
        out.append(Table("Contamination", tuple(rows[0]), [tuple(row.values()) for row in rows]))
    for one in report.passes.values():
        if rows := one.item_rows(20):
            title = f"Items that {one.name} found"
            out.append(Table(title, tuple(rows[0]), [tuple(row.values()) for row in rows]))
    return out


def _copies(manifest: Mapping[str, Any]) -> Table:
    rows = [
        (kind, source, count)
        for kind, found in (manifest.get("copies") or {}).items()
        for source, count in found["by_source"].items()
        if count
    ]
    return Table("Copies left out", ("kind", "source", "examples"), rows)


_MIX = (
    *("samples", "share_samples", "raw_tokens", "trained_tokens", "share_trained", "turns"),
    *("supervised_turns", "mean", "p50", "p95", "max"),
)


def mix_tables(composition: Mapping[str, Any]) -> list[Table]:
    """What a mix is made of, and what was asked."""
    table = composition["table"]
    names = {
        "categories": ("category",),
        "sources": ("source",),
        "cells": ("category", "source"),
    }
    total = {name: "all" for keys in names.values() for name in keys} | table["total"]
    out = []
    for what, title in (("categories", "Mix by category"), ("sources", "Mix by source")):
        columns = (*names[what], *_MIX)
        rows = [tuple(row[name] for name in columns) for row in [*table[what], total]]
        out.append(Table(title, tuple(name.replace("_", " ") for name in columns), rows))
    for what, title in (
        ("categories", "Asked and got, by category"),
        ("sources", "Asked and got, by source"),
    ):
        asked = composition.get("asked", {}).get(what, [])
        columns = (*names[what], "asked_share", "achieved_share", "asked", "achieved", "available", "passes")
        rows = [(*tuple(row[name] for name in columns[:-1]), f"{row['passes']:.2f}") for row in asked]
        out.append(Table(title, tuple(name.replace("_", " ") for name in columns), rows))
    too_long = [(source, count) for source, count in composition.get("too_long", {}).items()]
    return [*out, Table("Longer than a pack, left out of the mix", ("source", "examples"), too_long)]


def _packs(manifest: Mapping[str, Any]) -> Table | None:
    packs = manifest.get("packs")
    if not packs:
        return None
    names = ("capacity", "packs", "bound", "fill", "examples", "tokens", "trained")
    rows = [(*(packs[name] for name in names), f"{packs['cost'].get('max_over_mean', 1.0):.2f}")]
    return Table("Packs", (*(n.replace("_", " ") for n in names), "cost, worst over mean"), rows)


# -- the page --------------------------------------------------------------------------------------


def write_report(folder: str | Path, *, figures: bool = True) -> Path:
    """`report.html` (one file, nothing external) and, with `figures`, `figures/*.svg` and `.png`. Raises
    ShardError."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if figures:
        draw_figures(manifest, folder / "figures")
    parts = [
        section("numbers", "Tables", "".join(_html(table) for table in tables_of(manifest))),
        section("lengths", "Lengths", _histogram(manifest["composition"]["table"])),
        section("examples", "What will be trained", _examples(folder, manifest)),
    ]
    style = resources.files("trivet.monitor").joinpath("report.css").read_text(encoding="utf-8") + _STYLE
    total = manifest["composition"]["table"]["total"]
    facts = {
        "examples": f"{manifest['examples']['rows']:,}",
        "tokens": compact(total["raw_tokens"]),
        "trained tokens": compact(total["trained_tokens"]),
        "packs": f"{manifest['packs']['packs']:,}" if manifest.get("packs") else "none",
    }
    cells = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in facts.items())
    path = folder / "report.html"
    write_text(
        path,
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{esc(manifest['name'])} data · trivet</title><style>{style}</style></head>\n<body><main>\n"
        f'<header><div class="eyebrow">trivet data</div><h1>{esc(manifest["name"])}</h1>'
        f'<dl class="facts">{cells}</dl></header>\n'
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n",
    )
    return path


def number(value: Any) -> str:
    """A value for people: shares as percentages, thousands apart."""
    if isinstance(value, float):
        return f"{value:.1%}" if 0 <= value <= 1 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _html(table: Table) -> str:
    right = [all(isinstance(row[i], int | float) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(_cell("th", name, r) for name, r in zip(table.columns, right, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", number(v), r) for v, r in zip(row, right, strict=True)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="panel"><h3>{esc(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div></div>"
    )


def _cell(tag: str, text: str, right: bool) -> str:
    return f"<{tag}{' class=num' if right else ''}>{esc(text)}</{tag}>"


def _bins(table: Mapping[str, Any]) -> list[tuple[str, int]]:
    edges, counts = table["edges"], table["total"]["histogram"]
    names = [f"{a:,} to {b - 1:,}" for a, b in pairwise(edges)]
    names.append(f"{edges[-1]:,} and over")
    pairs = list(zip(names, counts, strict=True))
    used = [i for i, (_, count) in enumerate(pairs) if count]
    return pairs[used[0] : used[-1] + 1] if used else []


def _histogram(table: Mapping[str, Any]) -> str:
    bins = _bins(table)
    if not bins or not table["total"]["raw_tokens"]:
        return ""
    most = max(count for _, count in bins)
    rows = "".join(
        f'<tr><td class=num>{esc(name)}</td><td class=num>{count:,}</td><td class="c0" style="width:60%">'
        f'<svg viewBox="0 0 100 4" preserveAspectRatio="none" style="width:100%;height:10px"><rect '
        f'class="bar" width="{100 * count / most:.2f}" height="4"></rect></svg></td></tr>'
        for name, count in bins
    )
    return (
        '<div class="panel"><h3>Examples by tokens</h3><div class="scroll"><table><thead><tr><th class=num>'
        f"tokens</th><th class=num>examples</th><th></th></tr></thead><tbody>{rows}</tbody></table>"
        "</div></div>"
    )


def _examples(folder: Path, manifest: Mapping[str, Any]) -> str:
    """The first examples of every source: green is trained, grey is context."""
    data = Data.model_validate(dict(manifest["configuration"]))
    decode = None
    if manifest.get("tokenizer") and manifest.get("tokenizer_path"):
        decode = _decoder(str(manifest["tokenizer_path"]))
    left = {source.label: SHOWN_EXAMPLES for source in data.sources}
    parts = []
    for row in rows_of(folder):
        if not left.get(row["source"]):
            if not any(left.values()):
                break
            continue
        left[row["source"]] -= 1
        parts.append(_example(row, decode))
    return "".join(parts)


def _decoder(path: str) -> Any:
    from trivet.render import RenderError, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except RenderError:
        return None  # the tokenizer has moved since: messages are shown instead of tokens
    return lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _example(row: Mapping[str, Any], decode: Any) -> str:
    import numpy as np

    if row["ids"] is not None and decode is not None:
        runs = spans(np.asarray(row["ids"]), np.asarray(row["train"], np.float32), decode)
        text, length = "", 0
        for run in runs:
            text += f'<span class="{run.kind}">{esc(run.text[: max(0, _SHOWN_TEXT - length)])}</span>'
            length += len(run.text)
    else:
        text = esc(row["messages"][:_SHOWN_TEXT])
    what = f"{row['id']}: {row['tokens']} tokens, {row['trained']} trained" if row["ids"] else row["id"]
    return (
        f'<details><summary><span class="chip">{esc(row["source"])}</span>'
        f'<span class="what">{esc(what)}</span></summary><div class="body"><pre>{text}</pre></div></details>'
    )


# -- figures -----------------------------------------------------------------------------------------


def draw_figures(manifest: Mapping[str, Any], folder: Path) -> list[Path]:
    """The mix and the lengths as SVG and PNG, for a paper or a slide."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = manifest["composition"]["table"]
    shown: list[tuple[str, str, Sequence[tuple[str, float]]]] = []
    for what, key in (("category", "categories"), ("source", "sources")):
        share = "share_trained" if table["total"]["trained_tokens"] else "share_samples"
        title = f"{share.replace('share_', 'Share of ').replace('trained', 'trained tokens')} by {what}"
        shown.append((f"mix_{key}", title, [(row[what] or "(none)", row[share]) for row in table[key]]))
    shown.append(("lengths", "Examples by tokens", _bins(table)))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trivet", "text.parse_math": False}):
        for name, title, bars in shown:
            if not bars:
                continue
            figure = Figure(figsize=(7, 1.2 + 0.32 * len(bars)), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            axes.barh(range(len(bars)), [value for _, value in bars], color="#2f6bd8")
            axes.set_yticks(range(len(bars)), [label for label, _ in bars])
            axes.invert_yaxis()
            axes.set_title(title, loc="left", fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            for suffix in ("svg", "png"):
                path = folder / f"{name}.{suffix}"
                figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
    return written
