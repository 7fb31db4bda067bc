"""Pages of rollouts for people: Markdown to read, JSONL to process, one of each a step and role."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trivet.monitor.files import read_lines, write_text
from trivet.monitor.safe_text import printable
from trivet.types import Message, Pending, Rollout, Scored, Unscored, reward_to_dict

_PAGE = re.compile(r"step_(\d+)(_eval)?\.jsonl")
MAX_CHARS = 20_000
"""Of one message in a page; longer ones keep their beginning and end."""


class SamplePages:
    """Writes `samples/<stage>/step_000020.md` and `.jsonl` (evaluation rollouts: `step_000020_eval`)."""

    def __init__(self, folder: Path, *, every: int, size: int) -> None:
        self.folder, self.every, self.size = folder, every, size
        self._shown: dict[tuple[str, str], dict[str, None]] = {}

    def write(self, stage: str, step: int, rollouts: Sequence[Rollout], *, force: bool = False) -> list[Path]:
        """Store what is due; the Markdown files written."""
        written = []
        for role in ("train", "eval"):
            own = [r for r in rollouts if (r.role == "eval") == (role == "eval")]
            if own and self._due(stage, role, step, force):
                written.append(self._page(stage, step, role, own))
        return written

    def _due(self, stage: str, role: str, step: int, force: bool) -> bool:
        if force or self.every == 0:
            return force
        return role == "eval" or not self._seen(stage, role) or step % self.every == 0

    def _seen(self, stage: str, role: str) -> dict[str, None]:
        """Tasks shown before, oldest first; evaluations are compared through all stages."""
        key = ("*" if role == "eval" else stage, role)
        if key not in self._shown:
            pages = self.folder.glob(f"{key[0]}/step_*{'_eval' if role == 'eval' else ''}.jsonl")
            own = [
                p for p in pages if (match := _PAGE.fullmatch(p.name)) and bool(match[2]) == (role == "eval")
            ]
            own.sort(key=lambda page: page.stat().st_mtime)
            tasks = (str(sample.get("task")) for page in own for sample in read_lines(page))
            self._shown[key] = dict.fromkeys(tasks)
        return self._shown[key]

    def _page(self, stage: str, step: int, role: str, rollouts: Sequence[Rollout]) -> Path:
        seen = self._seen(stage, role)
        chosen = choose(rollouts, self.size, list(seen), compare=role == "eval")
        seen.update(dict.fromkeys(r.task.id for r in chosen))
        path = self.folder / stage / f"step_{step:06d}{'_eval' if role == 'eval' else ''}.jsonl"
        new = [record(stage, step, r) for r in chosen]
        keys = {_identity(r) for r in new}
        kept = [r for r in read_lines(path) if _identity(r) not in keys]
        records = [*kept, *new]  # several calls for one step (two tasksets) share a page
        write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        page = path.with_suffix(".md")
        write_text(page, markdown(stage, step, role, records))
        return page

    def rewind(self, stays: Callable[[Mapping[str, Any]], bool]) -> None:
        """Delete the pages of steps that do not stay."""
        for path in self.folder.glob("*/step_*.jsonl"):
            match = _PAGE.fullmatch(path.name)
            if match and not stays({"stage": path.parent.name, "step": int(match[1])}):
                path.with_suffix(".md").unlink(missing_ok=True)
                path.unlink()
        self._shown.clear()


def _identity(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    return sample.get("task"), sample.get("attempt"), sample.get("player"), sample.get("source")


def choose(
    rollouts: Sequence[Rollout], size: int, seen: Sequence[str] = (), *, compare: bool = False
) -> list[Rollout]:
    """`size` rollouts of different tasks where possible: tasks `seen` before first, then over all scores.

    Showing a task again lets a reader compare; spreading over the scores shows failures and successes.
    With `compare` each task shows its first attempt, so that before and after are alike.
    """
    ordered = sorted(rollouts, key=lambda r: (r.score is None, -(r.score or 0.0), r.task.id, r.attempt))
    first = {r.task.id: r for r in sorted(ordered, key=lambda r: -r.attempt)}
    chosen = [first[task] for task in seen if task in first][:size]
    tasks = {r.task.id for r in chosen}
    candidates = [first[task] for task in dict.fromkeys(r.task.id for r in ordered)]
    fresh = [r for r in (candidates if compare else _spread(ordered)) if r.task.id not in tasks]
    chosen += _even(fresh, size - len(chosen))
    rest = [r for r in ordered if not any(r is c for c in chosen)]
    return chosen + _even(rest, size - len(chosen))


def _spread(ordered: list[Rollout]) -> list[Rollout]:
    """One rollout a task, not always its best: the i-th task shows its (i mod n)-th attempt."""
    by_task: dict[str, list[Rollout]] = {}
    for rollout in ordered:
        by_task.setdefault(rollout.task.id, []).append(rollout)
    return [attempts[i % len(attempts)] for i, attempts in enumerate(by_task.values())]


def _even(items: list[Rollout], n: int) -> list[Rollout]:
    """`n` items at even distances, the first and the last among them."""
    if n <= 0 or not items:
        return []
    if n >= len(items):
        return items
    return [items[round(i * (len(items) - 1) / max(1, n - 1))] for i in range(n)]


def split(rollout: Rollout) -> tuple[list[Message], list[Message]]:
    """The conversation before the policy spoke, and what followed."""
    opening = list(rollout.task.messages)
    messages = rollout.messages or opening
    start = len(opening)
    if messages and messages[0].role == "system" and opening[0].role != "system":
        start += 1  # the policy's own system prompt was put in front
    return messages[:start], messages[start:]


def record(stage: str, step: int, rollout: Rollout) -> dict[str, Any]:
    """One rollout as a JSON-able sample."""
    prompt, answer = split(rollout)
    sample = {
        "stage": stage,
        "step": step,
        "task": rollout.task.id,
        "env": rollout.task.env,
        "taskset": rollout.task.source,
        "payload": _payload(rollout.task.payload),
        "attempt": rollout.attempt,
        "player": rollout.player,
        "role": rollout.role,
        "source": rollout.source,
        "prompt": [_message(m) for m in prompt],
        "answer": [_message(m) for m in answer],
        "reward": reward_to_dict(rollout.reward),
        "termination": str(rollout.termination),
        "tokens": rollout.sampled_tokens,
        "seconds": {k: round(v, 3) for k, v in rollout.timings.items()},
        "summary": reward_text(rollout),
    }
    # What is no JSON (NaN in a payload, foreign objects) becomes text: a page must always be readable.
    return json.loads(json.dumps(sample, default=str), parse_constant=str)


def _message(message: Message) -> dict[str, Any]:
    data = message.to_dict()
    for key in ("content", "reasoning"):
        if isinstance(data.get(key), str):
            data[key] = shorten(data[key])
    return data


def _payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if len(text := json.dumps(v, default=str)) <= 500 else text[:500] + " ..."
        for k, v in payload.items()
    }


def shorten(text: str, limit: int = MAX_CHARS) -> str:
    """Text of at most about `limit` characters; the middle of a longer one is left out and counted."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def reward_text(rollout: Rollout) -> str:
    """`0.9 (correct 1, length -0.1)`, `unscored: timeout (detail)`, `pending`."""
    match rollout.reward:
        case Scored(value, parts):
            inner = ", ".join(f"{name} {part:.4g}" for name, part in parts.items())
            return f"{value:.4g} ({inner})" if inner else f"{value:.4g}"
        case Unscored(cause, detail):
            return f"unscored: {cause}" + (f" ({shorten(detail, 300)})" if detail else "")
        case Pending():
            return "pending"


def fenced(text: str) -> str:
    """A Markdown code block that no run of backticks in `text` can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    text = printable(text)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def content_text(message: Mapping[str, Any]) -> str:
    """A stored message as text: reasoning, content, tool calls, media by name."""
    content = message.get("content", "")
    if not isinstance(content, str):
        content = "\n".join(p.get("text") or f"[{p.get('type')} {p.get('attachment', '')}]" for p in content)
    parts = [f"<reasoning>\n{message['reasoning']}\n</reasoning>"] if message.get("reasoning") else []
    parts += [content] if content else []
    for call in message.get("tool_calls", ()):
        parts.append(f"-> {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})")
    return "\n".join(parts)


def markdown(stage: str, step: int, role: str, samples: Sequence[Mapping[str, Any]]) -> str:
    """A page of samples."""
    what = "evaluation rollouts" if role == "eval" else "rollouts"
    lines = [f"# {stage}, step {step}: {what}", ""]
    for i, sample in enumerate(samples, start=1):
        place = " ".join(part for part in (sample["env"], sample["taskset"]) if part)
        place = f"{place} {sample['task']}"
        lines += [
            f"## {i}. {_inline(place)}",
            "",
            f"- reward: {_inline(sample['summary'])}",
            f"- ended: {sample['termination']}, {sample['tokens']} tokens sampled",
        ]
        if sample["payload"]:
            lines.append(f"- expected: {_inline(json.dumps(sample['payload'], ensure_ascii=False))}")
        lines.append("")
        for part in ("prompt", "answer"):
            for message in sample[part]:
                lines += [f"**{part}, {message['role']}**", "", fenced(content_text(message)), ""]
        if not sample["answer"]:
            lines += ["**answer**: none", ""]
    return "\n".join(lines)


def _inline(text: str) -> str:
    """One line of code-quoted Markdown."""
    text = " ".join(printable(text).split())
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"
