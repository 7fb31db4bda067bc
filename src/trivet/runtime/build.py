"""Puts together what a stage needs: its tasks with their environments, its renderer, its context length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from trivet.data.shards import PackedData
from trivet.envs import Environment, make_env
from trivet.explorer import Game
from trivet.recipe import Recipe, Stage
from trivet.recipe.schema import Tasks, TinyModel
from trivet.render import Renderer, load_tokenizer
from trivet.tasks import TasksetError, load_tasks
from trivet.types import Message, Task

_MEASURED = 4096  # prompts rendered to find the longest one
_ROUND = 16  # contexts are multiples of this


class SetupError(RuntimeError):
    """A stage cannot be set up; the message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Games:
    """Tasks by id with their environments, and the fingerprint of the data."""

    by_id: Mapping[str, Game]
    fingerprint: str

    @property
    def ids(self) -> list[str]:
        return list(self.by_id)


@dataclass(frozen=True, slots=True)
class Held:
    """One held-out taskset of an evaluation."""

    name: str
    tasks: Sequence[Task]
    env: Environment


def policy_directory(recipe: Recipe, folder: Path) -> Path:
    """A directory with the starting model; a tiny one is made in the run folder, a hub name is fetched."""
    model = recipe.policy.model
    if isinstance(model, TinyModel):
        from trivet.render.tiny import make_tiny

        target = folder / "tiny"
        return target if (target / "config.json").exists() else make_tiny(model, target)
    return _directory("policy.model", model, recipe.policy.revision)


def aux_directory(recipe: Recipe, name: str) -> Path:
    """A directory with the model that `models:` calls `name`."""
    if name not in recipe.models:
        known = ", ".join(recipe.models) or "none"
        raise SetupError(f"models:{name}: the recipe's `models:` has {known}; add it there")
    return _directory(f"models.{name}.model", recipe.models[name].model, recipe.models[name].revision)


def _directory(key: str, model: str, revision: str | None) -> Path:
    path = Path(model)
    if not path.is_dir():
        return _from_hub(key, model, revision)
    if not (path / "config.json").exists():
        raise SetupError(f"{key}: {path} has no config.json: it is not a model directory")
    return path


def _from_hub(key: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise SetupError(
            f"{key}: {name!r} is no directory here, and the hub does not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Give a local directory, check the "
            "name, or make one: trivet model import, trivet model tiny"
        ) from error


def model_context(directory: Path) -> int | None:
    """Positions the model of a directory knows, None where its configuration does not say."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def located(stage: Stage, place: Callable[[str], Path]) -> Stage:
    """The stage with `env_args: {model: stage:NAME}` and `{model: models:NAME}` as `place` finds them."""

    def one(tasks: Tasks) -> Tasks:
        model = tasks.env_args.get("model")
        if not isinstance(model, str) or not model.startswith(("stage:", "models:")):
            return tasks
        return tasks.model_copy(update={"env_args": {**tasks.env_args, "model": str(place(model))}})

    held = stage.eval.model_copy(update={"tasks": [one(tasks) for tasks in stage.eval.tasks]})
    return stage.model_copy(update={"tasks": [one(tasks) for tasks in stage.tasks], "eval": held})


def check_tokenizer(stage: Stage, data: PackedData, start: Path) -> None:
    """Refuse packs whose ids mean other tokens to the model the stage starts from."""
    from trivet.data.render import tokenizer_hash

    if data.tokenizer != tokenizer_hash(load_tokenizer(start)):
        raise SetupError(
            f"stage {stage.name}: the packs of {data.folder} were made with another tokenizer than that of "
            f"{start}: their ids would mean other tokens. Build them again with data.tokenizer: {start}"
        )


async def open_env(config: Tasks, stack: AsyncExitStack) -> Environment:
    return await stack.enter_async_context(make_env(config.env, **config.env_args))


async def load_games(stage: Stage, seed: int, stack: AsyncExitStack, *, play: bool) -> Games:
    """The stage's tasksets merged. Without `play` (supervised) no environment is opened.

    Raises TasksetError on ids that two tasksets share.
    """
    by_id: dict[str, Game] = {}
    digest = hashlib.sha256()
    for config in stage.tasks:
        taskset = load_tasks(config, seed=seed)
        env = await open_env(config, stack) if play else None
        for task in taskset.tasks:
            if task.id in by_id:
                raise TasksetError(
                    f"stage {stage.name}: task id {task.id!r} is in taskset {taskset.name!r} and in an "
                    "earlier one; ids must differ across a stage (drop one of the two, or map fields.id)"
                )
            by_id[task.id] = Game(task, env)  # type: ignore[arg-type]
        digest.update(taskset.fingerprint.encode())
    if not by_id:
        raise SetupError(f"stage {stage.name}: no tasks; give it `tasks:`")
    return Games(by_id, digest.hexdigest()[:16])


async def load_held(stage: Stage, seed: int, stack: AsyncExitStack) -> list[Held]:
    """The tasksets of the stage's evaluations. Raises SetupError on equal names."""
    out: list[Held] = []
    for config in stage.eval.tasks:
        taskset = load_tasks(config, seed=seed)
        if any(held.name == taskset.name for held in out):
            raise SetupError(
                f"stage {stage.name}: two evaluation tasksets are called {taskset.name!r}; set `name:` on one"
            )
        out.append(Held(taskset.name, taskset.tasks, await open_env(config, stack)))
    return out


def check_leaks(stage: Stage, trained: Container[str], held: Sequence[Held]) -> None:
    """Refuse to evaluate on what is trained (task ids)."""
    for part in held:
        both = [task.id for task in part.tasks if task.id in trained]
        if both:
            raise SetupError(
                f"stage {stage.name}: {len(both)} tasks of evaluation {part.name!r} are also trained on "
                f"(first: {both[0]!r}); take another split, or skip/limit so that they differ"
            )


def longest_prompt(tasks: Sequence[Task], renderer: Renderer, system_prompt: str | None) -> int:
    """Tokens of the longest opening among (at most 4096 evenly chosen) tasks."""
    stride = max(1, len(tasks) // _MEASURED)
    longest = 0
    for task in tasks[::stride]:
        messages = list(task.messages)
        if messages[-1].role == "assistant":
            continue
        if system_prompt is not None and messages[0].role != "system":
            messages.insert(0, Message("system", system_prompt))
        longest = max(longest, len(renderer.render(messages, generate=True).ids_T))
    return longest


def context_for(stage: Stage, prompt: int, limit: int | None) -> int:
    """Tokens per sequence: as asked for, else longest prompt + longest answer; within the model's limit."""
    answer = max(stage.sampling.max_tokens, stage.eval.sampling.max_tokens if stage.eval.sampling else 0)
    wanted = stage.engine.context or -(-(prompt + answer) // _ROUND) * _ROUND
    if limit is not None and wanted > limit:
        if prompt >= limit:
            raise SetupError(
                f"stage {stage.name}: the longest prompt has {prompt} tokens, the model's context is "
                f"{limit}; drop long tasks or take another model"
            )
        wanted = limit
    return wanted
