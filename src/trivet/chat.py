"""Talking to a checkpoint: what `trivet chat` does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trivet.types import IssueKey, Message, Task, Termination

if TYPE_CHECKING:
    from trivet.agents import Conversation, Policy

_CONTEXT = 4096  # tokens of a conversation, where the model has room for more


class ChatError(RuntimeError):
    """There is no model to talk to; the message says where was looked."""


def find_model(path: Path, stage: str | None = None) -> tuple[Path, str]:
    """A model directory, or the model that a run folder's stage (default: the last done) left; and its name.

    Raises ChatError.
    """
    if (path / "config.json").is_file():
        if stage is not None:
            raise ChatError(f"{path} is a model directory; --stage is for run folders")
        return path, str(path)
    state = path / "state.json"
    if not state.is_file():
        raise ChatError(
            f"{path} holds neither a model (config.json) nor a run (state.json) with a finished stage"
        )
    stages = json.loads(state.read_text(encoding="utf-8"))["stages"]
    models = {name: facts["model"] for name, facts in stages.items() if facts.get("model")}
    if not models:
        raise ChatError(f"no stage of {path} has left a model yet")
    name = stage or list(models)[-1]
    if name not in models:
        raise ChatError(f"{path} has no model of a stage {name!r}; there are {', '.join(models)}")
    return path / models[name], f"{path}, stage {name}"


class Talk:
    """One conversation at a time. Answers stay the tokens that were sampled; only what is new is rendered."""

    def __init__(self, policy: Policy, title: str, seed: int) -> None:
        self.policy, self.title, self.seed = policy, title, seed
        self._conversation: Conversation | None = None
        self._number = 0
        self._loop = asyncio.Runner()  # one event loop for all answers: the engine's results come to it

    def start_over(self) -> None:
        """Forget what was said."""
        if self._conversation is not None:
            self.policy.engine.settle(self._conversation.session)
        self._conversation = None

    def answer(self, text: str) -> str:
        """The policy's reply, with a remark when it was cut off. Raises engine and renderer errors."""
        message = Message("user", text)
        if self._conversation is None:
            self._conversation = self._open(message)
        else:
            self._conversation.add(message)
        reply = self._loop.run(self._conversation.reply())
        ended = self._conversation.termination
        if ended is Termination.FINISHED:
            return reply.text
        self.start_over()
        return f"{reply.text}\n(cut off: {ended}; the conversation starts over)"

    def close(self) -> None:
        self.start_over()
        self._loop.close()

    def _open(self, message: Message) -> Conversation:
        from trivet.agents import Attempt

        self._number += 1
        task = Task("chat", (message,), id=f"chat-{self._number}")
        issue = IssueKey(task.id, 0)
        return self.policy.conversation(task, Attempt(f"chat:{self.seed}", issue, str(issue), 0, role="eval"))


@contextmanager
def open_policy(
    path: Path,
    *,
    stage: str | None = None,
    system: str | None,
    temperature: float,
    max_tokens: int,
    context: int = _CONTEXT,
    slots: int = 1,
) -> Iterator[tuple[Policy, str]]:
    """The model of `path` in an embedded engine, and its name; a run folder's recipe names its renderer and
    system prompt. `context` tokens are held, where the model has room for as many, of `slots` conversations.
    """
    directory, title = find_model(path, stage)
    from trivet.agents import Policy
    from trivet.engine.torch import TorchEngine
    from trivet.recipe import load_recipe
    from trivet.recipe.schema import Policy as PolicyConfig
    from trivet.recipe.schema import Sampling
    from trivet.render import get_renderer, load_tokenizer
    from trivet.runtime.build import model_context
    from trivet.runtime.quiet import hush_libraries

    hush_libraries()
    config = load_recipe(path).policy if (path / "recipe.yaml").is_file() else PolicyConfig()
    context = min(context, model_context(directory) or context)
    renderer = get_renderer(load_tokenizer(directory), config.renderer, config.template_args)
    engine = TorchEngine(str(directory), slots=slots, context=context, deterministic=False)
    try:
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
        prompt = system if system is not None else config.system_prompt
        yield Policy(engine, renderer, sampling, context=context, system_prompt=prompt), title
    finally:
        engine.close()


@contextmanager
def open_chat(
    path: Path, *, stage: str | None, system: str | None, temperature: float, max_tokens: int, seed: int
) -> Iterator[Talk]:
    """A conversation with the model of `path`, see `open_policy`."""
    with (
        open_policy(path, stage=stage, system=system, temperature=temperature, max_tokens=max_tokens) as (
            policy,
            title,
        ),
        closing(Talk(policy, title, seed)) as talk,
    ):
        yield talk
