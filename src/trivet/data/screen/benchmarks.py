"""Where the usual benchmarks keep their questions and answers. No data of theirs is here: it is read from
files or data sets that the user has."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from trivet.data.read import BadRow, Row, read_rows
from trivet.data.screen.items import Item, Part


class BenchmarkError(ValueError):
    """A benchmark that cannot be read as asked; says what was found instead."""


@dataclass(frozen=True, slots=True)
class BenchmarkRecipe:
    """Fields of a benchmark's rows. Of `question` and `answer` the first that a row has is taken; a dot goes
    into an object, " + " joins several fields into one item of several texts. A conversation (a list of
    messages, or JSON of one) stands for what its users say."""

    name: str
    question: tuple[str, ...]
    answer: tuple[str, ...] = ()
    note: str = ""


_PROMPT = ("prompt", "Prompt", "PROMPT")
_QUESTION = ("question", "Question", "problem", "Problem", "prompt")
_TAU2 = "user_scenario.instructions."

RECIPES: dict[str, BenchmarkRecipe] = {
    recipe.name: recipe
    for recipe in (
        BenchmarkRecipe("aime", _QUESTION, ("solution", "Solution")),
        BenchmarkRecipe("hmmt", _QUESTION, ("solution", "Solution")),
        BenchmarkRecipe("math_500", _QUESTION, ("solution", "Solution")),
        BenchmarkRecipe("gpqa", _QUESTION, ("Explanation", "explanation")),
        BenchmarkRecipe("gsm8k", _QUESTION, ("answer", "solution")),
        BenchmarkRecipe("hle", _QUESTION, ("rationale",)),
        BenchmarkRecipe("hle_verified", _QUESTION, ("rationale",)),
        BenchmarkRecipe("ifeval", _PROMPT),
        BenchmarkRecipe("ifbench", _PROMPT),
        BenchmarkRecipe("advanced_if", ("conversation_history", "messages", *_PROMPT)),
        BenchmarkRecipe("humaneval", _PROMPT, ("canonical_solution",)),
        BenchmarkRecipe("mbpp", ("text", *_PROMPT), ("code", "canonical_solution")),
        BenchmarkRecipe("livecodebench", ("question_content", *_QUESTION)),
        BenchmarkRecipe("swe_bench", ("problem_statement",), ("patch",)),
        BenchmarkRecipe(
            "terminal_bench",
            ("instruction", "base_description", "task_description", *_PROMPT),
            note="a folder of tasks is read from their task.yaml or instruction.md",
        ),
        BenchmarkRecipe(
            "tau2",
            (f"{_TAU2}reason_for_call + {_TAU2}task_instructions", "ticket", "user_scenario.instructions"),
            note="what the simulated user is told; known_info is shared by many tasks and left out",
        ),
        BenchmarkRecipe("mcp_atlas", (*_PROMPT, "task", "TASK")),
        BenchmarkRecipe("sealqa", _QUESTION),
        BenchmarkRecipe("multi_challenge", ("CONVERSATION", "conversation", "messages")),
        BenchmarkRecipe(
            "browsecomp",
            _QUESTION,
            note="rows with a `canary` are decrypted with it, as their publisher does",
        ),
        BenchmarkRecipe("arena_hard", (*_PROMPT, "turns", "question")),
        BenchmarkRecipe("frontier_science", _QUESTION, ("rubric", "solution")),
    )
}

_IDS = ("id", "task_id", "unique_id", "instance_id", "question_id", "uid", "key", "ID", "Record ID", "TASK")


@dataclass(slots=True)
class Benchmark:
    """A benchmark's items. `skipped`: reason -> rows without a question, each named in `places`; `bad`: rows
    that could not be read."""

    name: str
    items: list[Item]
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    places: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, reason: str, place: str) -> None:
        self.skipped[reason] += 1
        self.places.append((reason, place))


def load_benchmark(
    name: str,
    source: str | None = None,
    *,
    rows: Iterable[Row | BadRow | Mapping[str, Any]] | None = None,
    fields: Mapping[str, str] | None = None,
    subset: str | None = None,
    split: str = "test",
) -> Benchmark:
    """Items of a benchmark from files (a path, a glob), a data set by name, or `rows`.

    `fields` ({"question": ..., "answer": ...}) overrides the recipe and is needed for a `name` without one.
    Raises BenchmarkError when no row has the fields, SourceError when there is nothing to read.
    """
    recipe = _recipe(name, fields)
    if (source is None) == (rows is None):
        raise BenchmarkError(f"benchmark {name!r}: give a source (file, glob or data set) or rows")
    out = Benchmark(name, [])
    names: Counter[str] = Counter()
    read = rows if rows is not None else _rows(str(source), subset, split)
    columns: list[str] = []
    matched = False
    for number, row in enumerate(read, 1):
        out.rows += 1
        if isinstance(row, BadRow):
            out.skip(row.cause, row.place)
            continue
        row = row if isinstance(row, Row) else Row(dict(row), f"{name}[{number}]")
        columns = columns or list(row.row)
        found, question = _texts(row.row, recipe.question)
        matched = matched or found
        if not question:
            out.skip("empty_question" if found else "no_question_field", row.place)
            continue
        key = next((str(row.row[k]) for k in _IDS if row.row.get(k) not in (None, "")), str(number))
        names[key] += 1
        key = key if names[key] == 1 else f"{key}#{names[key]}"
        parts: list[tuple[Part, tuple[str, ...]]] = [("question", question)]
        if answer := _texts(row.row, recipe.answer)[1]:
            parts.append(("answer", answer))
        out.items += [Item(name, key, texts, part, row.place) for part, texts in parts]
    if not matched and columns:
        raise BenchmarkError(
            f"benchmark {name!r}: no row has {' or '.join(recipe.question)}; the first has "
            f"{', '.join(columns)}. Say which holds the question: fields={{'question': ...}}"
        )
    return out


def _recipe(name: str, fields: Mapping[str, str] | None) -> BenchmarkRecipe:
    unknown = set(fields or {}) - {"question", "answer"}
    if unknown:
        raise BenchmarkError(f"benchmark {name!r}: fields are question and answer, not {sorted(unknown)}")
    known = {_plain(key): recipe for key, recipe in RECIPES.items()}.get(_plain(name))
    if known is None and "question" not in (fields or {}):
        near = get_close_matches(name.lower(), RECIPES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BenchmarkError(
            f"no recipe for a benchmark {name!r}{hint} Known are {', '.join(RECIPES)}. "
            "For another one give fields={'question': ...}"
        )
    base = known or BenchmarkRecipe(name, ())
    if not fields:
        return base
    question = (fields["question"],) if "question" in fields else base.question
    answer = (fields["answer"],) if "answer" in fields else base.answer
    return BenchmarkRecipe(name, question, answer, base.note)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _rows(source: str, subset: str | None, split: str) -> Iterator[Row | BadRow]:
    folder = Path(source).expanduser()
    if folder.is_dir():
        tasks = sorted(chain(folder.rglob("task.yaml"), folder.rglob("instruction.md")))
        if tasks:
            return map(_task_row, tasks)
    return read_rows(source, subset=subset, split=split)


def _task_row(path: Path) -> Row | BadRow:
    """One task of a folder of tasks."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        value = {"instruction": text} if path.suffix == ".md" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return BadRow("unreadable_file", str(error), str(path))
    if not isinstance(value, dict):
        return BadRow("not_an_object", f"a {type(value).__name__}", str(path))
    return Row({"id": path.parent.name, **value}, str(path))


def _texts(row: Mapping[str, Any], choices: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """(the row has one of the fields, the texts of the first that is not empty)."""
    found = False
    for choice in choices:
        texts: list[str] = []
        for path in choice.split(" + "):
            value: Any = row
            for name in path.strip().split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            found = found or value is not None
            texts += _strings(value)
        texts = [_decrypted(text, row.get("canary")) for text in texts if text.strip()]
        if texts:
            return True, tuple(texts)
    return found, ()


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        if value.lstrip().startswith("[{"):
            try:
                return _strings(json.loads(value))
            except ValueError:
                return [value]
        return [value]
    if isinstance(value, list):
        return [text for one in value for text in _strings(one)]
    if isinstance(value, Mapping):
        role = value.get("role", value.get("from", "user"))
        content = value.get("content", value.get("value", value.get("text")))
        return _strings(content) if role in ("user", "human") else []
    return [str(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _decrypted(text: str, canary: Any) -> str:
    """Text XOR the repeated SHA-256 of the row's canary, from base64; texts that are not such stay."""
    if not isinstance(canary, str) or not canary:
        return text
    try:
        data = base64.b64decode(text, validate=True)
        key = hashlib.sha256(canary.encode()).digest()
        return bytes(byte ^ key[i % len(key)] for i, byte in enumerate(data)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return text
