"""`trivet play`: watch a model at a few tasks, with the scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trivet.cli.score import EnvArgs, env_args

if TYPE_CHECKING:
    from trivet.agents import Policy
    from trivet.envs import Environment
    from trivet.types import Message, Rollout, Task

_SHOWN = 4000  # letters of one message
_SLOTS = 8  # conversations held at once
_CONTEXT = 8192  # tokens of a conversation, where the model has room for more


Source = Annotated[
    str, typer.Argument(metavar="TASKSET", help="File, hub data set, generated:NAME or reasoning_gym:NAME")
]
ModelDir = Annotated[Path, typer.Option(metavar="DIR", help="Model directory or run folder (its last model)")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="of the taskset: args.max=99 limit=100")
]


def play(
    source: Source,
    model: ModelDir,
    overrides: Overrides = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Tasks to play")] = 3,
    env: Annotated[str | None, typer.Option(help="Environment; default: the taskset's own")] = None,
    env_arg: EnvArgs = None,
    attempts: Annotated[int, typer.Option(min=1, help="Answers to each task")] = 1,
    system: Annotated[str | None, typer.Option(help="System prompt for tasks without one")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer")] = 256,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds for an answer and its score")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the tasks' order and the answers")] = 0,
) -> None:
    """Play a few tasks with a model and print the conversations with their scores."""
    from trivet.chat import open_policy
    from trivet.envs import make_env
    from trivet.recipe import load_section
    from trivet.recipe.schema import Tasks
    from trivet.tasks import load_tasks

    config = load_section(Tasks, {"source": source}, overrides or ())
    taskset = load_tasks(config, seed=seed)
    name = env or (config.env if "env" in config.model_fields_set else taskset.layout_env or config.env)
    judge = make_env(name, **(env_args(env_arg or ()) or config.env_args))
    known = f" (layout {taskset.layout})" if taskset.layout else ""
    typer.echo(f"{taskset.name}{known}: {len(taskset):,} tasks, environment {name}")
    with open_policy(
        model,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        context=_CONTEXT,
        slots=min(attempts, _SLOTS),
    ) as (policy, _):
        asyncio.run(_play(policy, judge, taskset.tasks[:n], attempts, deadline, seed))


async def _play(
    policy: Policy, env: Environment, tasks: Sequence[Task], attempts: int, deadline: float, seed: int
) -> None:
    from trivet.agents import Attempt
    from trivet.envs import judge_group
    from trivet.explorer.play import play as play_attempt
    from trivet.monitor.safe_text import printable
    from trivet.recipe.schema import Explorer
    from trivet.types import Group, IssueKey

    config = Explorer(deadline_s=deadline)

    async def one(task: Task, index: int) -> list[Rollout]:
        issue = IssueKey(task.id, 0)
        attempt = Attempt(f"play:{seed}", issue, str(issue), index, role="eval")
        return (await play_attempt(env, policy, task, attempt, config, lambda cause, text: None)).rollouts

    async with env:
        for number, task in enumerate(tasks, 1):
            played = await asyncio.gather(*(one(task, index) for index in range(attempts)))
            rollouts = [rollout for rollouts in played for rollout in rollouts]
            group = Group(task.id, IssueKey(task.id, 0), rollouts)
            await judge_group(env, group)
            typer.echo(f"\n=== {number} of {len(tasks)}: {printable(task.id)}")
            for rollout in group.rollouts:
                typer.echo(text_of(rollout))


def text_of(rollout: Rollout) -> str:
    """The conversation and its score, safe to print."""
    from trivet.monitor.safe_text import printable

    lines = [""]
    messages = rollout.messages or list(rollout.task.messages)
    for message in messages:
        lines += _said(message)
    answer = rollout.task.payload.get("answer")
    if isinstance(answer, str | int | float):
        lines.append(f"  known answer: {_cut(str(answer))}")
    lines.append(f"  {_score(rollout)}; {rollout.termination}, {_tokens(rollout)}")
    return printable("\n".join(lines))


def _said(message: Message) -> list[str]:
    out = []
    if message.reasoning:
        out.append(f"  {message.role} (reasoning): " + _cut(message.reasoning).replace("\n", "\n    "))
    out.append(f"  {message.role}: " + _cut(message.text).replace("\n", "\n    "))
    for call in message.tool_calls:
        out.append(f"  {message.role} calls {call.name}({_cut(str(call.arguments))})")
    return out


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} letters)"


def _score(rollout: Rollout) -> str:
    from trivet.types import Scored, Unscored

    reward = rollout.reward
    if isinstance(reward, Scored):
        parts = ", ".join(f"{name} {value:.4g}" for name, value in reward.parts.items())
        return f"score {reward.value:.4g}" + (f" ({parts})" if parts else "")
    if isinstance(reward, Unscored):
        return f"no score: {reward.cause}" + (f" ({_cut(reward.detail)})" if reward.detail else "")
    return "no score yet"


def _tokens(rollout: Rollout) -> str:
    seconds = rollout.timings.get("generate_s")
    took = "" if seconds is None else f" in {seconds:.1f} s"
    return f"{rollout.sampled_tokens} tokens{took}"
