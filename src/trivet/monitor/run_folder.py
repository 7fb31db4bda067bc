"""What a run folder holds, read for the report. Damaged or missing files leave their part out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.monitor.files import MonitorError, read_json, read_lines, read_metrics

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """The stored samples of one step."""

    stage: str
    step: int
    role: str
    path: Path
    samples: list[Record]


@dataclass(slots=True)
class StageTime:
    """One stage as the events tell it."""

    name: str
    what: str = ""
    source: str = ""
    until: str = ""
    seconds: float = 0.0
    ended: str = ""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything the report shows."""

    path: Path
    name: str
    run: Record
    records: list[Record]
    events: list[Record]
    tables: list[Record]
    recipe: str

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Raises MonitorError when the folder is no run folder."""
        if not (path / "metrics.jsonl").exists() and not (path / "run.json").exists():
            raise MonitorError(
                f"{path} is not a run folder: it has neither metrics.jsonl nor run.json. "
                "Give the folder that holds recipe.yaml and metrics.jsonl"
            )
        run: Record = read_json(path / "run.json", {})
        recipe = path / "recipe.yaml"
        text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else ""
        named = re.search(r"^name:[ \t]*['\"]?([^'\"\n#]+)", text, re.MULTILINE)
        name = run.get("name") or (named[1].strip() if named else "") or path.resolve().name
        return cls(
            path,
            str(name),
            run,
            read_metrics(path),
            read_lines(path / "events.jsonl"),
            [t for t in read_json(path / "tables.json", []) if {"title", "columns", "rows"} <= set(t)],
            text,
        )

    def pages(self) -> list[Page]:
        """Sample pages in the order of stages and steps; those of unknown stages last, by name."""
        order = {stage.name: i for i, stage in enumerate(self.stages())}
        found = []
        for path in sorted((self.path / "samples").glob("*/step_*.jsonl")):
            match = re.fullmatch(r"step_(\d+)(_eval)?\.jsonl", path.name)
            if match:
                role = "eval" if match[2] else "train"
                found.append(Page(path.parent.name, int(match[1]), role, path, []))
        return sorted(found, key=lambda p: (order.get(p.stage, len(order)), p.stage, p.step, p.role))

    def stages(self) -> list[StageTime]:
        """Stages in order with their words and the seconds all sessions spent in them."""
        stages: dict[str, StageTime] = {}
        open_since: tuple[str, float] | None = None
        last = 0.0
        for event in sorted([*self.events, *self.records], key=lambda e: e.get("time", 0.0)):
            kind, name, now = event.get("kind"), event.get("stage", ""), event.get("time", 0.0)
            if kind in ("stage", "end") and open_since:
                stages[open_since[0]].seconds += (now if kind == "end" else last) - open_since[1]
                open_since = None
            if name:
                stage = stages.setdefault(name, StageTime(name))
                if kind == "stage":
                    stage.what, stage.source = event.get("text", ""), event.get("source", "")
                    stage.until, stage.ended = event.get("until", ""), ""
                    open_since = (name, now)
                elif kind == "end":
                    stage.ended = event.get("text", "")
            last = now
        if open_since:
            stages[open_since[0]].seconds += last - open_since[1]
        logged = {record["stage"] for record in self.records}
        return [s for s in stages.values() if s.name in logged or s.what]

    def warnings(self) -> list[Record]:
        """One entry a cause: how often over all sessions, the last text, where and when."""
        causes: dict[str, Record] = {}
        for event in self.events:
            if event.get("kind") != "warning":
                continue
            entry = causes.setdefault(event["cause"], {"total": 0, "session": 0})
            count = int(event.get("count", 1))
            entry["total"] += count - (entry["session"] if count > entry["session"] else 0)
            entry |= event | {"session": count}
        return sorted(causes.values(), key=lambda e: -e["total"])

    def rewinds(self) -> list[Record]:
        return [event for event in self.events if event.get("kind") == "rewind"]


def load(page: Page) -> Page:
    """The page with its samples."""
    return Page(page.stage, page.step, page.role, page.path, read_lines(page.path))


def first_and_last(pages: Sequence[Page]) -> list[Page]:
    """At most two pages: the earliest and the latest."""
    return [load(page) for page in (pages[:1] if len(pages) < 2 else [pages[0], pages[-1]])]


def by_task(page: Page) -> dict[str, Mapping[str, Any]]:
    """task id -> its first sample on the page."""
    found: dict[str, Mapping[str, Any]] = {}
    for sample in page.samples:
        found.setdefault(str(sample.get("task")), sample)
    return found
