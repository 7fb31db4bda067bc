"""The parts of report.html, top to bottom. Every text goes through `esc`; each part is "" without data."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trivet.monitor.charts import chart, spark
from trivet.monitor.fields import compact, duration, write_metric
from trivet.monitor.panels import History, Panel
from trivet.monitor.run_folder import Page, RunFolder, by_task, first_and_last
from trivet.monitor.safe_text import esc
from trivet.monitor.samples import content_text, shorten
from trivet.monitor.summary import (
    change,
    eval_histories,
    interval,
    last_steps,
    main_metric,
    run_seconds,
    write_eval,
)

MAX_TEXT = 4000
"""Characters of one message in the report; the sample pages hold more."""
MAX_ROWS = 500
"""Rows of one table."""
_NUM = ' class="num"'


def section(id_: str, title: str, body: str) -> str:
    return f'<section id="{id_}"><h2>{esc(title)}</h2>{body}</section>' if body else ""


def chip(text: str, mood: str = "") -> str:
    return f'<span class="chip {mood}">{esc(text)}</span>' if text else ""


def header(folder: RunFolder) -> str:
    """Name, when, how long, the machine."""
    starts = [s["start"] for s in folder.run.get("sessions", []) if "start" in s]
    when = time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(min(starts))).lstrip("0") if starts else ""
    seconds = run_seconds(folder.run)
    resumed = len(starts) - 1
    parts = [
        when,
        f"took {duration(seconds)}" if seconds else "",
        f"resumed {resumed} time{'s' * (resumed > 1)}" if resumed > 0 else "",
    ]
    facts = {**folder.run.get("machine", {}), "folder": folder.path.resolve().name}
    cells = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(_plain(v))}</dd></div>" for k, v in facts.items())
    said = " · ".join(esc(part) for part in parts if part)
    return (
        f'<div class="eyebrow">trivet run</div><h1>{esc(folder.name)}</h1><p class="soft">{said}</p>'
        f'<dl class="facts">{cells}</dl>'
    )


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return json.dumps(value) if isinstance(value, list | bool) else str(value)


def results(folder: RunFolder) -> str:
    """A card for each taskset (before, after, interval), then the run's plain numbers."""
    histories = eval_histories(folder.records)
    cards = "".join(_card(label, history) for label, history in histories.items())
    body = f'<div class="cards">{cards}</div>' if cards else ""
    tiles = "".join(f"<div><b>{esc(v)}</b><span>{esc(k)}</span></div>" for k, v in _numbers(folder) if v)
    return section("results", "Results", body + (f'<div class="panel tiles">{tiles}</div>' if tiles else ""))


def _card(name: str, history: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    (place, first), (end, last) = history[0], history[-1]
    key = main_metric(first)
    if key is None:
        return ""
    old, new = first.get(key), last.get(key)
    text, sign = change(key, new, old)
    points = f"{text} points" if "pass@" in key and text else text
    mood = {1: "good", -1: "bad", 0: ""}[sign]
    before = f'<span class="before">{esc(write_eval(key, old))}</span><span class="arrow">→</span>'
    bounds = interval(last, key)
    note = f"interval {write_eval(key, bounds[0])} to {write_eval(key, bounds[1])}" if bounds else ""
    where = f"{place} to {end}" if len(history) > 1 else place
    note = f"{esc(where)}{'<br>' if note else ''}{note}"
    values = [m[key] for _, m in history if m.get(key) is not None]
    return (
        f'<article class="card"><header><h3>{esc(name)}</h3><span class="soft">{esc(key)}</span></header>'
        f'<div class="pair">{before if len(history) > 1 else ""}'
        f'<span class="after">{esc(write_eval(key, new))}</span>'
        f"{chip(points, mood) if len(history) > 1 else ''}</div>"
        f'<div class="foot"><span>{note}</span>{spark(values)}</div></article>'
    )


def _numbers(folder: RunFolder) -> list[tuple[str, str]]:
    records = folder.records
    steps = sum(last_steps(records).values())

    def values(key: str) -> list[float]:
        return [r[key] for r in records if r.get(key) is not None]

    rewards, losses = values("reward/mean"), values("train/loss")
    sampled, speed = values("rollout/tokens"), sorted(values("engine/tokens_per_s"))
    out = [("steps", f"{steps:,}" if steps else "")]
    if rewards:
        ends = [write_metric("reward/mean", v) for v in (rewards[0], rewards[-1])]
        out.append(("mean reward, first and last step", " → ".join(ends)))
    elif losses:
        ends = [write_metric("train/loss", v) for v in (losses[0], losses[-1])]
        out.append(("loss, first and last step", " → ".join(ends)))
    out.append(("rollouts", compact(sum(values("rollout/count"))) if values("rollout/count") else ""))
    out.append(("tokens sampled", compact(sum(sampled)) if sampled else ""))
    out.append(
        (
            "tokens trained",
            compact(sum(values("train/tokens_trained"))) if values("train/tokens_trained") else "",
        )
    )
    out.append(("tokens a second, sampling (median)", compact(speed[len(speed) // 2]) if speed else ""))
    warned = sum(entry["total"] for entry in folder.warnings())
    out.append(("warnings", str(warned) if warned else "none"))
    return out


def curves(history: History | None, panels: Sequence[Panel]) -> str:
    if history is None or not panels:
        return ""
    return section(
        "curves", "Curves", f'<div class="charts">{"".join(chart(p, history) for p in panels)}</div>'
    )


def tables(folder: RunFolder) -> str:
    parts = []
    for table in folder.tables:
        columns, rows = table["columns"], table["rows"]
        numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
        head = "".join(_cell("th", name, right) for name, right in zip(columns, numeric, strict=True))
        lines = [
            "".join(_cell("td", value, right) for value, right in zip(row, numeric, strict=True))
            for row in rows[:MAX_ROWS]
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        more = f'<p class="soft">and {len(rows) - MAX_ROWS} more rows in tables.json</p>' * (
            len(rows) > MAX_ROWS
        )
        parts.append(
            f'<div class="panel"><h3>{esc(table["title"])}</h3><div class="scroll"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</div>"
        )
    return section("tables", "Tables", "".join(parts))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(tag: str, value: Any, right: bool) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"<{tag}{_NUM if right else ''}>{esc(text)}</{tag}>"


def stages(folder: RunFolder) -> str:
    """A bar of where the time went and a row for each stage."""
    found, steps = folder.stages(), last_steps(folder.records)
    if not found:
        return ""
    bars = "".join(
        f'<span class="c{i % 8}" style="flex:{max(stage.seconds, 0.001):.3f} 1 0" '
        f'title="{esc(stage.name)}: {duration(stage.seconds)}">{esc(stage.name)}</span>'
        for i, stage in enumerate(found)
    )
    rows = []
    for stage in found:
        cells = {
            "stage": f"<b>{esc(stage.name)}</b>",
            "what": esc(stage.what)
            + (f" {chip('ended early: ' + shorten(stage.ended, 300), 'bad')}" if stage.ended else ""),
            "from": esc(stage.source),
            "until": esc(stage.until),
            "steps": f"{steps[stage.name]:,}" if steps.get(stage.name) else "",
            "took": duration(stage.seconds),
        }
        right = ("steps", "took")
        rows.append(
            "".join(
                f'<td data-name="{name}"{_NUM if name in right else ""}>{value}</td>'
                for name, value in cells.items()
            )
        )
    names = ("stage", "what", "from", "until", "steps", "took")
    head = "".join(_cell("th", name, name in ("steps", "took")) for name in names)
    notes = "".join(
        f'<p class="soft">{esc(_when(event))}: {esc(event.get("at", ""))} {esc(event.get("text", ""))}</p>'
        for event in folder.rewinds()
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = _stacked(f"<tr>{head}</tr>", body)
    return section("stages", "Stages", f'<div class="bartime">{bars}</div>{table}{notes}')


def _when(event: Mapping[str, Any]) -> str:
    return time.strftime("%d %b %H:%M", time.gmtime(event.get("time", 0)))


def samples(folder: RunFolder) -> str:
    """Evaluation answers before and after, then what each stage trained on at its start and end."""
    pages = folder.pages()
    parts = []
    evaluated = first_and_last([page for page in pages if page.role == "eval"])
    if evaluated:
        parts.append("<h3>Evaluation answers, before and after</h3>" + _compared(evaluated, expand=1))
    for stage in dict.fromkeys(page.stage for page in pages):
        trained = first_and_last([page for page in pages if page.stage == stage and page.role == "train"])
        if trained:
            parts.append(f"<h3>Rollouts trained in {esc(stage)}</h3>" + _compared(trained))
    body = "".join(f'<div class="samples" style="margin-top:18px">{part}</div>' for part in parts)
    if body and len(pages) > 2:
        body += f'<p class="soft">{len(pages)} pages of samples are in the folder samples/.</p>'
    return section("samples", "Samples", body)


def _compared(pages: Sequence[Page], expand: int = 0) -> str:
    """Tasks on both pages side by side; the others one by one."""
    first = by_task(pages[0])
    last = by_task(pages[-1]) if len(pages) > 1 else {}
    out = []
    for task in [t for t in first if t in last]:
        is_open = len(out) < expand
        sides = [(_place(pages[0]), first[task]), (_place(pages[-1]), last[task])]
        out.append(_sample(sides, is_open))
    for page, own in ((pages[0], first), (pages[-1], last)):
        for task, sample in own.items():
            if not (task in first and task in last):
                out.append(_sample([(_place(page), sample)], len(out) < expand))
    return "".join(out)


def _place(page: Page) -> str:
    return f"{page.stage}, step {page.step}"


def _sample(sides: Sequence[tuple[str, Mapping[str, Any]]], is_open: bool) -> str:
    sample = sides[-1][1]
    prompt = "".join(_message(m) for m in sample.get("prompt", ()))
    payload = sample.get("payload")
    expected = (
        f'<div class="msg"><h4>expected</h4><pre>{esc(_payload(payload))}</pre></div>' if payload else ""
    )
    title = " ".join(content_text(m) for m in sample.get("prompt", ()) if m.get("role") == "user")
    chips = ' <span class="soft">→</span> '.join(_reward(s) for _, s in sides)
    answers = "".join(f'<div class="side"><h4>{esc(place)}</h4>{_answer(s)}</div>' for place, s in sides)
    where = "" if len(sides) > 1 else f'<span class="soft">{esc(sides[0][0])}</span>'
    return (
        f"<details{' open' if is_open else ''}><summary>"
        f'<span class="what">{esc(" ".join(title.split())[:200])}</span>{where}<span>{chips}</span>'
        f'</summary><div class="body">{prompt}{expected}<div class="two">{answers}</div></div></details>'
    )


def _payload(payload: Any) -> str:
    if isinstance(payload, dict):
        payload = payload.get("answer", next(iter(payload.values())) if len(payload) == 1 else payload)
    return shorten(payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False), MAX_TEXT)


def _message(message: Mapping[str, Any]) -> str:
    return (
        f'<div class="msg"><h4>{esc(message.get("role", ""))}</h4>'
        f"<pre>{esc(shorten(content_text(message), MAX_TEXT))}</pre></div>"
    )


def _answer(sample: Mapping[str, Any]) -> str:
    messages = list(sample.get("answer", ()))
    shown = "".join(
        _message(m) if len(messages) > 1 else f"<pre>{esc(shorten(content_text(m), MAX_TEXT))}</pre>"
        for m in messages[:40]
    )
    if not any(content_text(m) for m in messages):
        shown = '<p class="empty">no answer</p>'
    if len(messages) > 40:
        shown += f'<p class="empty">and {len(messages) - 40} more messages</p>'
    ended = f"{sample.get('termination', '')}, {sample.get('tokens', 0)} tokens"
    parts = sample.get("reward", {}).get("parts", {})
    inner = "".join(chip(f"{name} {value:.3g}") for name, value in parts.items())
    detail = sample.get("reward", {}).get("detail") or ""
    why = f"<span>{esc(shorten(detail, 300))}</span>" if detail else ""
    return f'{shown}<div class="verdict">{_reward(sample)}{inner}<span>{esc(ended)}</span>{why}</div>'


def _reward(sample: Mapping[str, Any]) -> str:
    reward = sample.get("reward", {})
    if reward.get("kind") == "scored":
        value = float(reward["value"])
        return chip(f"reward {value:.3g}", "good" if value >= 0.5 else "bad" if value <= 0 else "")
    if reward.get("kind") == "unscored":
        return chip(f"unscored: {reward.get('cause', '')}", "warn")
    return chip("pending", "warn")


def warnings(folder: RunFolder) -> str:
    rows = "".join(
        f'<tr><td data-name="cause"><b>{esc(entry["cause"])}</b></td>'
        f'<td data-name="times" class="num">{entry["total"]:,}</td>'
        f'<td data-name="last">{esc(shorten(str(entry.get("text", "")), 1000))}</td>'
        f'<td data-name="at">{esc(entry.get("stage", ""))} {esc(entry.get("step", ""))}</td></tr>'
        for entry in folder.warnings()
    )
    head = '<tr><th>cause</th><th class="num">times</th><th>last</th><th>at</th></tr>'
    return section("warnings", "Warnings", _stacked(head, rows)) if rows else ""


def _stacked(head: str, rows: str) -> str:
    """A table whose rows become blocks in a narrow window."""
    table = f'<table class="stack"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    return f'<div class="panel scroll">{table}</div>'


def recipe(folder: RunFolder) -> str:
    if not folder.recipe:
        return ""
    text = shorten(folder.recipe, 200_000)
    lines = folder.recipe.count("\n") + 1
    return section(
        "recipe",
        "Recipe",
        f'<details><summary><span class="what">recipe.yaml, as resolved</span>'
        f'<span class="soft">{lines} lines</span></summary>'
        f'<div class="body"><pre>{esc(text)}</pre></div></details>',
    )


def environment(folder: RunFolder) -> str:
    found = folder.run.get("versions", {})
    cells = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in found.items())
    return section("environment", "Environment", f'<dl class="facts">{cells}</dl>') if cells else ""
